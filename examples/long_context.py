"""Attention over a long sequence, with a sliding window and without: time and memory of forward and backward.

    python examples/long_context.py --lengths 1024 2048 4096 8192 --window 256

With a window the time grows as the length does, not as its square. The memory that stock attention would need is what
its compiled program says: it is not run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import ejlayers
from ejkernel_ops import benchmark

WIDTH, HEADS, KV_HEADS = 256, 4, 2


def layer(window: int | None) -> nnx.Module:
    """Causal attention in which a token sees itself and at most `window - 1` before it."""
    return ejlayers.nnx.Attention(
        WIDTH, HEADS, num_kv_heads=KV_HEADS, rotary=ejlayers.Rotary(), rngs=nnx.Rngs(0),
        sliding_window=None if window is None else (window - 1, 0),
    )  # fmt: skip


def stock() -> nnx.Module:
    """Flax's own causal attention, which holds a logit for every pair of tokens."""
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, use_bias=False, rngs=nnx.Rngs(0))


def step_of(module: nnx.Module, **options: Any) -> Callable:
    """The gradients of a layer's parameters and inputs, as a jitted function of its inputs."""
    graph, params = nnx.split(module)
    gradients = jax.grad(lambda params, x: jnp.square(nnx.merge(graph, params)(x, **options)).mean(), (0, 1))
    return jax.jit(lambda x: gradients(params, x))


def mebibytes(compiled: Any) -> float:
    """What a program needs beside its inputs and outputs."""
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Prints a row for each length; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens")
    parser.add_argument("--window", type=int, default=256, help="tokens that a token sees, itself included")
    options = parser.parse_args(arguments)
    steps = {"full": step_of(layer(None)), "window": step_of(layer(options.window))}

    print(f"{HEADS} heads of {WIDTH // HEADS}, a window of {options.window} tokens, forward and backward")
    print(f"{'length':>8}{'full, ms':>12}{'window, ms':>12}{'stock, MiB':>12}{'full, MiB':>12}{'window, MiB':>12}")
    rows = []
    for length in options.lengths:
        x = jax.random.normal(jax.random.key(0), (1, length, WIDTH))
        compiled = {name: step.lower(x).compile() for name, step in steps.items()}
        row = {f"{name}_ms": benchmark(step, x, num_warmup=1, num_iters=2) for name, step in compiled.items()}
        row |= {"stock_mib": mebibytes(step_of(stock(), is_causal=True).lower(x).compile())}
        row |= {f"{name}_mib": mebibytes(step) for name, step in compiled.items()}
        print(f"{length:8}" + "".join(f"{value:12.0f}" for value in row.values()), flush=True)
        rows.append({"length": length} | row)
    return rows


if __name__ == "__main__":
    main()
