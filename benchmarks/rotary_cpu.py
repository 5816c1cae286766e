"""Rotary embedding on this CPU after tuning, against the expression that models write.

    python benchmarks/rotary_cpu.py

Forward and backward together, and forward alone, both sides timed in turns in one run. Writes
`docs/benchmarks/rotary_cpu.csv`.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
from rows import write_rows

from ejkernel_ops import ConfigSelectorChain, autotune_lowered, rotary_embedding
from ejkernel_ops.execution.measure import interleaved, spread

BATCH, HEADS, HEAD_DIM, THETA = 1, 16, 64, 10000.0
LENGTHS = (512, 2048, 8192)


def plain(x, positions):
    """Halves that trade places, one with its sign changed: the expression of Llama in most libraries."""
    freqs = 1 / THETA ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None] * freqs
    cos, sin = (jnp.concatenate([f(angles), f(angles)], -1)[:, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def forward_and_backward(rotate):
    """Output and gradient for a given cotangent."""

    def run(x, positions, dout):
        out, pull = jax.vjp(lambda x: rotate(x, positions), x)
        return out, pull(dout)[0]

    return jax.jit(run)


def forward(rotate):
    """Output alone, as in generation."""
    return jax.jit(lambda x, positions, dout: rotate(x, positions))


def measure(length: int, program, rounds: int) -> dict:
    """One row of the table."""
    x, dout = (jax.random.normal(jax.random.key(i), (BATCH, length, HEADS, HEAD_DIM)) for i in range(2))
    arrays = x, jnp.arange(length), dout
    step = program(rotary_embedding)
    result = autotune_lowered(ConfigSelectorChain(), step.lower(*arrays))
    programs = [program(plain).lower(*arrays).compile(), result.compile(step, *arrays)]
    for a, b in zip(*(jax.tree.leaves(program(*arrays)) for program in programs)):
        assert jnp.allclose(a, b, atol=2e-3)  # the frequencies of the plain one are rounded more often
    load = os.getloadavg()[0]
    times = interleaved([lambda p=p: p(*arrays) for p in programs], rounds)
    plain_ms, our_ms = map(statistics.median, times)
    params = [p.blocksize_m for e in result.entries for p in (e.cfg.fwd, e.cfg.bwd) if p is not None]
    return {
        "length": length,
        "program": program.__name__,
        "plain_ms": round(plain_ms, 2),
        "our_ms": round(our_ms, 2),
        "speedup": round(statistics.median(a / b for a, b in zip(*times)), 2),
        "spread": round(max(map(spread, times)), 3),
        "blocks": "x".join(map(str, params)),
        "load": round(load, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/rotary_cpu.csv"))
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
        for program in (forward_and_backward, forward):
            rows.append(measure(length, program, options.rounds) | about)
            print(*(f"{name}={value}" for name, value in rows[-1].items() if name not in about), flush=True)
    mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in rows))
    print(f"least {min(row['speedup'] for row in rows):.2f}x, geometric mean {mean:.2f}x")
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
