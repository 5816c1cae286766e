"""What the framework costs beside the kernels: import, tracing, recording, dispatch, the program itself.

    python benchmarks/overhead.py

Writes `docs/benchmarks/overhead.csv`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel_ops import (
    AttentionConfig,
    AutotuningResult,
    BwdParams,
    ConfigSelectorChain,
    Entry,
    FwdParams,
    Invocation,
    autotune_lowered,
    device_fingerprint,
    flash_attention,
    linear,
)
from ejkernel_ops.kernels import LINEAR
from ejkernel_ops.registry import record

X = jax.random.normal(jax.random.key(0), (1, 32, 2, 8))


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Medians of two measurements taken in turns."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def per_call(fn: Callable, count: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(count):
        out = fn()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / count


def import_seconds() -> float:
    """What importing both packages adds to importing JAX."""

    def run(code):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    bare, ours = paired(lambda: run("import jax"), lambda: run("import jax, ejkernel_ops, ejlayers"), 11)
    return ours - bare


def trace_ms_per_site() -> dict[str, float]:
    """Tracing and lowering a call site, of attention in a chain of equal and of different calls."""
    found = {}
    for name, scales in (("equal", [None] * 32), ("different", [1 / (i + 1) for i in range(32)])):

        def chain(x, scales=scales):
            for scale in scales:
                x = flash_attention(x, x, x, causal=True, softmax_scale=scale)
            return x

        jax.clear_caches()
        start = time.perf_counter()
        traced = jax.jit(chain).trace(X)
        middle = time.perf_counter()
        traced.lower()
        found[f"trace of a call site, {name} calls, ms"] = (middle - start) / len(scales) * 1e3
        found[f"lowering of a call site, {name} calls, ms"] = (time.perf_counter() - middle) / len(scales) * 1e3
    return found


def record_us() -> float:
    """Recording a call that is lowered."""
    inv = Invocation(LINEAR, (jnp.ones((2, 3)), jnp.ones((3, 4))))
    return per_call(lambda: record(inv), 2000) * 1e6


def eager_us() -> dict[str, float]:
    """A call outside `jit`, against plain JAX."""
    w = jnp.ones((8, 8))
    cases = {
        "linear": (lambda: linear(X, w), lambda: X @ w),
        "attention": (
            lambda: flash_attention(X, X, X),
            lambda: jax.nn.dot_product_attention(X, X, X, implementation="xla"),
        ),
    }
    found = {}
    for name, (ours, stock) in cases.items():
        per_call(ours, 3), per_call(stock, 3)
        a, b = paired(lambda f=ours: per_call(f, 100), lambda f=stock: per_call(f, 100), 5)
        found[f"eager {name}, us"], found[f"eager {name} of plain JAX, us"] = a * 1e6, b * 1e6
    return found


def dispatch_us() -> float:
    """What a result of 300 entries adds to the dispatch of a jitted call."""
    device = device_fingerprint()
    entries = tuple(
        Entry("linear@v1", f"{i:016x}", LINEAR.heuristic_cfg(Invocation(LINEAR, (X, X[0, 0])))) for i in range(300)
    )
    result, step = AutotuningResult(device, entries), jax.jit(lambda x: x + 1)
    inside = lambda: per_call(lambda: step(X), 2000)  # noqa: E731

    def with_result():
        with result:
            return inside()

    inside(), with_result()
    a, b = paired(with_result, inside, 15)
    return (a - b) * 1e6


def stripped(program: str) -> list[str]:
    """The instructions of an optimised program without metadata, attributes and the numbers in names."""
    program = re.sub(r",? ?(metadata|frontend_attributes|backend_config)=\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "", program)
    lines = [line for line in program.splitlines() if " = " in line]
    return [re.sub(r"[._]\d+|\.clone", "", line).strip() for line in lines]


def same_program() -> bool:
    """Whether a tuned step compiles to what the same configs compile to when they are passed by hand."""
    x = jax.random.normal(jax.random.key(0), (2, 128, 2, 16))

    def loss(config):
        return jax.jit(jax.grad(lambda x: jnp.square(flash_attention(x, x, x, causal=True, config=config)).sum()))

    step = loss(None)
    result = autotune_lowered(ConfigSelectorChain(), step.lower(x))
    configs = {e.op_id_v: e.cfg for e in result.entries}
    forward, backward = configs["flash_attention@v1"], configs["flash_attention_bwd@v1"]
    by_hand = AttentionConfig(backend="xla", fwd=FwdParams(**vars(forward.fwd)), bwd=BwdParams(**vars(backward.bwd)))
    first, second = result.compile(step, x), loss(by_hand).lower(x).compile()
    return stripped(first.as_text()) == stripped(second.as_text())


LIMITS = {"import over bare jax, s": 0.15, "recording, us": 50.0, "dispatch with 300 entries, us": 2.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/overhead.csv"))
    options = parser.parse_args()
    found: dict[str, float] = {"import over bare jax, s": import_seconds()}
    found |= trace_ms_per_site()
    found |= {"recording, us": record_us()} | eager_us() | {"dispatch with 300 entries, us": dispatch_us()}
    found["tuned program equals that of configs by hand"] = float(same_program())
    about = [jax.__version__, platform.python_version(), platform.machine(), datetime.date.today().isoformat()]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(options.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "value", "limit", "jax", "python", "machine", "date"])
        for name, value in found.items():
            limit = 1.5 if name.startswith("trace of") else LIMITS.get(name, "")
            writer.writerow([name, f"{value:.4g}", limit, *about])
            print(f"{name:55s} {value:9.4g}" + (f"   limit {limit}" if limit else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
