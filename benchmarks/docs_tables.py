"""The tables of the pages, made from the measurements in `docs/benchmarks`.

    python benchmarks/docs_tables.py            # writes them anew
    python benchmarks/docs_tables.py --check    # exit status 1 where a page has another one

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; what is there is replaced. A new file of
measurements needs a line in `TABLES`.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import measured_tables as measured
from summary_table import summary
from table_cells import BENCHMARKS

ROOT = Path(__file__).parent.parent


def on_paper() -> str:
    """The estimates of `scaling_on_paper.py`."""
    from scaling_on_paper import table  # with the frameworks, which no other table needs

    return table()


TABLES: dict[str, Callable[[], str]] = {
    "attention_cpu": functools.partial(measured.attention_cpu, "attention_cpu.csv"),
    "attention_xla_h100": functools.partial(measured.attention_xla, "attention_xla_h100.csv"),
    "attention_h200": functools.partial(measured.attention, "attention_h200.csv"),
    "losses_h200": functools.partial(measured.losses, "train_step_h200_losses.csv"),
    "ops_cpu": measured.ops_cpu,
    "ops_h200": functools.partial(measured.ops, "ops_h200.csv"),
    "overhead": functools.partial(measured.overhead, "overhead.csv"),
    "on_paper": on_paper,
    "scaling_h200": functools.partial(measured.scaling, "scaling_h200.csv"),
    "slower": measured.slower,
    "start": measured.start,
    "summary": summary,
    "train_step_h200": functools.partial(measured.train_step, "train_step_h200.csv"),
    "train_step_kernels": functools.partial(measured.kernels, "train_step_h200_kernels.csv"),
    "train_step_without_graphs": functools.partial(measured.train_step, "train_step_without_graphs_h200.csv"),
}
_BEGIN = re.compile(r"^<!-- table: ", re.MULTILINE)
_REGION = re.compile(r"^<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([\w.]+\.csv|[\w.]+\.json)\)")


def pages() -> list[Path]:
    """Those that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str, folder: Path) -> str:
    """The text of a page with its tables as the measurements have them.

    Args:
        text: of the page.
        folder: in which the page is: links to measurements begin there.

    Raises:
        SystemExit: a table that `TABLES` does not have, or a region without an end.
    """
    if len(_BEGIN.findall(text)) != len(_REGION.findall(text)):
        raise SystemExit(f"{folder}: a `<!-- table: NAME -->` is not followed by `<!-- end -->`")
    here = os.path.relpath(BENCHMARKS, folder)

    def made(region: re.Match) -> str:
        name = region[1]
        if name not in TABLES:
            raise SystemExit(f"table {name!r} is not known; expected one of {', '.join(sorted(TABLES))}")
        body = _LINK.sub(lambda link: f"]({here}/{link[1]})", TABLES[name]())
        return f"<!-- table: {name} -->\n{body.strip()}\n<!-- end -->"

    return _REGION.sub(made, text)


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks all pages; 1 where one was checked and is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page would change")
    check = parser.parse_args(arguments).check
    stale = False
    for page in pages():
        before = page.read_text()
        after = with_tables(before, page.parent)
        if before != after:
            stale = True
            if check:
                name = str(page.relative_to(ROOT))
                print(
                    *difflib.unified_diff(before.splitlines(), after.splitlines(), name, "measured", lineterm=""),
                    sep="\n",
                )
            else:
                page.write_text(after)
                print(f"{page.relative_to(ROOT)}: written")
    return int(check and stale)


if __name__ == "__main__":
    raise SystemExit(main())
