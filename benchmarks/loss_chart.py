"""A chart of the losses that `train_step.py --follow` wrote: each way on top of the other, and their difference.

    python benchmarks/loss_chart.py docs/benchmarks/train_step_h200_losses.csv

Draws a PNG of the same name; needs matplotlib (`pip install 'ejlayers[train]'`). The first column after `step` is what
the others are compared with.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

STYLES = {
    "stock_cudnn": ("#222222", "-", "stock, cuDNN attention"),
    "stock_cudnn_rounded": ("#8a8a8a", "-.", "the same from weights rounded to bfloat16"),
    "stock_xla": ("#1f77b4", ":", "stock, XLA attention"),
    "ours": ("#c1272d", "--", "ours"),
}


def read(path: Path) -> dict[str, list[float]]:
    """The columns of a table by name."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Writes the picture, readable on white and on black."""
    import matplotlib.pyplot as plt

    steps = losses.pop("step")
    base, *others = losses
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(2, 1), facecolor="white")
    for name, values in losses.items():
        color, line, label = STYLES.get(name, ("#e07b39", "-.", name))
        above.plot(steps, values, line, color=color, label=label)
    for name in others:
        color, line, _ = STYLES.get(name, ("#e07b39", "-.", name))
        apart = [a - b for a, b in zip(losses[name], losses[base])]
        below.plot(steps, apart, line, color=color)
    above.set_ylabel("loss, nats")
    below.set_ylabel("less the first")
    below.set_xlabel("step")
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    options = parser.parse_args(arguments)
    picture = options.table.with_suffix(".png")
    draw(read(options.table), picture)
    print(picture)


if __name__ == "__main__":
    main()
