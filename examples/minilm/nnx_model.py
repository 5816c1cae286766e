"""MiniLM, a BERT of six layers, of stock Flax NNX layers. Nothing here knows of ejlayers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .pairs import pair_loss


class Layer(nnx.Module):
    """Attention and a perceptron, each added to its input and normalised after it."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.output_norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`(batch, length, width)` to the same; `mask` is `(batch, 1, 1, length)`."""
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.output_norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class MiniLM(nnx.Module):
    """Token ids in, one vector a sentence out."""

    def __init__(self, rngs: nnx.Rngs, *, width: int = 384, heads: int = 12, layers: int = 6, words: int = 30522):
        self.words = nnx.Embed(words, width, rngs=rngs)
        self.positions = nnx.Embed(512, width, rngs=rngs)
        self.types = nnx.Embed(2, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, rngs) for _ in range(layers)])

    def __call__(self, tokens: jax.Array, is_token: jax.Array) -> jax.Array:
        """`(batch, length)` ids, and which of them are no padding, to `(batch, width)` of length 1."""
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1])) + self.types(jnp.zeros_like(tokens))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, is_token[:, None, None, :])
        mean = jnp.where(is_token[..., None], x, 0).sum(1) / is_token.sum(1, keepdims=True)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def new() -> MiniLM:
    """The model without weights: nothing is allocated that the checkpoint brings."""
    return nnx.eval_shape(lambda: MiniLM(nnx.Rngs(0)))


def fine_tuned(model: MiniLM, pairs: tuple, steps: int, rate: float) -> tuple[MiniLM, list[float]]:
    """Trains the model in place on pairs of sentences that mean the same; returns it and the losses."""
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    return model, [float(train_step(model, optimizer, *pairs)) for _ in range(steps)]


@nnx.jit
def train_step(model: MiniLM, optimizer: nnx.Optimizer, first: tuple, second: tuple) -> jax.Array:
    """One step; each sentence's partner is the one among all of the batch that it should be nearest to."""
    loss, grads = nnx.value_and_grad(lambda model: pair_loss(model(*first), model(*second)))(model)
    optimizer.update(model, grads)
    return loss
