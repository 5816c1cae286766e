"""What a layer pins: checked where it is pinned, and as text."""

from __future__ import annotations

from typing import Any

from ejkernel_ops.config.schema import leaf_fields
from ejkernel_ops.errors import ConfigError
from ejkernel_ops.kernels.config import explicit_config, unread_by_all

# What `pin` takes -> where it is.
_ATTRIBUTES = {"config": "config", "backend": "backend", "path": "kernel_path", "reproducible": "reproducible"}


def check_pins(layer: Any) -> None:
    """Refuses a config of another type or for another back end than what a layer pins.

    Args:
        layer: with `config, backend, config_type`, and perhaps `reproducible`.

    Raises:
        ConfigError: a config of another type, an unknown back end, or two different ones.
        TypeError: a `reproducible` that is no bool.
    """
    _check_config(layer, layer.config, layer.backend)
    check_reproducible(getattr(layer, "reproducible", True))


def _check_config(layer: Any, config: Any, backend: str | None) -> None:
    explicit_config(layer.config_type, config, None, backend)
    if config is not None and (reason := unread_by_all(config)):
        raise ConfigError(f"config {reason}")


def check_reproducible(reproducible: Any) -> None:
    """Refuses what does not say whether gradients of attention are to be the same bits in each run.

    Raises:
        TypeError: another type.
    """
    if not isinstance(reproducible, bool):
        raise TypeError(
            f"reproducible is {reproducible!r}; expected True, for gradients of the same bits in each run, or False, "
            "for sums in any order"
        )


def changed_pins(layer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a layer that `pin` changes.

    Args:
        layer: with `config, backend, config_type`.
        fields: of `config`, `backend` and `path` those that change; of a layer of attention also `reproducible`, and
            of one with a rotary embedding `rotary`, the config that this pins.

    Returns:
        Values by attribute.

    Raises:
        TypeError: another field, or a `reproducible` that is no bool.
        ConfigError: a config of another type, or a back end that is not the config's; those that stay count too.
    """
    rotary = getattr(layer, "rotary", None)
    known = {name: at for name, at in _ATTRIBUTES.items() if hasattr(layer, at)}
    known |= {} if rotary is None else {"rotary": "rotary"}
    if unknown := sorted(fields.keys() - known):
        raise TypeError(f"{unknown[0]} is nothing that a module pins; expected {', '.join(known)}")
    config, backend = (fields.get(name, getattr(layer, name)) for name in ("config", "backend"))
    _check_config(layer, config, backend)
    check_reproducible(fields.get("reproducible", True))
    changed = {known[name]: value for name, value in fields.items()}
    if rotary is not None and "rotary" in fields:
        changed["rotary"] = rotary.pin(config=fields["rotary"])
    return changed


def note_of_ours(layer: Any, when_not: str | None) -> str:
    """The note of a layer of ours in a report: what it pins, and when it computes as the stock one.

    Args:
        layer: with `config, backend`, and perhaps `reproducible`.
        when_not: when it does so, or `None`.

    Returns:
        Such as `pinned: backend=xla; as the stock layer: batch axes`, or nothing.
    """
    given = {} if layer.config is None else dict(leaf_fields(layer.config))
    given |= {} if layer.backend is None else {"backend": layer.backend}
    given |= {} if getattr(layer, "reproducible", True) else {"reproducible": False}
    fields = [f"{name}={value}" for name, value in given.items() if value is not None]
    notes = ["pinned: " + ", ".join(fields)] if fields else []
    return "; ".join(notes + ([f"as the stock layer: {when_not}"] if when_not else []))
