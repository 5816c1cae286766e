"""MiniLM, a BERT of six layers, of stock Equinox layers. Nothing here knows of ejlayers."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .pairs import pair_loss


class Layer(eqx.Module):
    """Attention and a perceptron, each added to its input and normalised after it."""

    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    output_norm: eqx.nn.LayerNorm

    def __init__(self, width: int, heads: int, key: jax.Array):
        first, second, third = jax.random.split(key, 3)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(heads, width, **biases, key=first)
        self.attention_norm = eqx.nn.LayerNorm(width, eps=1e-12)
        self.up = eqx.nn.Linear(width, 4 * width, key=second)
        self.down = eqx.nn.Linear(4 * width, width, key=third)
        self.output_norm = eqx.nn.LayerNorm(width, eps=1e-12)

    def __call__(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """`(length, width)` to the same; `is_token` is `(length,)`."""
        mask = jnp.broadcast_to(is_token, (x.shape[0], x.shape[0]))
        x = jax.vmap(self.attention_norm)(x + self.attention(x, x, x, mask=mask))
        hidden = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        return jax.vmap(self.output_norm)(x + jax.vmap(self.down)(hidden))


class MiniLM(eqx.Module):
    """Token ids in, one vector a sentence out."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    layers: list[Layer]

    def __init__(self, key: jax.Array, *, width: int = 384, heads: int = 12, layers: int = 6, words: int = 30522):
        keys = jax.random.split(key, 3 + layers)
        self.words = eqx.nn.Embedding(words, width, key=keys[0])
        self.positions = eqx.nn.Embedding(512, width, key=keys[1])
        self.types = eqx.nn.Embedding(2, width, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width, eps=1e-12)
        self.layers = [Layer(width, heads, key) for key in keys[3:]]

    def __call__(self, tokens: jax.Array, is_token: jax.Array) -> jax.Array:
        """`(batch, length)` ids, and which of them are no padding, to `(batch, width)` of length 1."""
        return jax.vmap(self._sentence)(tokens, is_token)

    def _sentence(self, tokens: jax.Array, is_token: jax.Array) -> jax.Array:
        x = self.words.weight[tokens] + self.positions.weight[: len(tokens)] + self.types.weight[0]
        x = jax.vmap(self.norm)(x)
        for layer in self.layers:
            x = layer(x, is_token)
        mean = jnp.where(is_token[:, None], x, 0).sum(0) / is_token.sum()
        return mean / jnp.linalg.norm(mean)


def new() -> MiniLM:
    """The model without weights: nothing is allocated that the checkpoint brings."""
    return eqx.filter_eval_shape(lambda: MiniLM(jax.random.key(0)))


def fine_tuned(model: MiniLM, pairs: tuple, steps: int, rate: float) -> tuple[MiniLM, list[float]]:
    """Trains on pairs of sentences that mean the same; returns the new model and the losses."""
    tx = optax.adam(rate)
    state, losses = tx.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(steps):
        model, state, loss = train_step(tx, model, state, *pairs)
        losses.append(float(loss))
    return model, losses


@eqx.filter_jit
def train_step(tx: Any, model: MiniLM, state: Any, first: tuple, second: tuple) -> tuple[MiniLM, Any, jax.Array]:
    """One step; each sentence's partner is the one among all of the batch that it should be nearest to."""
    loss, grads = eqx.filter_value_and_grad(lambda model: pair_loss(model(*first), model(*second)))(model)
    updates, state = tx.update(grads, state)
    return eqx.apply_updates(model, updates), state, loss
