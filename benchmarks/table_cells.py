"""Cells of tables of measurements, and the line under a table that says where its rows are from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from attention_chart import markdown
from rows import read_rows

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"
SLOWER = 0.97  # below: slower than the peer by more than two runs differ
NOT_YET = "Not measured yet."
Rows = list[dict[str, str]]

_NAMES = {"jax": "jax", "cudnn": "cuDNN", "triton": "Triton", "jax_triton": "jax-triton", "tokamax": "tokamax"}


def source(file: str, rows: Rows) -> str:
    """The line under a table: where, with what and when its rows were measured."""
    first = rows[0]
    device = first.get("device") or f"{first.get('cores', 2)} cores of an {first['machine']}"
    versions = [f"{text} {first[name]}" for name, text in _NAMES.items() if first.get(name)]
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{device}; {', '.join(versions)}; {when}; [{file}]({file})."


def table(file: str, heads: Iterable[str], cells: Callable[[Rows], Iterable[Iterable[str]]]) -> str:
    """A Markdown table of the rows of a file, and its source."""
    rows = read_rows(BENCHMARKS / file)
    if not rows:
        return NOT_YET
    return f"{markdown(heads, cells(rows))}\n\n{source(file, rows)}"


def number(text: str | float | None, digits: int = 4) -> str:
    """A number of so many digits, those before the point included; nothing where there is none."""
    if text in (None, ""):
        return ""
    return f"{float(text):.{max(0, digits - len(str(int(float(text)))))}f}"


def ratio(value: float | str | None) -> str:
    """How many times as fast, in bold where it is slower."""
    if value in (None, ""):
        return ""
    text = f"{float(value):.2f}"
    return f"**{text}**" if float(value) < SLOWER else text
