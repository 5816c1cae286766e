"""A picture of the memory that a train step needs, by batch size: what `memory.py` wrote.

    python benchmarks/memory_chart.py docs/benchmarks/memory_h200.csv

Needs matplotlib (`pip install 'ejlayers[train]'`).
"""

from __future__ import annotations

from pathlib import Path

from charts import command, figure, series, source
from rows import read_rows


def draw(table: Path, picture: Path) -> None:
    """A panel for each model, a line for each way."""
    rows = read_rows(table)
    models = list(dict.fromkeys(row["model"] for row in rows))
    with figure(picture, 0.9 + 5.2 * len(models), 4) as made:
        for axes, model in zip(made.subplots(1, len(models), squeeze=False)[0], models):
            mine = [row for row in rows if row["model"] == model]
            for way in dict.fromkeys(row["way"] for row in mine):
                points = [(int(row["batch"]), float(row["peak_gib"])) for row in mine if row["way"] == way]
                style = series(way)
                axes.plot(*zip(*points), style.line, color=style.color, marker=style.marker, label=style.label)
                axes.annotate(f"{points[-1][1]:.1f}", points[-1], (6, 0), textcoords="offset points", va="center")
            axes.set_xticks(sorted({int(row["batch"]) for row in mine}))
            axes.set(
                xlabel=f"sequences of {mine[0]['length']} tokens in a batch", ylabel="GiB at the peak", title=model
            )
            axes.set_ylim(bottom=0)
            axes.grid()
            axes.legend(loc="upper left")
        made.suptitle(f"memory of a train step, as compiled: {source(rows[0])}", fontsize=11)


main = command(__doc__, "memory_cpu.csv", "memory.svg", draw)

if __name__ == "__main__":
    main()
