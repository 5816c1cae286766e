"""Tunes the calls of attention that models make most, for the table of configs that comes with the package.

    python benchmarks/tune_attention.py benchmarks/measured

Needs a GPU. Writes a result for each point and order of sums; `make_table.py` makes the table of them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
from attention_contenders import ours, program, shapes_of
from attention_points import points, smoke_points

from ejkernel_ops import ConfigSelectorChain, autotune_lowered

USUAL = ("gpt2_1k", "d128_causal_4k", "gqa_8k", "packed_16k", "d64_causal_4k", "window_16k", "d64_full_1k")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("--points", nargs="+", help="names, of those of attention.py; default the usual ones")
    parser.add_argument("--smoke", action="store_true", help="tiny calls")
    options = parser.parse_args(arguments)
    known = {point.name: point for point in (smoke_points() if options.smoke else points())}
    if unknown := set(options.points or ()) - known.keys():
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.points or [name for name in known if options.smoke or name in USUAL]:
        selector = ConfigSelectorChain()  # both orders have the forward in common
        for order, deterministic in (("fixed", True), ("any", False)):
            begun = time.monotonic()
            step = jax.jit(program(ours(known[name], deterministic), known[name], "forward+backward"))
            lowered = step.lower(shapes_of(known[name]))
            result = autotune_lowered(selector, lowered, progress=False)
            result.save(options.folder / f"attention_{name}_{order}_order.json")
            print(f"{name}, sums in {order} order: {time.monotonic() - begun:.1f} s\n{result}", flush=True)


if __name__ == "__main__":
    main()
