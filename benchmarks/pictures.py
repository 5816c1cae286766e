"""Draws every picture of the docs from the tables in `docs/benchmarks`: `make pictures`.

python benchmarks/pictures.py --folder docs/pictures
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from charts import PICTURES

SCRIPTS = {  # what each draws
    "attention_chart": "attention.svg",
    "loss_chart": "losses.svg",
    "memory_chart": "memory.svg",
    "step_chart": "train_step.svg",
    "tuning_chart": "tuning_landscape.svg",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=PICTURES, help="default docs/pictures")
    options = parser.parse_args(arguments)
    for script, picture in SCRIPTS.items():
        importlib.import_module(script).main(["--out", str(options.folder / picture)])


if __name__ == "__main__":
    main()
