"""A picture of an `AutotuningResult`: the gain of each call, and the times of its candidates."""

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedError
from .entry import Entry
from .result import AutotuningResult
from .result_text import by_time, counts, failures

_FORMATS = (".png", ".svg", ".pdf")
_MOST = 60  # rows; more could not be read
_BAR, _SLOWER, _DOT, _CHOSEN, _GREY = "#4878a8", "#c27a4a", "#8fa9c4", "#c1272d", "#555555"


def plot(result: AutotuningResult, path: str | os.PathLike) -> None:
    """As `AutotuningResult.plot`."""
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ConfigError(f"the suffix of {os.fspath(path)!r} is {suffix!r}; expected one of {', '.join(_FORMATS)}")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"cannot draw {path}: the folder {Path(path).parent} does not exist")
    try:
        import matplotlib.style
    except ImportError as error:
        raise UnsupportedError("plot needs matplotlib: pip install 'ejlayers[train]'") from error
    with matplotlib.style.context("default"):  # a dark style of the user's would be white on white
        _figure(result).savefig(path, dpi=150, facecolor="white")


def _figure(result: AutotuningResult) -> Any:
    from matplotlib.figure import Figure  # no pyplot: the user's figures and back end stay as they are

    entries = _rows(result)
    if not entries:
        figure = Figure(figsize=(6, 1.5))
        figure.text(0.5, 0.5, "No call was tuned: the result has no entries.", ha="center", va="center")
        return figure
    figure = Figure(figsize=(12, 1.7 + 0.52 * len(entries)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    _draw_gains(left, entries)
    _draw_candidates(right, entries)
    left.set_yticks(range(len(entries)), map(_label, entries), fontsize=8, parse_math=False)
    left.set_ylim(len(entries) - 0.4, -0.6)  # the first one on top
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    more = len(result.entries) - len(entries)
    title = f"tuned for {result.device}" + (f" (without {more} calls that take less time)" if more else "")
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _rows(result: AutotuningResult) -> list[Entry]:
    """The entries that take most of the time, the largest gain first and what was not timed last."""
    return sorted(by_time(result.entries)[:_MOST], key=lambda e: -(e.gain or 0.0))


def _label(entry: Entry) -> str:
    shapes = entry.shapes if len(entry.shapes) <= 60 else f"{entry.shapes[:57]}..."
    return f"{entry.op_id_v}\n{shapes}".strip()


def _draw_gains(axes: Any, entries: list[Entry]) -> None:
    """A bar for each entry, from 1, the heuristic, to its gain."""
    gains = [e.gain or 1.0 for e in entries]
    colours = [_BAR if gain >= 1 else _SLOWER for gain in gains]
    axes.barh(range(len(entries)), [gain - 1 for gain in gains], left=1, height=0.55, color=colours)
    axes.axvline(1, color="black", linewidth=1)
    lowest, highest = min([1.0, *gains]), max([1.1, *gains])
    room = 0.2 * (highest - lowest)
    axes.set_xlim(lowest - 0.3 * room, highest + 1.3 * room)
    for row, entry in enumerate(entries):
        text = f"{entry.gain:.2f}x" if entry.gain else f"not timed: from {entry.source}"
        axes.text(max(gains[row], 1) + 0.1 * room, row, text, va="center", fontsize=8, parse_math=False)
    axes.set_xlabel("gain: times as fast as the heuristic (line)", fontsize=9)


def _draw_candidates(axes: Any, entries: list[Entry]) -> None:
    """A dot for each candidate that was timed, relative to the heuristic; failures as text at the right."""
    shown = [(row, *_relative(entry)) for row, entry in enumerate(entries)]
    limits = _limits([ratio for _, ratios, chosen in shown for ratio in (*ratios, *chosen)])
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_xticks(*_ticks(*limits))
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.axvline(1, color="black", linewidth=1, label="heuristic", zorder=1)
    dots = [(ratio, row) for row, ratios, _ in shown for ratio in ratios]
    chosen = [(ratio, row) for row, _, found in shown for ratio in found]
    axes.scatter(*_columns(dots), s=22, color=_DOT, edgecolor="white", linewidth=0.4, alpha=0.8, label="candidate")
    axes.scatter(*_columns(chosen), s=60, marker="D", color=_CHOSEN, edgecolor="white", label="chosen", zorder=3)
    for row, entry in enumerate(entries):
        failed = failures(entry.trials)
        parts = (
            counts(failed).replace(" ", "\xa0").replace(",\xa0", ", ")
        )  # no line ends between a number and its status
        text = textwrap.fill(f"{failed.total()} failed: {parts}", 36) if failed else ""
        axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7, color=_GREY)
    axes.set_xlabel("time relative to the heuristic's, on a log axis (left is faster)", fontsize=9)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)


def _relative(entry: Entry) -> tuple[list[float], list[float]]:
    """Times of the candidates and of the chosen config, over the heuristic's."""
    base = entry.heuristic_ms
    if not base:
        return [], []
    others = [t.ms / base for t in entry.trials if t.ms and t.cfg not in (entry.cfg, entry.heuristic)]
    return others, [entry.ms / base] if entry.ms else []


def _columns(points: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [x for x, _ in points], [y for _, y in points]


def _limits(ratios: list[float]) -> tuple[float, float]:
    """The ends of the axis: all that is drawn with some room, and no less than from 0.7 to 1.4."""
    return min([0.7, *ratios]) / 1.08, max([1.4, *ratios]) * 1.08


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Powers of 2, closer on a short axis and farther on a long one."""
    octaves = math.log2(high / low)
    step = 0.5 if octaves < 4 else math.ceil(octaves / 8)
    found = [2.0 ** (step * n) for n in range(math.ceil(math.log2(low) / step), int(math.log2(high) / step) + 1)]
    return found, [f"{x:.2g}x" for x in found]
