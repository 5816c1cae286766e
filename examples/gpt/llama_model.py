"""A Llama of the layers that Flax NNX lacks and ejlayers has; its training is that of the GPT of NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ejlayers import Rotary, RotaryScaling
from ejlayers.nnx import Attention, Embed, GatedMLP, LMHead, RMSNorm

from .nnx_model import State, with_optimizer
from .nnx_model import abstract as abstract
from .nnx_model import arrays_of as arrays_of
from .nnx_model import eval_step as eval_step
from .nnx_model import next_logits as next_logits
from .nnx_model import train_step as train_step
from .nnx_model import with_arrays as with_arrays
from .recipe import inputs_and_labels
from .sizes import LlamaSize

BASELINE = "untuned"  # there is no model of stock layers to compare with

ROTARY = Rotary(theta=500000.0, scaling=RotaryScaling(kind="llama3", factor=32, original_length=8192))


class Block(nnx.Module):
    """Attention, then a gated perceptron, each on normalised inputs and added to the stream."""

    def __init__(self, size: LlamaSize, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, options = size.width, {"dtype": dtype, "rngs": rngs}
        self.norm1 = RMSNorm(width, epsilon=1e-5, **options)
        self.attention = Attention(width, size.heads, num_kv_heads=size.kv_heads, rotary=ROTARY, **options)
        self.norm2 = RMSNorm(width, epsilon=1e-5, **options)
        self.mlp = GatedMLP(width, size.hidden, **options)

    def __call__(self, x: jax.Array, **attention: Any) -> jax.Array:
        """`(batch, length, width)` to the same."""
        x = x + self.attention(self.norm1(x), **attention)
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    """Bytes in, logits of the next byte out, by the matrix that embeds them."""

    def __init__(self, size: LlamaSize, dtype: jnp.dtype, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.bytes = Embed(256, size.width, dtype=dtype, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = RMSNorm(size.width, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.head = LMHead(size.width, 256, embedding=self.bytes, dtype=dtype)

    def hidden(self, tokens: jax.Array, **attention: Any) -> jax.Array:
        """`(batch, length)` int32 to `(batch, length, width)`; options are those of a call of `Attention`."""
        x = self.bytes(tokens)
        for block in self.blocks:
            x = block(x, **attention)
        return self.norm(x)

    def __call__(self, tokens: jax.Array, **attention: Any) -> jax.Array:
        """`(batch, length)` int32 to `(batch, length, 256)`; options are those of a call of `Attention`."""
        return self.head(self.hidden(tokens, **attention))

    def loss(self, tokens: jax.Array) -> jax.Array:
        """How badly each byte but the first of `(batch, length)` is foretold, in nats, without all logits at once."""
        inputs, labels = inputs_and_labels(tokens)
        return self.head.loss(self.hidden(inputs), labels)


def new_state(size: LlamaSize, dtype: jnp.dtype, seed: int, steps: int, prepared: Any = lambda model: model) -> State:
    """The model, after what is to be done to it before training, and its optimizer."""
    return with_optimizer(prepared(Llama(size, dtype, nnx.Rngs(seed))), size, steps)
