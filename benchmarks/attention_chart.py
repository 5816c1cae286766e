"""A chart of what `attention.py` measured, and the project's targets against it as Markdown tables.

    python benchmarks/attention_chart.py docs/benchmarks/attention_h200.csv

Draws throughput against length for causal attention; needs matplotlib (`pip install 'ejlayers[train]'`). Prints the
targets and each point.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from charts import command, figure, series, source
from rows import read_rows

DIRECTIONS = ("forward", "forward+backward")
CONTENDERS = ("cudnn", "tokamax", "tokamax_triton", "xla", "ours_triton", "chosen", "chosen_any_order")


class Measured:
    """The rows of a table, and what follows from them."""

    def __init__(self, rows: Iterable[dict[str, str]]):
        self.rows = [row for row in rows if row["ms"]]
        self.by_name = {(r["point"], r["direction"], r["contender"]): r for r in self.rows}
        self.points = list(dict.fromkeys(r["point"] for r in self.rows))

    def ms(self, point: str, direction: str, contender: str) -> float | None:
        """Median time in milliseconds; `None` where it was not measured."""
        row = self.by_name.get((point, direction, contender))
        return None if row is None else float(row["ms"])

    def of(self, point: str) -> dict[str, str]:
        """Any row of a point."""
        return next(row for row in self.rows if row["point"] == point)

    def speedup(self, point: str, direction: str, contender: str, others: Iterable[str]) -> float | None:
        """How many times as fast as the fastest of some others."""
        mine = self.ms(point, direction, contender)
        theirs = [ms for other in others if (ms := self.ms(point, direction, other)) is not None]
        return min(theirs) / mine if mine and theirs else None

    def eligible(self, point: str, direction: str, contender: str) -> list[str]:
        """Our own contenders with a fixed back end that may stand in for what was chosen."""
        return [
            row["contender"]
            for row in self.rows
            if (row["point"], row["direction"]) == (point, direction)
            and row["contender"].startswith("ours_")
            and (contender == "chosen_any_order" or row["deterministic"] == "True")
        ]


@dataclasses.dataclass(frozen=True)
class Target:
    """A number to reach; `values` gives it at each place where it was measured, `joined` makes them one."""

    what: str
    goal: float
    values: Callable[[Measured], dict[str, float]]
    joined: Callable[[list[float]], float] = min
    at_most: bool = False

    def row(self, measured: Measured) -> tuple[str, ...]:
        """What, goal, reached, where it is worst, whether it is reached."""
        values = self.values(measured)
        goal = f"{'at most' if self.at_most else 'at least'} {self.goal:g}"
        if not values:
            return self.what, goal, "", "not measured", ""
        reached = self.joined(list(values.values()))
        worst = (max if self.at_most else min)(values, key=lambda name: values[name])
        good = reached <= self.goal if self.at_most else reached >= self.goal
        where = f"{worst}: {values[worst]:.3g}, of {len(values)}"
        if self.joined is not geometric_mean and len(values) > 1:
            where += f", geometric mean {geometric_mean(list(values.values())):.3g}"
        return self.what, goal, f"{reached:.3g}", where, "yes" if good else "no"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def ratios(
    contender: str, others: Any, points: Callable[[dict[str, str]], bool] = lambda row: True, directions=DIRECTIONS
) -> Callable[[Measured], dict[str, float]]:
    """A contender's speed over that of the fastest of others, at some points."""

    def values(measured: Measured) -> dict[str, float]:
        found = {}
        for point in filter(lambda name: points(measured.of(name)), measured.points):
            for direction in directions:
                names = others(measured, point, direction) if callable(others) else others
                if (ratio := measured.speedup(point, direction, contender, names)) is not None:
                    found[f"{point} {direction}"] = ratio
        return found

    return values


def best_eligible(contender: str, direction: str) -> Callable[[Measured], dict[str, float]]:
    """What was chosen over the best back end, where it was tuned: elsewhere it is that by construction."""
    return ratios(
        contender,
        lambda measured, point, at: measured.eligible(point, at, contender),
        lambda row: row["tuned"] == "True",
        (direction,),
    )


def window_over_full(measured: Measured) -> dict[str, float]:
    """The time with a window over that of full causal attention on the same back ends, each with its heuristic."""
    found = {}
    for direction in DIRECTIONS:
        for name in ("ours_triton", "ours_cudnn", "ours_cudnn_triton"):
            both = [measured.ms(point, direction, name) for point in ("window_16k", "d128_causal_16k")]
            if all(both):
                found[f"{name} {direction}"] = both[0] / both[1]
    return found


def our_errors(measured: Measured) -> dict[str, float]:
    return {
        " ".join(key): float(row["error_vs_cudnn"])
        for key, row in measured.by_name.items()
        if row["error_vs_cudnn"] and row["deterministic"]
    }


def tuning_seconds(measured: Measured) -> dict[str, float]:
    return {row["point"]: float(row["tuning_s"]) for row in measured.rows if row["tuning_s"]}


def _is(**wanted: str) -> Callable[[dict[str, str]], bool]:
    return lambda row: all(row[name] == value for name, value in wanted.items())


def _between(least: int, most: int, **wanted: str) -> Callable[[dict[str, str]], bool]:
    return lambda row: _is(kind="grid", **wanted)(row) and least <= int(row["length"]) <= most


