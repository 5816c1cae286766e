"""The memory of a train step by batch size, stock Flax layers against ours: compiled, and not run.

    python benchmarks/memory.py gpt2-small --batches 4 8 16 32 64

Writes `docs/benchmarks/memory_<card>.csv`: what the compiled programs say of their arguments (parameters, optimizer,
tokens) and temporaries. No parameter is ever made, so that a program may be larger than the machine. A CPU has no
cuDNN: `--ways stock_xla ours`. `memory_chart.py` draws the table.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from attention import about, card
from rows import write_rows
from train_step import SIZES, WAYS, Size, Ways, kept_rows, memory_gib, start_and_step


def lowered(size: Size, ways: Ways) -> Any:
    """The step of a model that is but shapes."""
    steps: list[Callable] = []

    def start() -> list[jax.Array]:
        leaves, step = start_and_step(size, ways)
        steps.append(step)
        return leaves

    leaves = jax.eval_shape(start)
    return steps[0].lower(leaves, jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(SIZES), nargs="?", default="gpt2-small")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=["stock_cudnn", "ours"])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="sequences in a batch")
    parser.add_argument("--jobs", type=int, default=4, help="programs that are compiled at a time")
    parser.add_argument("--out", type=Path, help="default docs/benchmarks/memory_<card>.csv")
    options = parser.parse_args(arguments)
    out = options.out or Path(f"docs/benchmarks/memory_{card()}.csv")
    sizes = [dataclasses.replace(SIZES[options.model], batch=batch) for batch in options.batches]
    programs = {(way, size): lowered(size, WAYS[way]) for way in options.ways for size in sizes}
    rows = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        compiled = pool.map(lambda program: program.compile(), programs.values())
        for (way, size), program in zip(programs, compiled):
            temporary, peak = memory_gib(program)
            row = {"model": options.model, "way": way, "batch": size.batch, "length": size.length}
            row |= {"temporary_gib": round(temporary, 4), "peak_gib": round(peak, 4)}
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
            rows.append(row | about())
    write_rows(out, kept_rows(out, options.model) + rows)


if __name__ == "__main__":
    main()
