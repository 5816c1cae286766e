"""How a config is chosen: tiers in order, each filling what the ones before left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError, EjkernelError, UnsupportedError
from .schema import leaf_fields, merge


@dataclasses.dataclass(frozen=True)
class Choice:
    """A complete config and where each part of it came from.

    Args:
        cfg: the config.
        sources: `(dotted field, tier)` pairs.
        notes: why a tier or back end was passed over.
    """

    cfg: Any
    sources: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The tiers that were used, first the one that decided most."""
        tiers = [tier for _, tier in self.sources]
        return "+".join(sorted(set(tiers), key=lambda t: (-tiers.count(t), tiers.index(t)))) or "heuristic"


def combine(inv: Any, tiers: Iterable[tuple[str, Any]]) -> Choice:
    """Merges tiers, the strongest first; a heuristic must be the last of them.

    The first tier that names a back end fixes it; tiers for another back end are passed over.
    """
    kernel, cfg, sources, notes, filled = inv.kernel, None, {}, [], True
    for tier, given in tiers:
        if callable(given):  # the last resort
            try:
                given = given(getattr(cfg, "backend", None))
            except ConfigError:
                if cfg is None or kernel.fields is not None:
                    raise
                break  # nothing says that a field of this kernel's configs may not stay open
            given = _fitting(kernel, inv, cfg, given)
        if given is None:
            continue
        if filled := (reason := _why_passed_over(kernel, inv, tier, cfg, given)) is None:
            before = {name for name, value in leaf_fields(cfg) if value is not None} if cfg is not None else set()
            cfg = merge(cfg, given)
            sources |= {name: tier for name, value in leaf_fields(cfg) if value is not None and name not in before}
            if is_complete(kernel, cfg):
                break
        else:
            notes.append(reason)
    if cfg is None or not filled:
        missing = "no config" if cfg is None else f"{cfg} leaves fields open"
        raise ConfigError(f"{missing} for {inv!r}: {'; '.join(notes) or 'no tier has one'}. Pass a config to the call")
    if (reason := unread(kernel, cfg)) is not None:
        raise ConfigError(f"config of {kernel.op_id} {reason}")
    if sources.get("backend", "call") != "call":  # it was a choice, and these were not among what it was made of
        notes += [text for text in kernel.missed(inv) if text not in notes]
    given = {"call", "overlay"} & set(sources.values())  # of a person, or in another's file; caches are checked before
    if given and kernel.has_rule and (reason := kernel.illegal(inv, cfg)) is not None:
        raise ConfigError(f"config of {kernel.op_id} is {cfg}, which is illegal for {inv!r}: {reason}")
    return Choice(cfg, tuple(sorted(sources.items())), tuple(notes))


def _fitting(kernel: Any, inv: Any, cfg: Any, heuristic: Any) -> Any:
    """The heuristic, or where it is illegal with what is fixed the first candidate that is not."""
    if cfg is None or not kernel.has_rule:
        return heuristic

    def fits(given: Any) -> bool:
        passed = _why_passed_over(kernel, inv, "heuristic", cfg, given) is None
        return passed and kernel.illegal(inv, merge(cfg, given)) is None

    return heuristic if fits(heuristic) else next(filter(fits, kernel.all_candidates(inv)), heuristic)


def _why_passed_over(kernel: Any, inv: Any, tier: str, cfg: Any, given: Any) -> str | None:
    """Why a tier's config cannot fill what stronger ones left open; `None` where it can."""
    if (kind := other_type(inv, given)) is not None and (kernel.config_cls is not None or tier != "call"):
        return f"{tier} passed over: it is a {type(given).__name__}, not a {kind.__name__}"
    backend, fixed = getattr(given, "backend", None), getattr(cfg, "backend", None)
    if fixed is not None and backend not in (None, fixed):
        return f"{tier} is for {backend}, {fixed} was asked for"
    if fixed is None and backend is not None and (reason := kernel.why_not(inv, backend)):
        if tier == "call":
            raise UnsupportedError(f"{kernel.op_id_v}: backend={backend!r} was asked for, but {reason}")
        return f"{tier} passed over: {reason}"
    return None


def other_type(inv: Any, cfg: Any) -> type | None:
    """The type of a kernel's configs, where one is of another; `None` where it fits.

    A kernel that declares none has configs of the type of its heuristic, if that has one.
    """
    kernel = inv.kernel
    if kernel.config_cls is not None:
        return None if isinstance(cfg, kernel.config_cls) else kernel.config_cls
    try:
        own = kernel.variant("heuristic_cfg", None, inv.platform, inv)(inv)
    except (EjkernelError, NotImplementedError):  # it has none, or none for this call
        return None
    return None if own is None or type(cfg) is type(own) else type(own)


def is_complete(kernel: Any, cfg: Any) -> bool:
    """Whether all that the back end of a config reads is set."""
    values, backend = dict(leaf_fields(cfg)), getattr(cfg, "backend", None)
    read = values if kernel.fields is None or backend is None else kernel.fields.get(backend, ())
    return all(values.get(name) is not None for name in read)


def _is_read(kernel: Any, cfg: Any, name: str) -> bool:
    fields = kernel.fields
    backend = getattr(cfg, "backend", None)
    return name == "backend" or fields is None or backend is None or name in fields.get(backend, ())


def unread(kernel: Any, cfg: Any) -> str | None:
    """The first field that is set and that the back end does not read, in words; `None` where there is none."""
    for name, value in leaf_fields(cfg):
        if value is not None and not _is_read(kernel, cfg, name):
            takes = ", ".join(kernel.fields.get(cfg.backend, ())) or "none"
            return f"sets {name}={value!r}, which the {cfg.backend} back end does not have; it takes {takes}"
    return None


def why_never_legal(kernel: Any, cfg: Any) -> str | None:
    """Why a config can be used for no call of a kernel at all; `None` where it may be for some."""
    backend = getattr(cfg, "backend", None)
    if backend is not None and backend not in kernel.backends:
        return f"{kernel.op_id} has no {backend} version; it has {', '.join(kernel.backends) or 'run alone'}"
    reason = unread(kernel, cfg)
    return None if reason is None else f"it {reason}"


def describe(choice: Choice) -> str:
    """A choice as one line: `field=value ... | source | notes`."""
    fields = " ".join(f"{n}={v}" if n else str(v) for n, v in leaf_fields(choice.cfg) if v is not None)
    sources = ",".join(f"{n}:{t}" if n else t for n, t in choice.sources)
    return " | ".join([fields, sources, "; ".join(choice.notes)])


def parse_description(text: str) -> tuple[dict[str, str], dict[str, str], str]:
    """What `describe` wrote: fields by dotted name, the tier of each, notes."""
    fields, sources, notes = ([*text.split(" | "), "", "", ""])[:3]
    named = [field.rpartition("=") for field in fields.split()]  # a config that is no dataclass has no name
    tiers = [source.rpartition(":") for source in sources.split(",") if source]
    return {name: value for name, _, value in named}, {name: tier for name, _, tier in tiers}, notes.strip()
