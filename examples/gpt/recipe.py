"""How every model is trained: the optimizer and the loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .sizes import Size


def adamw(size: Size, steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay."""
    peak = size.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(50, max(1, steps // 10)), max(steps, 2), peak / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.05))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all bytes, in nats: of logits `(..., 256)` and labels `(...)`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
