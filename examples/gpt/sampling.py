"""Text from a model."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

TEMPERATURE = 0.8


def sample(next_logits: Callable, prompt: bytes, count: int, context: int, seed: int) -> str:
    """Continues a prompt by `count` bytes, drawn by `next_logits(padded context, length)`."""
    text, rng = list(prompt), jax.random.key(seed)
    for index in range(count):
        seen = text[-context:]
        padded = jnp.array(seen + [0] * (context - len(seen)), jnp.int32)
        logits = next_logits(padded, jnp.int32(len(seen))).astype(jnp.float32)
        text.append(int(jax.random.categorical(jax.random.fold_in(rng, index), logits / TEMPERATURE)))
    shown = bytes(text).decode("utf-8", errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in shown)
