"""An `AutotuningResult` as text for people: a table and the lines below it, plain or in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ..config.schema import leaf_fields
from .entry import Entry
from .result import AutotuningResult
from .trial import Trial

COLUMNS = ("op", "operands", "calls", "back end", "config", "heuristic ms", "chosen ms", "gain", "source")
_RIGHT = ("calls", "heuristic ms", "chosen ms", "gain")
_NOT_RUN = ("illegal", "not_tried")  # known before, or not reached: neither tells of a kernel that failed


def to_text(result: AutotuningResult) -> str:
    """The table and the lines below it, plain."""
    from ..utils.text_table import text_table  # rich, which only printing needs

    rows = [[*map(printable, row)] for row in _rows(result)]
    table = text_table(COLUMNS, rows, title=printable(f"tuned for {result.device}"), right=_RIGHT)
    return "\n".join([table, *map(printable, _footer(result))])


def to_markdown(result: AutotuningResult) -> str:
    """The table and the lines below it, in Markdown."""
    lines = [f"Tuned for {_escaped(result.device)}", ""]
    if result.entries:
        lines += [_markdown_row(COLUMNS), _markdown_row("--:" if name in _RIGHT else "---" for name in COLUMNS)]
        lines += [_markdown_row(map(_escaped, row)) for row in _rows(result)]
        lines.append("")
    return "\n".join([*lines, *(f"- {_escaped(line)}" for line in _footer(result))])


def printable(text: str) -> str:
    """Text without what a terminal obeys, such as colours: a file of another's may hold any."""
    return "".join(c if c.isprintable() else " " for c in text)


def config_text(cfg: Any, without: str = "") -> str:
    """What a config sets, by the last part of each name."""
    fields = [(name.split(".")[-1], value) for name, value in leaf_fields(cfg) if value is not None and name != without]
    return " ".join(f"{name}={value}" if name else str(value) for name, value in fields)


def failures(trials: Iterable[Trial]) -> Counter[str]:
    """How many candidates failed, by status; those that were never run are not among them."""
    return Counter(t.status for t in trials if t.status not in ("timed", *_NOT_RUN))


def counts(failed: Counter[str]) -> str:
    """Counts as text, the largest first: `2 out_of_memory, 1 wrong`."""
    return ", ".join(f"{number} {status}" for status, number in failed.most_common())


def failures_of(trials: Iterable[Trial]) -> str:
    """The failures among candidates as text: `3 of 24 candidates failed: 2 out_of_memory, 1 wrong`."""
    run = [trial for trial in trials if trial.status not in _NOT_RUN]
    failed = failures(run)
    return f"{failed.total()} of {len(run)} candidates failed: {counts(failed)}" if failed else ""


def _reasons(trials: Iterable[Trial]) -> Iterator[str]:
    """The first reason of each status, how many more there are, and where to find them; illegal ones are no news."""
    first: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.status not in ("timed", "illegal"):
            first.setdefault(trial.status, []).append(trial)
    for status, found in first.items():
        more = f" (and {len(found) - 1} more in entry.trials)" if len(found) > 1 else ""
        yield f"  {status}: {found[0].reason}{more}"


def by_time(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in order; those that take most of the time come first."""
    return sorted(entries, key=lambda e: -(e.heuristic_ms or 0.0) * e.executions)


def _rows(result: AutotuningResult) -> Iterator[list[str]]:
    return map(_cells, by_time(result.entries))


def _cells(e: Entry) -> list[str]:
    """An entry as a row of text."""
    calls = str(e.count) if e.executions == e.count else f"{e.count} (x{e.executions // max(e.count, 1)})"
    kept = "" if e.heuristic is None or e.cfg != e.heuristic or e.source == "heuristic" else " (heuristic)"
    times = [_number(e.heuristic_ms), _number(e.ms), f"{e.gain:.2f}x" if e.gain else "-"]
    back_end = getattr(e.cfg, "backend", None) or "-"
    return [e.op_id_v, e.shapes, calls, back_end, config_text(e.cfg, without="backend"), *times, e.source + kept]


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"


def _footer(result: AutotuningResult) -> Iterator[str]:
    if not result.entries and not result.skipped:
        yield "no kernels in this program: ejlayers.swap(model) puts them into a model"
    if result.step_ms is not None and result.step_ms[0] == result.step_ms[1]:
        yield f"whole step: {result.step_ms[0]:.1f} ms; no config that was tried is better than the heuristics"
    elif result.step_ms is not None:
        before, after = result.step_ms
        yield f"whole step: {before:.1f} ms with heuristics, {after:.1f} ms with it ({before / after:.2f}x)"
    for entry in by_time(result.entries):
        if told := failures_of(entry.trials):
            yield f"{f'{entry.op_id_v} {entry.shapes}'.strip()}: {told}"
        yield from _reasons(entry.trials)
    for label, reason in result.skipped:
        yield f"not tuned: {label}: {reason}"
    yield from result.notes
    yield f"digest {result.digest[:16]}  " + "  ".join(f"{name} {version}" for name, version in result.versions.items())


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    return re.sub(r"([\\|`*<])", r"\\\1", " ".join(printable(text).split()))
