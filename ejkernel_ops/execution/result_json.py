"""An `AutotuningResult` as JSON text, and back: what comes from elsewhere is data, checked field by field."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from ..config.cache import Key
from ..config.choice import is_complete, why_never_legal
from ..config.neighbours import Count, Lengths, Place
from ..config.schema import from_plain, parse_json, to_json
from ..config.selection import why_illegal
from ..core.kernel import KERNELS, find_kernel
from ..errors import CacheFormatError, ConfigError
from ..registry import find_call
from ..utils.files import MAX_BYTES
from ..utils.fingerprint import device_fingerprint
from ..utils.json_lines import line_of
from .entry import Entry, conflict
from .result import AutotuningResult
from .trial import Trial

R = TypeVar("R", bound=AutotuningResult)
_FORMAT, _SCHEMA = "ejkernel_ops.AutotuningResult", 1
_PATH = re.compile(r"`\$([^`]*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")

_Ms = Annotated[float, msgspec.Meta(ge=0)] | None
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Op = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}@v[A-Za-z0-9_.-]{1,32}\Z")]


class _TrialForm(msgspec.Struct, forbid_unknown_fields=True):
    config: Any
    status: str
    ms: _Ms
    spread: float | None
    reason: str


class _EntryForm(msgspec.Struct, forbid_unknown_fields=True):
    op: _Op
    key: Annotated[str, msgspec.Meta(max_length=128)]
    config: Any
    heuristic: Any
    count: Count
    executions: Count
    shapes: str
    heuristic_ms: _Ms
    ms: _Ms
    source: str
    trials: list[_TrialForm]
    place: tuple[str, Lengths] | None = None  # older files have none


class _ResultForm(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    schema: int
    device: str
    versions: dict[str, str]
    step_ms: tuple[_Positive, _Positive] | None
    notes: list[str]
    skipped: list[tuple[str, str]]
    entries: list[_EntryForm]


def dumps(result: AutotuningResult) -> str:
    """As `AutotuningResult.dumps`."""
    body = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "device": result.device,
        "versions": result.versions,
        "step_ms": result.step_ms,
        "notes": result.notes,
        "skipped": result.skipped,
        "entries": [_entry_to_plain(entry) for entry in result.entries],
    }
    return json.dumps(body, indent=1, allow_nan=False)


def loads(cls: type[R], text: str | bytes, allow_other_device: bool, allow_unknown_ops: bool) -> R:
    """As `AutotuningResult.loads`, for a class of results."""
    result, here = read(cls, text, allow_unknown_ops, check_calls=True), device_fingerprint()
    if result.device == here:
        return result
    if not allow_other_device:
        raise CacheFormatError(
            f"the result was tuned for {result.device!r}, this is {here!r}; tune here, or pass allow_other_device=True"
        )
    return dataclasses.replace(result, device=here, notes=(*result.notes, f"tuned for {result.device}"))


def read(cls: type[R], text: str | bytes, allow_unknown_ops: bool = False, check_calls: bool = False) -> R:
    """A result of whatever device it is for: to be looked at, not to be entered.

    Args:
        cls: the class of the result.
        text: JSON text.
        allow_unknown_ops: as `AutotuningResult.loads`.
        check_calls: refuse a config that is illegal for its call, where that call was recorded here.

    Raises:
        CacheFormatError: as `AutotuningResult.loads`.
        ConfigError: an op that is not known in this process.
    """
    text, form = _parsed(text)
    entries, lines, skipped = [], [], [*form.skipped]
    for index, plain in enumerate(form.entries):
        if allow_unknown_ops and plain.op not in KERNELS:
            skipped.append((f"{plain.op}:{plain.key}", "left out: no such op was made in this process"))
            continue
        at = _Place(text, ("entries", index))
        entry = _entry_from_form(plain, at)
        if check_calls:
            _refuse_illegal(entry, form.device, at / "config")
        entries.append(entry)
        lines.append(index)
    if (pair := conflict(entries)) is not None:
        first, second = (line_of(text, ("entries", lines[i])) for i in pair)
        entry = entries[pair[1]]
        raise CacheFormatError(
            f"line {second}: another config for {entry.op_id_v}:{entry.call_key} than in line {first}; keep one of them"
        )
    return cls(
        form.device, tuple(entries), skipped=tuple(skipped), versions=form.versions, step_ms=form.step_ms,
        notes=tuple(form.notes),
    )  # fmt: skip


def _parsed(text: str | bytes) -> tuple[str, _ResultForm]:
    if len(text) > MAX_BYTES:
        raise CacheFormatError(f"larger than {MAX_BYTES >> 20} MiB")
    try:
        text = text if isinstance(text, str) else text.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CacheFormatError(f"not UTF-8: {error}") from None
    body = parse_json(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CacheFormatError("not an AutotuningResult: the field 'format' is missing or another")
    if body.get("schema") != _SCHEMA:
        raise CacheFormatError(f"schema is {body.get('schema')!r}; this version reads {_SCHEMA}")
    try:
        return text, msgspec.convert(body, _ResultForm, strict=True)
    except (msgspec.ValidationError, RecursionError, OverflowError, UnicodeEncodeError) as error:
        line = line_of(text, list(_steps(str(error))))
        raise CacheFormatError(f"line {line}: damaged AutotuningResult: {error}") from None


def _steps(message: str) -> Iterator[str | int]:
    """The path in an error of msgspec."""
    found = _PATH.search(message)
    for name, index in _STEP.findall(found[1]) if found else ():
        yield name or int(index)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A value in a text, so that what is wrong with it is said with its line."""

    text: str
    path: tuple[str | int, ...]

    def __truediv__(self, step: str | int) -> _Place:
        return _Place(self.text, (*self.path, step))

    def error(self, error: type[Exception], message: str, inside: Sequence[str | int] = ()) -> Exception:
        return error(f"line {line_of(self.text, (*self.path, *inside))}: {message}")


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


