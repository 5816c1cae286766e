"""Attention on this CPU after tuning, against `jax.nn.dot_product_attention(implementation="xla")`.

    python benchmarks/attention_cpu.py

Forward and backward together, one config for speed and memory, both sides timed in turns in one run. Writes
`docs/benchmarks/attention_cpu.csv`.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
from rows import write_rows

from ejkernel_ops import ConfigSelectorChain, autotune_lowered, flash_attention
from ejkernel_ops.execution.measure import interleaved, spread

BATCH, HEADS, HEAD_DIM = 1, 8, 64
LENGTHS = (512, 1024, 2048, 4096)


def forward_and_backward(attention):
    """Output and gradients for a given cotangent."""

    def run(query, key, value, dout):
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(dout)

    return jax.jit(run)


def measure(length: int, causal: bool, rounds: int) -> dict:
    """One row of the table."""
    arrays = [jax.random.normal(jax.random.key(i), (BATCH, length, HEADS, HEAD_DIM)) for i in range(4)]

    def ours(query, key, value):
        return flash_attention(query, key, value, causal=causal)

    def stock(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="xla")

    step = forward_and_backward(ours)
    result = autotune_lowered(ConfigSelectorChain(), step.lower(*arrays))
    programs = [forward_and_backward(stock).lower(*arrays).compile(), result.compile(step, *arrays)]
    for a, b in zip(*(jax.tree.leaves(program(*arrays)) for program in programs)):
        assert jnp.allclose(a, b, atol=1e-4, rtol=1e-4)
    times = interleaved([lambda p=p: p(*arrays) for p in programs], rounds)
    stock_ms, our_ms = map(statistics.median, times)
    memory = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs]
    configs = {e.op_id_v.split("@")[0]: e.cfg for e in result.entries}
    blocks = [configs["flash_attention"].fwd, configs["flash_attention_bwd"].bwd]
    return {
        "length": length,
        "causal": causal,
        "stock_ms": round(stock_ms, 2),
        "our_ms": round(our_ms, 2),
        "speedup": round(statistics.median(a / b for a, b in zip(*times)), 2),
        "spread": round(max(map(spread, times)), 3),
        "stock_mib": round(memory[0], 1),
        "our_mib": round(memory[1], 1),
        "forward_blocks": f"{blocks[0].q_blocksize}x{blocks[0].kv_blocksize}",
        "backward_blocks": f"{blocks[1].q_blocksize}x{blocks[1].kv_blocksize}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/attention_cpu.csv"))
    options = parser.parse_args()
    about = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {jax.devices()[0].device_kind}",
        "date": datetime.date.today().isoformat(),
        "shape": f"batch {BATCH} heads {HEADS} head_dim {HEAD_DIM} float32",
    }
    rows = []
    for length in LENGTHS:
        for causal in (True, False):
            rows.append(measure(length, causal, options.rounds) | about)
            print(*(f"{name}={value}" for name, value in rows[-1].items() if name not in about), flush=True)
    mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in rows))
    last = [row["our_mib"] / row["stock_mib"] for row in rows if row["length"] == LENGTHS[-1]]
    least = min(row["speedup"] for row in rows)
    print(f"least {least:.2f}x, geometric mean {mean:.2f}x, memory at {LENGTHS[-1]}: {max(last):.3f}")
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
