"""What the CPU benchmarks of single ops share: ours after tuning against the plain expression, in turns in one run."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rows import write_rows

from ejkernel_ops import ConfigSelectorChain, autotune_lowered
from ejkernel_ops.config.schema import leaf_fields
from ejkernel_ops.execution.measure import interleaved, spread


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a table: what it is about, both functions, arrays, and whether gradients of the floats are taken."""

    about: dict[str, Any]
    ours: Callable
    plain: Callable
    arrays: Sequence[jax.Array]
    gradients: bool = True


def program(fn: Callable, arrays: Sequence[jax.Array], gradients: bool) -> Callable:
    """Output, and gradients for a given cotangent."""
    if not gradients:
        return jax.jit(lambda dout, *arrays: fn(*arrays))
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(dout, *arrays):
        def of_floats(*some):
            mixed = list(arrays)
            for i, x in zip(floats, some):
                mixed[i] = x
            return fn(*mixed)

        out, pull = jax.vjp(of_floats, *(arrays[i] for i in floats))
        return out, pull(dout)

    return jax.jit(run)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row of the table; `load` is the load average of the minute before, in processes."""
    load, like = os.getloadavg()[0], jax.eval_shape(case.plain, *case.arrays)
    arrays = [jax.random.normal(jax.random.key(99), like.shape, like.dtype), *case.arrays]
    ours, plain = (program(fn, case.arrays, case.gradients) for fn in (case.ours, case.plain))
    result = autotune_lowered(ConfigSelectorChain(), ours.lower(*arrays))
    programs = [plain.lower(*arrays).compile(), result.compile(ours, *arrays)]
    for a, b in zip(*(jax.tree.leaves(program(*arrays)) for program in programs)):
        assert jnp.allclose(a, b, atol=1e-3 * max(1.0, float(jnp.abs(a).max())), rtol=1e-3)
    times = interleaved([lambda p=p: p(*arrays) for p in programs], rounds)
    memory = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs]
    configs = {e.op_id_v.split("@")[0]: e.cfg for e in result.entries}
    return {
        **case.about,
        "plain_ms": round(statistics.median(times[0]), 2),
        "our_ms": round(statistics.median(times[1]), 2),
        "speedup": round(statistics.median(a / b for a, b in zip(*times)), 2),
        "spread": round(max(map(spread, times)), 3),
        "plain_mib": round(memory[0], 1),
        "our_mib": round(memory[1], 1),
        "forward": _text(next(cfg for op, cfg in configs.items() if not op.endswith("_bwd"))),
        "backward": _text(next((cfg for op, cfg in configs.items() if op.endswith("_bwd")), None)),
        "load": round(load, 2),
    }


def _text(cfg: Any) -> str:
    """A config's fields, such as `blocksize_m=256`."""
    if cfg is None:
        return ""
    fields = {name.rpartition(".")[2]: value for name, value in leaf_fields(cfg)}
    return " ".join(f"{n}={v}" for n, v in fields.items() if v is not None and n != "backend")


def main(description: str, cases: Sequence[Case], stem: str) -> None:
    """Measures all cases and writes `docs/benchmarks/<stem>.csv`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path(f"docs/benchmarks/{stem}.csv"))
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
    for case in cases:
        table.append(measure(case, options.rounds) | about)
        print(*(f"{name}={value}" for name, value in table[-1].items() if name not in about), flush=True)
        write_rows(options.out, table)  # after each case: the run may be ended
    mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in table))
    print(f"least {min(row['speedup'] for row in table):.2f}x, geometric mean {mean:.2f}x")


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """A random array."""
    return scale * jax.random.normal(jax.random.key(seed), shape)
