"""Two results: where they differ, and both as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..errors import ConfigError
from .entry import Entry
from .result import AutotuningResult
from .result_text import config_text, printable

_PREFERRED = ("self", "other")


@dataclasses.dataclass(frozen=True)
class ResultDiff:
    """The calls in which two results differ; true where there are any.

    Args:
        devices: of both, in order.
        added: entries of calls that only the other result has.
        removed: entries of calls that only the first result has.
        changed: entries of both, for calls with two configs; times do not count.
    """

    devices: tuple[str, str]
    added: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    changed: tuple[tuple[Entry, Entry], ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.devices[0] != self.devices[1])

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines())) or "the same configs for the same calls"

    def _lines(self) -> Iterator[str]:
        if self.devices[0] != self.devices[1]:
            yield f"tuned for {self.devices[0]} and for {self.devices[1]}"
        for mark, entries in (("-", self.removed), ("+", self.added)):
            yield from (f"{mark} {_call(entry)}: {config_text(entry.cfg)}" for entry in entries)
        for first, second in self.changed:
            yield f"! {_call(first)}: {config_text(first.cfg)} -> {config_text(second.cfg)}"


def diff(first: AutotuningResult, second: AutotuningResult) -> ResultDiff:
    """As `AutotuningResult.diff`."""
    old, new = _by_call(first), _by_call(second)
    return ResultDiff(
        (first.device, second.device),
        added=tuple(new[call] for call in sorted(new.keys() - old.keys())),
        removed=tuple(old[call] for call in sorted(old.keys() - new.keys())),
        changed=tuple((old[c], new[c]) for c in sorted(old.keys() & new.keys()) if old[c].cfg != new[c].cfg),
    )


def merge(first: AutotuningResult, second: AutotuningResult, prefer: str | None) -> AutotuningResult:
    """As `AutotuningResult.merge`."""
    if prefer not in (None, *_PREFERRED):
        raise ConfigError(f"prefer is {prefer!r}; expected one of {', '.join(_PREFERRED)}, or None")
    if first.device != second.device:
        raise ConfigError(
            f"results are for {first.device!r} and {second.device!r}; only one device's can be merged, for a result is "
            "entered on one"
        )
    if prefer is None and (changed := diff(first, second).changed):
        calls = ", ".join(_call(entry) for entry, _ in changed)
        raise ConfigError(f"the results have two configs for {calls}; say whose is taken with prefer=")
    low, high = (second, first) if prefer == "self" else (first, second)
    by_call = _by_call(first) | _by_call(second) | _by_call(high)  # in the order of the first
    tuned = {f"{op_id_v}:{call_key}" for op_id_v, call_key in by_call}
    skipped = dict(first.skipped) | dict(second.skipped) | dict(high.skipped)
    return AutotuningResult(
        first.device,
        tuple(by_call.values()),
        skipped=tuple((label, why) for label, why in skipped.items() if label.rpartition("#")[2] not in tuned),
        versions=low.versions | high.versions,
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
    )


def _by_call(result: AutotuningResult) -> dict[tuple[str, str], Entry]:
    return {(entry.op_id_v, entry.call_key): entry for entry in result.entries}


def _call(entry: Entry) -> str:
    return f"{entry.op_id_v}:{entry.call_key} {entry.shapes}".strip()
