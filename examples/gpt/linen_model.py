"""The GPT of stock Flax Linen layers, and its training. Nothing here knows of ejlayers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from .recipe import adamw, cross_entropy, inputs_and_labels
from .sizes import Size

BASELINE = "stock"

abstract = jax.eval_shape


class Block(nn.Module):
    """Attention, then a perceptron, each on normalised inputs and added to the stream."""

    size: Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`(batch, length, width)` to the same."""
        normed = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.size.heads, dtype=self.dtype, use_bias=False)(normed, mask=mask)
        up = nn.Dense(4 * self.size.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(self.size.width, dtype=self.dtype)(nn.gelu(up))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    size: Size
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`(batch, length)` int32 to `(batch, length, 256)`."""
        size, small = self.size, nn.initializers.normal(0.02)
        x = nn.Embed(256, size.width, dtype=self.dtype, embedding_init=small, name="bytes")(tokens)
        positions = nn.Embed(size.context, size.width, dtype=self.dtype, embedding_init=small, name="positions")
        x, mask = x + positions(jnp.arange(tokens.shape[1]))[None], nn.make_causal_mask(tokens)
        for _ in range(size.layers):
            x = Block(size, self.dtype)(x, mask)
        return nn.Dense(256, use_bias=False, dtype=self.dtype, name="head")(nn.LayerNorm(dtype=self.dtype)(x))


def new_state(size: Size, dtype: jnp.dtype, seed: int, steps: int, prepared: Any = lambda model: model) -> TrainState:
    """The parameters of the model, after what is to be done to it before training, and its optimizer."""
    model = prepared(GPT(size, dtype))
    params = model.init(jax.random.key(seed), jnp.zeros((1, size.context), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=adamw(size, steps))


def loss_of(params: Any, state: TrainState, tokens: jax.Array) -> jax.Array:
    """How badly each byte but the first of `(batch, length)` is foretold, in nats."""
    inputs, labels = inputs_and_labels(tokens)
    return cross_entropy(state.apply_fn({"params": params}, inputs), labels)


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step of training; returns the next state, and the loss before the step."""
    loss, grads = jax.value_and_grad(loss_of)(state.params, state, tokens)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def eval_step(state: TrainState, tokens: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return loss_of(state.params, state, tokens)


@jax.jit
def next_logits(state: TrainState, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Logits `(256,)` of the byte after the first `length` ones of a padded context `(context,)`."""
    return state.apply_fn({"params": state.params}, tokens[None])[0, length - 1]


def arrays_of(state: TrainState) -> Any:
    """All arrays of a state, to be saved."""
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def with_arrays(state: TrainState, arrays: Any) -> TrainState:
    """The state with saved arrays for its own."""
    return state.replace(**arrays)
