"""`AutotuningResult`: what was tuned, as a value that is printed, stored, merged, and entered around training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax

from ..config.cache import Key
from ..config.neighbours import Place, remember_places
from ..config.schema import from_plain, leaf_fields, parse_json, to_json
from ..core.kernel import find_kernel
from ..core.snapshot import Reentrant, entered, overlay_digest, with_overlay
from ..errors import CacheFormatError, ConfigError
from ..utils.files import replace_file
from ..utils.fingerprint import device_fingerprint
from .trial import Trial

F = TypeVar("F", bound=Callable)
_FORMAT, _SCHEMA = "ejkernel_ops.AutotuningResult", 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """The config of one call, and how it was found.

    Args:
        op_id_v: name and version of the kernel.
        call_key: 16 hex digits of the call.
        cfg: the config.
        count: how often the tuned program makes this call.
        executions: the same times the lengths of the loops around it.
        shapes: the operands, for people.
        heuristic: the config without tuning.
        heuristic_ms: its time, in milliseconds.
        ms: the time of `cfg`, measured in the same rounds.
        source: `"tuned"`, the cache that it came from, or `"heuristic"` where every other config failed
            or did not pay in the whole step.
        trials: all that was tried.
        place: where the call lies among those of its kernel, for untuned shapes near it.

    Raises:
        ConfigError: no config.

    Example:
        >>> Entry("matmul@v1", "0123456789abcdef", 32, heuristic_ms=3.0, ms=2.0).gain
        1.5
    """

    op_id_v: str
    call_key: str
    cfg: Any
    _: dataclasses.KW_ONLY
    count: int = 1
    executions: int = 1
    shapes: str = ""
    heuristic: Any = None
    heuristic_ms: float | None = None
    ms: float | None = None
    source: str = "tuned"
    trials: tuple[Trial, ...] = ()
    place: Place | None = None

    def __post_init__(self):
        if self.cfg is None:
            raise ConfigError(f"cfg of {self.op_id_v}:{self.call_key} is None; expected a config")

    @property
    def gain(self) -> float | None:
        """How many times as fast as the heuristic."""
        return self.heuristic_ms / self.ms if self.heuristic_ms and self.ms else None


def versions() -> dict[str, str]:
    """What the timings depend on besides the device."""
    return {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}


@dataclasses.dataclass(frozen=True)
class AutotuningResult(Reentrant):
    """Tuned configs: inside `with result:` every call that they are for uses them, in jitted functions too.

    A function that is already jitted retraces once when it is first called inside; leaving, and entering
    a result of equal content, never retraces. The context may be nested, repeated and used in threads.

    Args:
        device: fingerprint of the device that was tuned for.
        entries: configs by call.
        skipped: `(label, reason)` of each label that was not tuned.
        versions: versions of what the timings depend on.
        step_ms: time of the whole step with heuristics and with these configs, in milliseconds.
        notes: what else the reader should know.

    Example:
        >>> from ejkernel_ops import device_fingerprint
        >>> result = AutotuningResult(device_fingerprint(), ())
        >>> with result:
        ...     pass
        >>> AutotuningResult.loads(result.dumps()) == result
        True
    """

    device: str
    entries: tuple[Entry, ...]
    _: dataclasses.KW_ONLY
    skipped: tuple[tuple[str, str], ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=versions, hash=False)
    step_ms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    def as_overlay(self) -> dict[Key, Any]:
        """The configs by key, as `overlay_cache` takes them."""
        return {Key(self.device, e.op_id_v, e.call_key): e.cfg for e in self.entries}

    @functools.cached_property
    def _overlay(self) -> dict[Key, Any]:
        return self.as_overlay()

    @functools.cached_property
    def _placed(self) -> dict[Key, tuple[Place, Any]]:
        return {
            Key(self.device, e.op_id_v, e.call_key): (e.place, e.heuristic) for e in self.entries if e.place is not None
        }

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the configs and of what they are for, equal in every process; timings do not count."""
        return overlay_digest(self._overlay)

    def _open(self) -> contextlib.AbstractContextManager:
        remember_places(self._placed)
        return entered(functools.partial(with_overlay, configs=self._overlay, digest=self.digest))

    def wrap(self, fn: F) -> F:
        """A function that enters the result around each call: other jitted work is not retraced.

        Args:
            fn: a function, jitted or not.

        Returns:
            A function with the same arguments.
        """

        @functools.wraps(fn)
        def wrapped(*args, **kwargs):
            with self:
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    def compile(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Compiles a jitted function ahead of time with these configs.

        Args:
            step: a function, or what `jax.jit`, `nnx.jit` or `eqx.filter_jit` returns.
            *args: its arguments, abstract ones too.
            **kwargs: its keyword arguments.

        Returns:
            What `step.lower(...).compile()` returns: it can be called anywhere.
        """
        step = step if hasattr(step, "lower") else jax.jit(step)
        with self:
            return step.lower(*args, **kwargs).compile()

    def __or__(self, other: AutotuningResult) -> AutotuningResult:
        """Both results; of calls that are in both, the other's config.

        Raises:
            ConfigError: results of two devices.
        """
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        if self.device != other.device:
            raise ConfigError(f"results are for {self.device!r} and {other.device!r}; only one device's can be merged")
        merged = {(e.op_id_v, e.call_key): e for e in (*self.entries, *other.entries)}
        skipped = dict(self.skipped) | dict(other.skipped)
        return AutotuningResult(
            self.device,
            tuple(merged.values()),
            skipped=tuple(skipped.items()),
            versions=self.versions | other.versions,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )

    # JSON

    def dumps(self) -> str:
        """The result as JSON text.

        Raises:
            ConfigError: a config without a JSON form, or whose type its kernel does not declare.
        """
        body = {
            "format": _FORMAT,
            "schema": _SCHEMA,
            "device": self.device,
            "versions": self.versions,
            "step_ms": self.step_ms,
            "notes": self.notes,
            "skipped": self.skipped,
            "entries": [_entry_to_plain(entry) for entry in self.entries],
        }
        return json.dumps(body, indent=1)

    @classmethod
    def loads(cls, text: str | bytes, *, allow_other_device: bool = False) -> AutotuningResult:
        """Reads JSON text; runs no code of it and imports nothing.

        Args:
            text: what `dumps` returned.
            allow_other_device: use configs that were tuned for another device here.

        Returns:
            The result.

        Raises:
            CacheFormatError: not a result, damaged, or of another device.
            ConfigError: an op that is not known in this process.
        """
        body = parse_json(text)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise CacheFormatError("not an AutotuningResult: the field 'format' is missing or another")
        if body.get("schema") != _SCHEMA:
            raise CacheFormatError(f"schema is {body.get('schema')!r}; this version reads {_SCHEMA}")
        try:
            device = str(body["device"])
            entries = tuple(_entry_from_plain(entry) for entry in body["entries"])
            extra = {
                "skipped": tuple((str(label), str(reason)) for label, reason in body["skipped"]),
                "versions": {str(k): str(v) for k, v in body["versions"].items()},
                "step_ms": None if body["step_ms"] is None else tuple(map(float, body["step_ms"])),
                "notes": tuple(map(str, body["notes"])),
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, (ConfigError, CacheFormatError)):
                raise
            raise CacheFormatError(f"damaged AutotuningResult: {type(error).__name__}: {error}") from None
        here = device_fingerprint()
        if device != here:
            if not allow_other_device:
                raise CacheFormatError(
                    f"the result was tuned for {device!r}, this is {here!r}; tune here, or pass allow_other_device=True"
                )
            extra["notes"] += (f"tuned for {device}",)
            device = here
        return cls(device, entries, **extra)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the result to a file, which is replaced as a whole.

        Raises:
            FileNotFoundError: the folder does not exist.
            ConfigError: as `dumps`.
        """
        replace_file(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike, *, allow_other_device: bool = False) -> AutotuningResult:
        """Reads a file that `save` wrote; see `loads`."""
        try:
            return cls.loads(Path(path).read_bytes(), allow_other_device=allow_other_device)
        except CacheFormatError as error:
            raise CacheFormatError(f"{path}: {error}") from None

    # Text

    def __str__(self) -> str:
        from ..utils.text_table import text_table  # rich, which only printing needs

        columns = ("op", "operands", "calls", "back end", "config", "heuristic ms", "chosen ms", "gain", "source")
        entries = sorted(self.entries, key=lambda e: -(e.heuristic_ms or 0.0) * e.executions)
        right = ("calls", "heuristic ms", "chosen ms", "gain")
        table = text_table(columns, map(_cells, entries), title=f"tuned for {self.device}", right=right)
        return "\n".join([table, *self._footer()])

    def _footer(self) -> Iterable[str]:
        if not self.entries and not self.skipped:
            yield "no kernels in this program: ejlayers.swap(model) puts them into a model"
        if self.step_ms is not None and self.step_ms[0] == self.step_ms[1]:
            yield f"whole step: {self.step_ms[0]:.1f} ms; no config that was tried is better than the heuristics"
        elif self.step_ms is not None:
            before, after = self.step_ms
            yield f"whole step: {before:.1f} ms with heuristics, {after:.1f} ms with it ({before / after:.2f}x)"
        for label, reason in self.skipped:
            yield f"not tuned: {label}: {reason}"
        yield from self.notes
        yield f"digest {self.digest[:16]}  " + "  ".join(f"{name} {version}" for name, version in self.versions.items())


def _cells(e: Entry) -> list[str]:
    """An entry as a row of text."""
    fields = [
        f"{name.split('.')[-1]}={value}"
        for name, value in leaf_fields(e.cfg)
        if value is not None and name != "backend"
    ]
    calls = str(e.count) if e.executions == e.count else f"{e.count} (x{e.executions // max(e.count, 1)})"
    kept = "" if e.heuristic is None or e.cfg != e.heuristic else " (heuristic)"
    times = [_number(e.heuristic_ms), _number(e.ms), f"{e.gain:.2f}x" if e.gain else "-"]
    return [
        e.op_id_v,
        e.shapes,
        calls,
        getattr(e.cfg, "backend", None) or "-",
        " ".join(fields),
        *times,
        e.source + kept,
    ]


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"


def _entry_to_plain(entry: Entry) -> dict[str, Any]:
    kernel = find_kernel(entry.op_id_v)
    if kernel.config_cls is None and dataclasses.is_dataclass(entry.cfg):
        raise ConfigError(f"{entry.op_id_v} does not declare the type of its configs; set config_cls to store them")
    numbers = {name: getattr(entry, name) for name in ("count", "executions", "shapes", "heuristic_ms", "ms", "source")}
    trials = [
        {"config": json.loads(to_json(t.cfg)), "status": t.status, "ms": t.ms, "spread": t.spread, "reason": t.reason}
        for t in entry.trials
    ]
    heuristic = None if entry.heuristic is None else json.loads(to_json(entry.heuristic))
    config = json.loads(to_json(entry.cfg))
    return {
        "op": entry.op_id_v,
        "key": entry.call_key,
        "config": config,
        "heuristic": heuristic,
        **numbers,
        "trials": trials,
        "place": None if entry.place is None else [entry.place.kind, entry.place.lengths],
    }


def _entry_from_plain(data: dict[str, Any]) -> Entry:
    kernel = find_kernel(data["op"])
    kind = kernel.config_cls or Any
    trials = tuple(
        Trial(from_plain(t["config"], kind), str(t["status"]), t["ms"], t["spread"], str(t["reason"]))
        for t in data["trials"]
    )
    return Entry(
        str(data["op"]),
        str(data["key"]),
        from_plain(data["config"], kind),
        count=int(data["count"]),
        executions=int(data["executions"]),
        shapes=str(data["shapes"]),
        heuristic=None if data["heuristic"] is None else from_plain(data["heuristic"], kind),
        heuristic_ms=data["heuristic_ms"],
        ms=data["ms"],
        source=str(data["source"]),
        trials=trials,
        place=_place_from_plain(data.get("place")),  # older files have none
    )


def _place_from_plain(data: Any) -> Place | None:
    if data is None:
        return None
    kind, lengths = data
    return Place(str(kind), tuple(tuple(map(int, axes)) for axes in lengths))
