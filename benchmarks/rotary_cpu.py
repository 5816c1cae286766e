"""`rotary_embedding` on this CPU after tuning, against the expression that models write, under the same `jit`.

    python benchmarks/rotary_cpu.py

Forward and backward together, and forward alone, as in generation. Writes `docs/benchmarks/rotary_cpu.csv`.
"""

import jax.numpy as jnp
from against_plain import Case, main, normal

from ejkernel_ops import rotary_embedding

HEADS, HEAD_DIM, THETA = 16, 64, 10000.0
LENGTHS = (512, 2048, 8192)


def plain(x, positions):
    """Halves that trade places, one with its sign changed: the expression of Llama in most libraries."""
    freqs = 1 / THETA ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None] * freqs
    cos, sin = (jnp.concatenate([f(angles), f(angles)], -1)[:, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def case(length, gradients):
    about = {"length": length, "heads": HEADS, "head_dim": HEAD_DIM, "gradients": gradients}
    arrays = normal(0, 1, length, HEADS, HEAD_DIM), jnp.arange(length)
    return Case(about, rotary_embedding, plain, arrays, gradients)


if __name__ == "__main__":
    main(__doc__, [case(length, gradients) for length in LENGTHS for gradients in (True, False)], "rotary_cpu")
