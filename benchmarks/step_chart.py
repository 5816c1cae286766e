"""A picture of whole train steps, before and after: what `train_step.py` measured of time and memory.

    python benchmarks/step_chart.py docs/benchmarks/train_step_h200.csv

Needs matplotlib (`pip install 'ejlayers[train]'`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from charts import TEXT, command, figure, series, source
from rows import read_rows


def draw(table: Path, picture: Path) -> None:
    """A row of panels for each model: time of a step, and memory at its peak."""
    rows = read_rows(table)
    models = list(dict.fromkeys(row["model"] for row in rows))
    counts = [sum(row["model"] == model for row in rows) for model in models]
    with figure(picture, 9, 1.3 + 0.42 * sum(counts) + 0.5 * len(models)) as made:
        panels = made.subplots(len(models), 2, squeeze=False, height_ratios=counts)
        for (left, right), model in zip(panels, models):
            mine = [row for row in rows if row["model"] == model]
            _bars(left, mine, "ms", "ms", [float(row["spread"]) * float(row["ms"]) for row in mine])
            _bars(right, mine, "peak_gib", "GiB", None)
            left.set_title(f"{model}: time of a step")
            right.set_title(f"{model}: memory at the peak")
            left.set_yticks(range(len(mine)), [series(row["way"]).label for row in mine])
            right.set_yticks([])
        made.suptitle(f"train steps: {source(rows[0])}", fontsize=11)


def _bars(axes: Any, rows: list[dict[str, str]], column: str, unit: str, spread: list[float] | None) -> None:
    """A bar for each way from 0, with its number and how much of the first one's that is."""
    values = [float(row[column]) for row in rows]
    colors = [series(row["way"]).color for row in rows]
    axes.barh(range(len(rows)), values, 0.62, color=colors, xerr=spread, ecolor=TEXT)
    for place, value in enumerate(values):
        share = "" if place == 0 else f", {value / values[0] - 1:+.0%}".replace("-", "\N{MINUS SIGN}")
        digits = 1 if value < 100 else 0
        axes.text(value + 0.03 * max(values), place, f"{value:.{digits}f} {unit}{share}", va="center")
    axes.set_xlim(0, 1.42 * max(values))
    axes.invert_yaxis()  # the first one on top
    axes.tick_params(axis="y", length=0)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_xticks([])


main = command(__doc__, "train_step_h200.csv", "train_step.svg", draw)

if __name__ == "__main__":
    main()
