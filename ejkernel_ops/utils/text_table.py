"""Tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def text_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: Sequence[str] = ()
) -> str:
    """Rows under columns, as wide as they need: what shows the text may wrap or scroll it.

    Args:
        columns: names.
        rows: cells.
        title: a line above.
        right: the columns that hold numbers.
    """
    table = Table(box=box.SIMPLE, title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=400, color_system=None).print(table, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
