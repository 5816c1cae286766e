"""Times a wide grid of tiles of the Triton attention kernels, each of the three by itself.

    python benchmarks/attention_tiles.py

Needs a GPU. Writes `docs/benchmarks/attention_tiles_<card>.csv`, from which the lists in
`ejkernel_ops/kernels/attention/tiles.py` are made: the fastest first.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import statistics
import time
from pathlib import Path

import jax
from rows import write_rows
from tuning_table import calls

from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.measure import spread
from ejkernel_ops.kernels.attention import tiles
from ejkernel_ops.kernels.attention.tiles import Tile

# batch, length, heads, kv heads, head_dim, causal
SHAPES = (
    (4, 4096, 16, 16, 128, True),
    (16, 1024, 12, 12, 64, True),
    (4, 4096, 8, 8, 256, True),
    (4, 4096, 16, 16, 128, False),
)
GRID = {  # rows of queries, rows of keys, warps, stages
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
    "keys": ((32, 64, 128), (64, 128), (4, 8), (2, 3)),
    "queries": ((64, 128), (32, 64, 128), (4, 8), (2, 3)),
}


def configs(kernel: str, inv) -> dict:
    """A config for each tile of a kernel; the backward's other kernel keeps its first tile."""
    grid = [Tile(*sizes) for sizes in itertools.product(*GRID[kernel])]
    if kernel == "forward":
        return {tile: tiles.forward_config(tile) for tile in grid}
    keys, queries = tiles.backward_tiles(inv)[0]
    return {
        tile: tiles.backward_config(tile, queries) if kernel == "keys" else tiles.backward_config(keys, tile)
        for tile in grid
    }


def measure(shape, kernel: str, inv, rounds: int) -> list[dict]:
    """One row for each tile: its time, or why it has none."""
    start, bench = time.perf_counter(), Bench(inv)
    by_tile = configs(kernel, inv)
    trials = dict(zip(by_tile, bench.check(list(by_tile.values()))))
    timed = [tile for tile, trial in trials.items() if trial.status == "timed"]
    times = dict(zip(timed, bench.sample([by_tile[tile] for tile in timed], rounds)))
    clock = "; ".join(bench.notes) or "device"
    bench.close()
    rows = []
    for tile, trial in trials.items():
        ms = times.get(tile)
        rows.append(
            dict(zip(("batch", "length", "heads", "kv_heads", "head_dim", "causal"), shape))
            | {"kernel": kernel, "q": tile.q, "kv": tile.kv, "warps": tile.warps, "stages": tile.stages}
            | {"status": trial.status, "ms": "" if ms is None else round(statistics.median(ms), 5)}
            | {"spread": "" if ms is None else round(spread(ms), 5), "clock": clock}
        )
    best = sorted(timed, key=lambda tile: statistics.median(times[tile]))[:5]
    shown = ", ".join(f"{t.q}x{t.kv} w{t.warps} s{t.stages} {statistics.median(times[t]):.3f}" for t in best)
    print(
        f"{kernel} {shape}: {len(timed)} of {len(trials)} ran in {time.perf_counter() - start:.0f} s: {shown}",
        flush=True,
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which no other kernel is begun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    card = jax.devices()[0].device_kind
    out = options.out or Path(f"docs/benchmarks/attention_tiles_{card.split()[1].lower()}.csv")
    about = {"device": card, "date": datetime.date.today().isoformat()}
    about |= {name: importlib.metadata.version(name) for name in ("jax", "triton", "jax-triton")}
    rows, end = [], time.monotonic() + options.budget
    for shape, kernel in itertools.product(SHAPES, GRID):
        if time.monotonic() > end:
            print("the time is over")
            break
        inv = calls(shape)["flash_attention" if kernel == "forward" else "flash_attention_bwd"]
        rows += [row | about for row in measure(shape, kernel, inv, options.rounds)]
        write_rows(out, rows)  # after each kernel: device time may end


if __name__ == "__main__":
    main()
