"""The one look of all pictures: readable on a white page and on a dark one, and by those who see fewer colours.

Nothing is filled behind a picture, text is of a middle grey, and lines that could be taken for each other differ in
marker and stroke as well as in colour. The colours are those of Okabe and Ito, some a little lighter or darker.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TABLES, PICTURES = ROOT / "docs" / "benchmarks", ROOT / "docs" / "pictures"
TEXT, BLUE, GREEN, ORANGE, PINK, GREY = "#7d838c", "#2e86c1", "#0a9e73", "#d9610a", "#c86fa3", "#8f959d"


@dataclasses.dataclass(frozen=True)
class Series:
    """What a way to compute something is called and drawn as, in every picture."""

    label: str
    color: str
    line: str = "-"
    marker: str = "o"


SERIES = {
    "cudnn": Series("cuDNN", BLUE, marker="s"),
    "tokamax": Series("tokamax", GREEN, marker="^"),
    "tokamax_triton": Series("tokamax, Triton", GREEN, ":", "v"),
    "xla": Series("XLA", GREY, ":", "x"),
    "ours_triton": Series("ours, Triton", PINK, "--", "D"),
    "chosen": Series("ours, chosen", ORANGE),
    "chosen_any_order": Series("ours, chosen, sums in any order", ORANGE, "--", "P"),
    "stock_cudnn": Series("stock, cuDNN attention", BLUE, marker="s"),
    "stock_cudnn_rounded": Series("stock, cuDNN attention, weights rounded at first", GREY, "-."),
    "stock_xla": Series("stock, XLA attention", GREEN, ":", "^"),
    "stock_float32": Series("stock, float32", TEXT),
    "swapped": Series("swapped", PINK, "-.", "D"),
    "swapped_tuned": Series("swapped, tuned", PINK, "--", "v"),
    "ours": Series("ours", ORANGE, "--"),
    "ours_tuned": Series("ours, tuned", PINK, "-.", "P"),
}
STYLE = {
    "axes.edgecolor": TEXT, "axes.labelcolor": TEXT, "axes.titlecolor": TEXT, "text.color": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "grid.color": TEXT, "grid.alpha": 0.25, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.titlesize": 11,
    "font.family": "DejaVu Sans", "font.size": 10, "lines.linewidth": 1.8, "lines.markersize": 6,
    "svg.hashsalt": "ejlayers",  # the same bytes whenever it is drawn
}  # fmt: skip


def series(name: str) -> Series:
    """How a way is drawn; of one that has no line of its own, in grey."""
    return SERIES.get(name, Series(name, GREY, "-."))


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, saved at the end."""
    import matplotlib.style
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(["default", STYLE]):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        made.savefig(path, dpi=150, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def source(row: Mapping[str, str]) -> str:
    """Where and when a row of a table was measured."""
    return ", ".join(filter(None, (row["device"], f"jax {row['jax']}", row["date"])))


def command(doc: str, table: str, picture: str, draw: Callable[[Path, Path], None]) -> Callable[..., None]:
    """The `main` of a script that draws a picture from a table, `draw(table, picture)`."""

    def main(arguments: list[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=doc.splitlines()[0])
        parser.add_argument("table", type=Path, nargs="?", default=TABLES / table, help=f"default {table}")
        parser.add_argument("--out", type=Path, default=PICTURES / picture, help="the picture: .svg or .png")
        options = parser.parse_args(arguments)
        draw(options.table, options.out)
        print(options.out)

    return main
