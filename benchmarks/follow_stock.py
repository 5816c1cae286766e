"""Losses of a training run with stock layers against one with swapped layers, step by step.

    python benchmarks/follow_stock.py --framework nnx --dtype bfloat16 --seeds 3

The model is that of `examples/train_gpt.py`, from the same seed on the same batches. In bfloat16 two right programs
round differently and drift apart: how far stock runs from several seeds lie apart says what is far. Adds its row to
`docs/benchmarks/follow_stock.csv`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rows import read_rows, write_rows

import ejlayers

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt.corpus import read_corpus
from gpt.frameworks import training_of
from gpt.settings import Settings
from gpt.sizes import SIZES

KEY = ("framework", "size", "dtype", "steps", "seeds", "device")


def losses(options: argparse.Namespace, seed: int, *prepared: Any) -> np.ndarray:
    """The loss of each step."""
    size = SIZES[options.size]
    corpus, training = read_corpus(None, size.context), training_of(Settings(options.framework, options.size))
    state = training.new_state(size, jnp.dtype(options.dtype), seed, options.steps, *prepared)
    found = []
    for step in range(1, options.steps + 1):
        state, loss = training.train_step(state, corpus.batch(size.batch, size.context, 0, step))
        found.append(loss)
    return np.array(found, float)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    seeds = range(options.seeds)
    stock = np.stack([losses(options, seed) for seed in seeds])
    ours = np.stack([losses(options, seed, ejlayers.swap) for seed in seeds])
    difference = abs(ours - stock)
    return {
        **{name: getattr(options, name) for name in KEY[:-1]},
        "device": jax.devices()[0].device_kind,
        "max_difference": float(f"{difference.max():.3g}"),
        "median_difference": float(f"{np.median(difference):.3g}"),
        "median_spread_of_seeds": float(f"{np.median(np.ptp(stock, 0)):.3g}") if options.seeds > 1 else "",
        "first_loss": round(stock[:, 0].mean(), 4),
        "last_loss": round(stock[:, -1].mean(), 4),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=ejlayers.FRAMEWORKS, default="nnx")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/follow_stock.csv"))
    options = parser.parse_args(arguments)
    row = measure(options)
    print("  ".join(f"{name}={value}" for name, value in row.items()))
    same = {name: str(row[name]) for name in KEY}
    others = [old for old in read_rows(options.out) if {name: old[name] for name in KEY} != same]
    write_rows(options.out, [*others, row])


if __name__ == "__main__":
    main()
