"""How every model is trained: what it foretells, the optimizer and the loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from .sharding import TOKENS
from .sizes import Size


def inputs_and_labels(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bytes that a model sees, and those that it foretells, `(batch, length)` each, of `(batch, length + 1)`."""
    pair = tokens[:, :-1], tokens[:, 1:]
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    return tuple(jax.lax.with_sharding_constraint(x, TOKENS) for x in pair) if on_mesh else pair


@functools.cache  # states of one run are of one type: that of Equinox and Linen has the optimizer in it
def adamw(size: Size, steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay."""
    peak = size.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(50, max(1, steps // 10)), max(steps, 2), peak / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.05))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all bytes, in nats: of logits `(..., 256)` and labels `(...)`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
