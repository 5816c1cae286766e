"""Norms on this CPU after tuning, against the plain expression under the same `jit`.

    python benchmarks/norm_cpu.py

Forward and backward together, gradients of all arrays, both sides timed in turns in one run. `load` is the load average
of the last minute before each row, in processes. Writes `docs/benchmarks/norm_cpu.csv`.
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

from ejkernel_ops import ConfigSelectorChain, autotune_lowered, layer_norm, rms_norm
from ejkernel_ops.execution.measure import interleaved, spread

SHAPES = ((4096, 1024), (16384, 256), (1024, 4096))


def plain_rms_norm(x, scale):
    """RMS norm as it is defined."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def plain_layer_norm(x, scale, bias):
    """Layer norm as it is defined."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6) * scale + bias


OPS = {"rms_norm": (rms_norm, plain_rms_norm), "layer_norm": (layer_norm, plain_layer_norm)}


def forward_and_backward(norm):
    """Output and gradients for a given cotangent."""

    def run(dout, *arrays):
        out, pull = jax.vjp(norm, *arrays)
        return out, pull(dout)

    return jax.jit(run)


def measure(op: str, rows: int, features: int, rounds: int) -> dict:
    """One row of the table."""
    load = os.getloadavg()[0]
    dout, x = (jax.random.normal(jax.random.key(i), (rows, features)) for i in range(2))
    vectors = [jax.random.normal(jax.random.key(2 + i), (features,)) for i in range(2)]
    arrays = [dout, x, *(vectors if op == "layer_norm" else vectors[:1])]
    ours, plain = map(forward_and_backward, OPS[op])
    result = autotune_lowered(ConfigSelectorChain(), ours.lower(*arrays))
    programs = [plain.lower(*arrays).compile(), result.compile(ours, *arrays)]
    for a, b in zip(*(jax.tree.leaves(program(*arrays)) for program in programs)):
        assert jnp.allclose(a, b, atol=1e-3, rtol=1e-4)
    times = interleaved([lambda p=p: p(*arrays) for p in programs], rounds)
    plain_ms, our_ms = map(statistics.median, times)
    memory = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs]
    configs = {e.op_id_v.split("@")[0]: e.cfg for e in result.entries}
    return {
        "op": op,
        "rows": rows,
        "features": features,
        "plain_ms": round(plain_ms, 2),
        "our_ms": round(our_ms, 2),
        "speedup": round(statistics.median(a / b for a, b in zip(*times)), 2),
        "spread": round(max(map(spread, times)), 3),
        "plain_mib": round(memory[0], 1),
        "our_mib": round(memory[1], 1),
        "forward_chunk": configs[op].fwd.blocksize_m,
        "backward_chunk": configs[f"{op}_bwd"].bwd.blocksize_m,
        "load": round(load, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/norm_cpu.csv"))
    options = parser.parse_args()
    about = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {jax.devices()[0].device_kind}",
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "dtype": "float32",
    }
    table = []
    for op in OPS:
        for rows, features in SHAPES:
            table.append(measure(op, rows, features, options.rounds) | about)
            print(*(f"{name}={value}" for name, value in table[-1].items() if name not in about), flush=True)
    mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in table))
    print(f"least {min(row['speedup'] for row in table):.2f}x, geometric mean {mean:.2f}x")
    write_rows(options.out, table)


if __name__ == "__main__":
    main()
