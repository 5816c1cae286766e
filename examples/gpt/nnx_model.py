"""The GPT of stock Flax NNX layers, and its training. Nothing here knows of ejlayers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .recipe import adamw, cross_entropy, inputs_and_labels
from .sizes import Size

BASELINE = "stock"

abstract = nnx.eval_shape

State = tuple[nnx.Module, nnx.Optimizer]


class Block(nnx.Module):
    """Attention, then a perceptron, each on normalised inputs and added to the stream."""

    def __init__(self, size: Size, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = size.width
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(size.heads, width, dtype=dtype, use_bias=False, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(batch, length, width)` to the same."""
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size, dtype: jnp.dtype, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.bytes = nnx.Embed(256, size.width, dtype=dtype, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(size.context, size.width, dtype=dtype, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(size.width, 256, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`(batch, length)` int32 to `(batch, length, 256)`."""
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: jax.Array) -> jax.Array:
        """How badly each byte but the first of `(batch, length)` is foretold, in nats."""
        inputs, labels = inputs_and_labels(tokens)
        return cross_entropy(self(inputs), labels)


def new_state(size: Size, dtype: jnp.dtype, seed: int, steps: int, prepared: Any = lambda model: model) -> State:
    """The model, after what is to be done to it before training, and its optimizer."""
    return with_optimizer(prepared(GPT(size, dtype, nnx.Rngs(seed))), size, steps)


def with_optimizer(model: nnx.Module, size: Size, steps: int) -> State:
    """A model and its optimizer."""
    return model, nnx.Optimizer(model, adamw(size, steps), wrt=nnx.Param)


@nnx.jit
def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step of training, in place; returns the same state, and the loss before the step."""
    model, optimizer = state
    loss, grads = nnx.value_and_grad(lambda model: model.loss(tokens))(model)
    optimizer.update(model, grads)
    return state, loss


@nnx.jit
def eval_step(state: State, tokens: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return state[0].loss(tokens)


@nnx.jit
def next_logits(state: State, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Logits `(256,)` of the byte after the first `length` ones of a padded context `(context,)`."""
    return state[0](tokens[None])[0, length - 1]


def arrays_of(state: State) -> Any:
    """All arrays of a state, to be saved."""
    return nnx.to_pure_dict(nnx.state(state))


def with_arrays(state: State, arrays: Any) -> State:
    """The state with saved arrays for its own, in place."""
    nnx.update(state, arrays)
    return state
