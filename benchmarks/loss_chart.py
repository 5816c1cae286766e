"""A picture of the losses that `train_step.py --follow` wrote: each way on top of the other, and their difference.

    python benchmarks/loss_chart.py docs/benchmarks/train_step_h200_losses.csv

Needs matplotlib (`pip install 'ejlayers[train]'`). The first way is what the others are compared with.
"""

from __future__ import annotations

from pathlib import Path

from charts import command, figure, series, source
from rows import read_rows


def draw(table: Path, picture: Path) -> None:
    """Losses above, differences from the first way below."""
    rows = read_rows(table)
    ways = list(rows[0])[1 : list(rows[0]).index("device")]
    steps = [int(row["step"]) for row in rows]
    losses = {way: [float(row[way]) for row in rows] for way in ways}
    with figure(picture, 7, 5) as made:
        above, below = made.subplots(2, sharex=True, height_ratios=(2, 1))
        for way in ways:
            style = series(way)
            above.plot(steps, losses[way], style.line, color=style.color, label=style.label)
            apart = [a - b for a, b in zip(losses[way], losses[ways[0]])]
            below.plot(steps, apart, style.line, color=style.color)
        above.set(ylabel="loss, nats", title=f"losses of training: {source(rows[0])}")
        below.set(ylabel="less the first", xlabel="step")
        above.legend()
        for axes in (above, below):
            axes.grid()


main = command(__doc__, "train_step_h200_losses.csv", "losses.svg", draw)

if __name__ == "__main__":
    main()
