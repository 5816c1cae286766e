"""The numbers of each step, kept in a file that a resumed run goes on with."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from .launch import in_first

FIELDS = ["step", "loss", "baseline_loss", "held_out", "tokens_per_s", "memory_mib"]


class Metrics:
    """Rows of numbers, each in the file as soon as it is known; those of the first steps may be there already.

    Of several processes one writes the file; all have the rows.
    """

    def __init__(self, file: Path, first_steps: int, writes: bool = True):
        rows = in_first("reading the metrics", lambda: _read(file)[:first_steps]) if first_steps else []
        self.rows, self._file = [], open(file if writes else os.devnull, "w", 1, newline="")  # line by line
        self._writer = csv.DictWriter(self._file, FIELDS, restval="")
        self._writer.writeheader()
        for row in rows:
            self.add(row)

    def add(self, row: dict) -> None:
        """Adds the numbers of the next step."""
        self._writer.writerow(row)
        self.rows.append(dict.fromkeys(FIELDS, "") | row)

    def apart(self, steps: int) -> float:
        """The largest difference of the losses of both models over the first steps."""
        return max(abs(row["loss"] - row["baseline_loss"]) for row in self.rows[:steps])

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read(file: Path) -> list[dict]:
    with open(file, newline="") as text:
        rows = [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(text)]
    whole = {"step", "tokens_per_s", "memory_mib"}
    return [{name: int(x) if name in whole else x for name, x in row.items()} for row in rows]