def _refuse_illegal(entry: Entry, device: str, at: _Place) -> None:
    """Refuses a config of a call that was recorded here; one that was not is checked when it is traced."""
    inv = find_call(Key(device, entry.op_id_v, entry.call_key))
    if inv is None or not is_complete(inv.kernel, entry.cfg):
        return
    if (reason := why_illegal(inv, entry.cfg)) is not None:
        raise at.error(CacheFormatError, f"the config of {entry.op_id_v} is illegal here: {reason}")


def _entry_from_form(form: _EntryForm, at: _Place) -> Entry:
    try:
        kernel = find_kernel(form.op)
    except ConfigError as error:
        raise (at / "op").error(ConfigError, str(error)) from None
    kind = kernel.config_cls or Any
    cfg = _config(form.config, kind, at / "config")
    if cfg is None:
        raise (at / "config").error(CacheFormatError, f"the config of {form.op} is null; expected a config")
    if (reason := why_never_legal(kernel, cfg)) is not None:
        raise (at / "config").error(CacheFormatError, f"the config of {form.op} is illegal here: {reason}")
    trials = tuple(
        Trial(_config(t.config, kind, at / "trials" / i / "config"), t.status, t.ms, t.spread, t.reason)
        for i, t in enumerate(form.trials)
    )
    return Entry(
        form.op, form.key, cfg,
        count=form.count, executions=form.executions, shapes=form.shapes,
        heuristic=None if form.heuristic is None else _config(form.heuristic, kind, at / "heuristic"),
        heuristic_ms=form.heuristic_ms, ms=form.ms, source=form.source, trials=trials,
        place=None if form.place is None else Place(form.place[0], tuple(map(tuple, form.place[1]))),
    )  # fmt: skip


def _config(data: Any, kind: Any, at: _Place) -> Any:
    try:
        return from_plain(data, kind)
    except CacheFormatError as error:
        raise at.error(CacheFormatError, str(error), list(_steps(str(error)))) from None
