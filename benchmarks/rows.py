"""Tables of measurements as CSV."""

from __future__ import annotations

import csv
from pathlib import Path


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes rows that have the same columns; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table; of one that is not there, none."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
