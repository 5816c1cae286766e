"""The GPT of stock Equinox layers, and its training. Nothing here knows of ejlayers."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .recipe import adamw, cross_entropy, inputs_and_labels
from .sizes import Size

BASELINE = "stock"

abstract = eqx.filter_eval_shape


class Block(eqx.Module):
    """Attention, then a perceptron, each on normalised inputs and added to the stream."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, size: Size, key: jax.Array):
        width, keys = size.width, jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width, eps=1e-6)
        self.attention = eqx.nn.MultiheadAttention(size.heads, width, key=keys[0])
        self.norm2 = eqx.nn.LayerNorm(width, eps=1e-6)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`(length, width)` to the same."""
        normed = jax.vmap(self.norm1)(x)
        x = x + self.attention(normed, normed, normed, mask)
        up = jax.vmap(self.up)(jax.vmap(self.norm2)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(up))


class GPT(eqx.Module):
    """Bytes of one example in, logits of the next byte out. The parameters are float32, whatever it computes in."""

    bytes: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    dtype: jnp.dtype = eqx.field(static=True)

    def __init__(self, size: Size, dtype: jnp.dtype, key: jax.Array):
        keys, small = jax.random.split(key, size.layers + 3), jax.nn.initializers.normal(0.02)
        self.bytes = eqx.nn.Embedding(weight=small(keys[0], (256, size.width)))
        self.positions = eqx.nn.Embedding(weight=small(keys[1], (size.context, size.width)))
        self.blocks = [Block(size, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(size.width, eps=1e-6)
        self.head = eqx.nn.Linear(size.width, 256, use_bias=False, key=keys[2])
        self.dtype = dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`(length,)` int32 to `(length, 256)`."""
        model = jax.tree.map(lambda x: x.astype(self.dtype) if eqx.is_inexact_array(x) else x, self)
        length = len(tokens)
        x = jax.vmap(model.bytes)(tokens) + jax.vmap(model.positions)(jnp.arange(length))
        mask = jnp.tri(length, dtype=bool)
        for block in model.blocks:
            x = block(x, mask)
        return jax.vmap(lambda x: model.head(model.norm(x)))(x)


def with_flax_weights(model: GPT, key: jax.Array) -> GPT:
    """The model with the first weights that Flax gives linear layers, so that the frameworks start alike."""

    def linears(model):
        leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, eqx.nn.Linear))
        return [x for x in leaves if isinstance(x, eqx.nn.Linear)]

    draw, keys = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0), iter(jax.random.split(key, 1000))
    model = eqx.tree_at(lambda m: [x.weight for x in linears(m)], model, replace_fn=lambda w: draw(next(keys), w.shape))
    return eqx.tree_at(lambda m: [x.bias for x in linears(m) if x.use_bias], model, replace_fn=jnp.zeros_like)


class State(eqx.Module):
    """All that training changes, and the optimizer."""

    model: GPT
    opt_state: optax.OptState
    tx: optax.GradientTransformation = eqx.field(static=True)


def new_state(size: Size, dtype: jnp.dtype, seed: int, steps: int, prepared: Any = lambda model: model) -> State:
    """The model, after what is to be done to it before training, and its optimizer."""
    keys, tx = jax.random.split(jax.random.key(seed)), adamw(size, steps)
    model = prepared(with_flax_weights(GPT(size, dtype, keys[0]), keys[1]))
    return State(model, tx.init(eqx.filter(model, eqx.is_inexact_array)), tx)


def loss_of(model: GPT, tokens: jax.Array) -> jax.Array:
    """How badly each byte but the first of `(batch, length)` is foretold, in nats."""
    inputs, labels = inputs_and_labels(tokens)
    return cross_entropy(jax.vmap(model)(inputs), labels)


@eqx.filter_jit
def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step of training; returns the next state, and the loss before the step."""
    loss, grads = eqx.filter_value_and_grad(loss_of)(state.model, tokens)
    params = eqx.filter(state.model, eqx.is_inexact_array)
    updates, opt_state = state.tx.update(grads, state.opt_state, params)
    return State(eqx.apply_updates(state.model, updates), opt_state, state.tx), loss


@eqx.filter_jit
def eval_step(state: State, tokens: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return loss_of(state.model, tokens)


@eqx.filter_jit
def next_logits(state: State, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Logits `(256,)` of the byte after the first `length` ones of a padded context `(context,)`."""
    return state.model(tokens)[length - 1]


def arrays_of(state: State) -> Any:
    """All arrays of a state, to be saved."""
    return eqx.filter(state, eqx.is_array)


def with_arrays(state: State, arrays: Any) -> State:
    """The state with saved arrays for its own."""
    return eqx.combine(arrays, state)
