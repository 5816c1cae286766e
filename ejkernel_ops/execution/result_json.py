"""An `AutotuningResult` as JSON text, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from ..config.neighbours import Place
from ..config.schema import from_plain, parse_json, to_json
from ..core.kernel import find_kernel
from ..errors import CacheFormatError, ConfigError
from ..utils.fingerprint import device_fingerprint
from .result import AutotuningResult, Entry
from .trial import Trial

R = TypeVar("R", bound=AutotuningResult)
_FORMAT, _SCHEMA = "ejkernel_ops.AutotuningResult", 1


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


def loads(cls: type[R], text: str | bytes, allow_other_device: bool) -> R:
    """As `AutotuningResult.loads`, for a class of results."""
    body = parse_json(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CacheFormatError("not an AutotuningResult: the field 'format' is missing or another")
    if body.get("schema") != _SCHEMA:
        raise CacheFormatError(f"schema is {body.get('schema')!r}; this version reads {_SCHEMA}")
    try:
        device = str(body["device"])
        entries = tuple(_entry_from_plain(entry) for entry in body["entries"])
        extra = _extra_from_plain(body)
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
    return cls(here, entries, **extra)


def _extra_from_plain(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result besides its device and entries."""
    return {
        "skipped": tuple((str(label), str(reason)) for label, reason in body["skipped"]),
        "versions": {str(k): str(v) for k, v in body["versions"].items()},
        "step_ms": None if body["step_ms"] is None else tuple(map(float, body["step_ms"])),
        "notes": tuple(map(str, body["notes"])),
    }


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
