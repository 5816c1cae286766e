"""Sentences that mean the same, and the loss that brings them together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

PAIRS = [
    ("A cat sits on the mat.", "A kitten rests on a rug."),
    ("The stock market fell today.", "Shares lost value this afternoon."),
    ("How do I bake bread?", "What is a recipe for a simple loaf?"),
    ("The train to Berlin is late.", "There is a delay on the Berlin line."),
    ("She plays the violin well.", "Her skill on the fiddle is remarkable."),
    ("Water boils at 100 degrees.", "At sea level the boiling point of water is 100 C."),
    ("My laptop does not start.", "The computer will not boot."),
    ("He won the chess tournament.", "The title at chess went to him."),
]


def pair_loss(first: jax.Array, second: jax.Array) -> jax.Array:
    """Cross-entropy of the right partner among all, over 5 times the cosine; both are `(pairs, width)`."""
    logits = 5.0 * first @ second.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(first))).mean()
