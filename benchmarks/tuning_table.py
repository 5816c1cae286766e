"""Times every config of a wide space at eight calls of attention, for simulating the search on what was measured.

    python benchmarks/tuning_table.py

Needs a GPU. Writes `docs/benchmarks/tuning_table.csv`, which `tests/test_search.py` searches.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from rows import write_rows

from ejkernel_ops import AttentionConfig, BwdParams, FwdParams, Key, device_fingerprint, flash_attention
from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.measure import spread
from ejkernel_ops.registry import find_call, get_invocations

# batch, length, heads, kv heads, head_dim, causal
SHAPES = (
    (16, 1024, 12, 12, 64, True),
    (2, 8192, 8, 2, 128, True),
    (4, 2048, 8, 8, 64, False),
)
KEYS = (
    *((op, shape) for shape in SHAPES for op in ("flash_attention", "flash_attention_bwd")),
    ("flash_attention", (2, 4096, 8, 8, 128, True)),
    ("flash_attention_bwd", (8, 1024, 8, 8, 64, False)),
)
BLOCKS = (128, 256, 512, 1024, 2048, 4096)


def calls(shape):
    """The forward and the backward call of attention at a shape."""
    batch, length, heads, kv_heads, dim, causal = shape
    query = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, length, kv_heads, dim), jnp.bfloat16)

    def loss(query, key, value):
        return flash_attention(query, key, value, causal=causal).astype(jnp.float32).sum()

    jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, key)
    found = {}
    for op_id_v, by_key in get_invocations().items():
        for call_key in by_key:
            inv = find_call(Key(device_fingerprint(), op_id_v, call_key))
            sizes = inv.arguments["query"].shape, inv.arguments["key"].shape
            if sizes == (query.shape, key.shape) and inv.kwargs["causal"] == causal:
                found[op_id_v.split("@")[0]] = inv
    return found


def space(op: str, length: int):
    """Every pair of block sizes."""
    sizes = [block for block in BLOCKS if length // 32 <= block <= length]
    side, params = ("fwd", FwdParams) if op == "flash_attention" else ("bwd", BwdParams)
    for q in sizes:
        for kv in sizes:
            yield q, kv, AttentionConfig(backend="xla", **{side: params(q_blocksize=q, kv_blocksize=kv)})


def measure(shape, op, inv, rounds: int) -> list[dict]:
    """One row for each config that runs."""
    start, bench = time.perf_counter(), Bench(inv)
    configs = {cfg: (q, kv) for q, kv, cfg in space(op, shape[1])}
    trials = list(bench.check(list(configs)))
    timed = [trial.cfg for trial in trials if trial.status == "timed"]
    times = dict(zip(timed, bench.sample(timed, rounds)))
    clock = "; ".join(bench.notes) or "device"
    rows = []
    for trial in trials:
        ms = times.get(trial.cfg)
        rows.append(
            dict(zip(("batch", "length", "heads", "kv_heads", "head_dim", "causal"), shape))
            | {"op": op, "q_blocksize": configs[trial.cfg][0], "kv_blocksize": configs[trial.cfg][1]}
            | {"status": trial.status, "ms": "" if ms is None else round(statistics.median(ms), 5)}
            | {"spread": "" if ms is None else round(spread(ms), 5), "clock": clock}
        )
    best = min(timed, key=lambda cfg: statistics.median(times[cfg]))
    default = inv.kernel.heuristic_cfg_xla(inv)
    print(
        f"{op} {shape}: {len(timed)} of {len(trials)} ran, best {configs[best]} "
        f"{statistics.median(times[best]):.3f} ms, heuristic "
        f"{statistics.median(times[default]) if default in times else float('nan'):.3f} ms, clock {clock}, "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    bench.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/tuning_table.csv"))
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    about = {"device": device, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    rows = []
    for op, shape in KEYS:
        rows += [row | about for row in measure(shape, op, calls(shape)[op], options.rounds)]
        write_rows(options.out, rows)  # after each key: device time may end


if __name__ == "__main__":
    main()