def targets() -> list[Target]:
    """The project's."""
    found = []
    for name, text in (("chosen", "chosen"), ("chosen_any_order", "chosen, sums in any order,")):
        for direction in DIRECTIONS if name == "chosen" else DIRECTIONS[1:]:
            eligible = best_eligible(name, direction)
            found.append(Target(f"{text} {direction} against the best eligible back end", 0.98, eligible))
            peers = ratios(name, ("cudnn", "tokamax"), directions=(direction,))
            found.append(Target(f"{text} {direction} against the better of cuDNN and tokamax", 0.87, peers))
    triton = "Triton forward against cuDNN, "
    for what, goal, points in (
        ("D128 causal, length >= 4k", 0.68, _between(4096, 1 << 30, head_dim="128", causal="True")),
        ("D64 causal, 1k to 4k", 0.80, _between(1024, 4096, head_dim="64", causal="True")),
    ):
        found.append(Target(triton + what, goal, ratios("ours_triton", ("cudnn",), points, DIRECTIONS[:1])))
    own = ratios("ours_triton", ("tokamax_triton",), directions=DIRECTIONS[1:])
    found.append(Target("Triton forward+backward against tokamax's Triton, geometric mean", 1.15, own, geometric_mean))
    for kind, goal in (("packed", 2.5), ("bias", 2.0), ("bias gradient", 2.0), ("mask", 1.5)):
        found.append(Target(f"{kind}: chosen against cuDNN", goal, ratios("chosen", ("cudnn",), _is(kind=kind))))
    found.append(Target("window 1024 at 16k: time over full causal", 0.19, window_over_full, max, at_most=True))
    for name in ("chosen", "chosen_any_order"):
        gpt2 = ratios(name, ("cudnn",), _is(kind="gpt2"), DIRECTIONS[1:])
        found.append(Target(f"B16 H12 S1024 D64 causal forward+backward: {name} against cuDNN", 1.0, gpt2))
    found.append(Target("error over cuDNN's", 1.2, our_errors, max, at_most=True))
    found.append(Target("cold tuning of forward and backward, s", 60, tuning_seconds, max, at_most=True))
    return found


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, without the columns that have nothing."""
    heads, rows = list(heads), [list(row) for row in rows]
    filled = [i for i in range(len(heads)) if not rows or heads[i] == "" or any(row[i] for row in rows)]
    lines = [[line[i] for i in filled] for line in (heads, ["---"] * len(heads), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def target_table(measured: Measured) -> str:
    heads = ("what", "goal", "reached", "worst", "good")
    return markdown(heads, (target.row(measured) for target in targets()))


def point_table(measured: Measured) -> str:
    """Milliseconds of each contender at each point, and what was chosen over cuDNN."""
    shown = [name for name in CONTENDERS if any(row["contender"] == name for row in measured.rows)]
    rows = []
    for point in measured.points:
        for direction in DIRECTIONS:
            times = [measured.ms(point, direction, name) for name in shown]
            if any(times):
                over = [measured.speedup(point, direction, "chosen", (name,)) for name in ("cudnn", "tokamax")]
                cells = [
                    *("" if ms is None else f"{ms:.3f}" for ms in times),
                    *("" if x is None else f"{x:.2f}" for x in over),
                ]
                config = measured.by_name.get((point, direction, "chosen"), {})
                text = [config.get(name, "").split(" ")[0] for name in ("forward_config", "backward_config")]
                rows.append([point, direction, *cells, ", ".join(filter(None, text))])
    names = (f"{series(name).label}, ms" for name in shown)
    return markdown(["point", "direction", *names, "chosen / cuDNN", "chosen / tokamax", "chosen is"], rows)


def draw(measured: Measured, path: Path) -> None:
    """Throughput against length, a column for each head_dim, a row for each direction."""
    grid = [row for row in measured.rows if row["kind"] == "grid" and row["causal"] == "True"]
    dims = sorted({int(row["head_dim"]) for row in grid})
    if not dims:
        raise SystemExit("the table has no causal point of the grid, so there is nothing to draw")
    with figure(path, 1.2 + 3.6 * len(dims), 7.2) as made:
        panels = made.subplots(2, len(dims), squeeze=False, sharey="row", sharex="col")
        handles: dict[str, Any] = {}
        for line, direction in zip(panels, DIRECTIONS):
            rows = [row for row in grid if row["direction"] == direction]
            for axes, dim in zip(line, dims):
                handles |= _panel(axes, [row for row in rows if int(row["head_dim"]) == dim])
                axes.set_title(f"{direction}, head_dim {dim}")
            line[0].set(ylabel="TFLOP/s", ylim=(0, 1.05 * max(float(row["tflops"]) for row in rows) or 1))
        for axes in panels[-1]:
            axes.set_xlabel("length")
        made.legend(handles=list(handles.values()), loc="outside lower center", ncols=4)
        made.suptitle(f"causal attention, bfloat16, 16384 tokens, 2048 wide: {source(grid[0])}", fontsize=12)


def _panel(axes: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Draws one direction of one head_dim; the lines by contender."""
    handles = {}
    for name in CONTENDERS:
        mine = sorted((int(row["length"]), float(row["tflops"])) for row in rows if row["contender"] == name)
        if mine:
            style, size = series(name), 8 if name == "cudnn" else 6
            (handles[name],) = axes.plot(
                *zip(*mine), style.line, color=style.color, marker=style.marker, markersize=size, label=style.label
            )
    lengths = sorted({int(row["length"]) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.grid()
    return handles


def _draw_and_print(table: Path, picture: Path) -> None:
    measured = Measured(read_rows(table))
    print(target_table(measured), point_table(measured), sep="\n\n")
    draw(measured, picture)


main = command(__doc__, "attention_h200.csv", "attention.svg", _draw_and_print)


if __name__ == "__main__":
    main()
