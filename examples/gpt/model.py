"""The model: a GPT of stock Flax NNX layers. Nothing here knows of ejlayers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model and its batches are, and how long it trains."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float


SIZES = {
    "smoke": Size(layers=1, width=32, heads=2, context=64, batch=4, steps=20, learning_rate=3e-3),
    "tiny": Size(layers=3, width=96, heads=3, context=256, batch=16, steps=700, learning_rate=4e-3),
    "small": Size(layers=6, width=384, heads=6, context=512, batch=32, steps=3000, learning_rate=1e-3),
    "gpt2-small": Size(layers=12, width=768, heads=12, context=1024, batch=16, steps=3000, learning_rate=6e-4),
}


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


def make_optimizer(model: GPT, size: Size, steps: int) -> nnx.Optimizer:
    """AdamW with warm-up and cosine decay."""
    peak = size.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(50, max(1, steps // 10)), max(steps, 2), peak / 20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.05))
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_of(model: GPT, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte, in nats."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step of training; returns the loss before it."""
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model: GPT, tokens: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return loss_of(model, tokens)


@nnx.jit
def next_byte(model: GPT, tokens: jax.Array, length: jax.Array, rng: jax.Array) -> jax.Array:
    """Draws the byte after the first `length` ones of a padded context, at temperature 0.8."""
    logits = model(tokens)[:, length - 1].astype(jnp.float32)
    return jax.random.categorical(rng, logits / 0.8)[0]


def sample(model: GPT, prompt: bytes, count: int, context: int, seed: int = 0) -> str:
    """Continues a prompt by `count` bytes."""
    text, rng = list(prompt), jax.random.key(seed)
    for index in range(count):
        seen = text[-context:]
        padded = jnp.array([seen + [0] * (context - len(seen))], jnp.int32)
        text.append(int(next_byte(model, padded, jnp.int32(len(seen)), jax.random.fold_in(rng, index))))
    shown = bytes(text).decode("utf-8", errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in shown)
