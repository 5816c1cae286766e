"""Models built as the public examples of the frameworks build them train, once swapped, to the losses of stock ones.

The shapes are tiny and the data made up; attention is masked by padding, causal, both, or not at all.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ejlayers
from ejkernel_ops import find_labels_in_lowered

pytestmark = pytest.mark.once

WIDTH, HEADS, LENGTH, VOCAB, BATCH, STEPS = 32, 4, 12, 16, 8, 100


def sequences(step):
    """Tokens that count up by 1 or 2 from 1 on, each sequence with its own start and length; the rest is padding, 0."""
    rng = np.random.default_rng(step)
    starts, strides, lengths = (rng.integers(*limits, (BATCH, 1)) for limits in ((0, 15), (1, 3), (5, LENGTH + 1)))
    places = np.arange(LENGTH)
    return np.where(places < lengths, 1 + (starts + strides * places) % (VOCAB - 1), 0), (strides - 1)[:, 0]


def images(step):
    """Stripes of 12 pixels a side, upright or lying, and which."""
    rng = np.random.default_rng(step)
    upright, phases = rng.integers(0, 2, BATCH), rng.integers(0, 4, (BATCH, 1, 1))
    rows, columns = np.mgrid[:12, :12]
    places = np.where(upright[:, None, None], columns, rows)
    noise = rng.normal(0, 0.3, (BATCH, 12, 12))
    return (((places + phases) // 2 % 2) + noise).astype(np.float32), upright


def waves():
    """Sines and cosines of the positions, `(LENGTH, WIDTH)`."""
    angles = np.arange(LENGTH)[:, None] / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)


def mean_loss(logits, labels, weights=None):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


# As in Flax's examples: tied embedding, waves for positions, padding and causality in one mask; modules in setup


class LinenDecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x += nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


class LinenLanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed, seen = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0)), tokens > 0
        mask = nn.combine_masks(nn.make_attention_mask(seen, seen), nn.make_causal_mask(tokens))
        x = embed(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]) + waves()
        for _ in range(2):
            x = LinenDecoderBlock()(x, mask)
        return embed.attend(nn.LayerNorm()(x)) / np.sqrt(WIDTH)


class LinenEncoderBlock(nn.Module):
    def setup(self):
        self.norms = [nn.LayerNorm() for _ in range(2)]
        self.attention = nn.MultiHeadDotProductAttention(HEADS)
        self.up, self.down = nn.Dense(2 * WIDTH), nn.Dense(WIDTH)

    def __call__(self, x, mask):
        x += self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nn.gelu(self.up(self.norms[1](x))))


class LinenTagger(nn.Module):
    """Both directions are seen, only padding is not."""

    @nn.compact
    def __call__(self, tokens):
        mask = nn.make_attention_mask(tokens > 0, tokens > 0)
        x = nn.Embed(VOCAB, WIDTH)(tokens) + waves()
        for index in range(2):
            x = LinenEncoderBlock(name=f"block_{index}")(x, mask)
        return nn.Dense(2)(nn.LayerNorm()(x))


class NnxDecoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x += self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.relu(self.up(self.norms[1](x))))


class NnxLanguageModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = nnx.List([NnxDecoderBlock(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        seen = tokens > 0
        mask = nnx.combine_masks(nnx.make_attention_mask(seen, seen), nnx.make_causal_mask(tokens))
        x = self.embed(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]) + waves()
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x)) / np.sqrt(WIDTH)


# As in Equinox's examples: normalised after each part, an extra first token that is read out


class EquinoxBertBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, **biases, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.up, self.down = (eqx.nn.Linear(*n, key=k) for n, k in zip(((32, 64), (64, 32)), keys[1:]))

    def __call__(self, x, mask=None):
        x = jax.vmap(self.norms[0])(x + self.attention(x, x, x, mask))
        return jax.vmap(lambda x: self.norms[1](x + self.down(jax.nn.gelu(self.up(x)))))(x)


class EquinoxBert(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    blocks: list
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.tokens, self.positions = (eqx.nn.Embedding(n, WIDTH, key=k) for n, k in zip((VOCAB, LENGTH), keys))
        self.norm, self.blocks = eqx.nn.LayerNorm(WIDTH), [EquinoxBertBlock(k) for k in keys[2:4]]
        self.pooler, self.head = (eqx.nn.Linear(WIDTH, n, key=k) for n, k in zip((WIDTH, 2), keys[4:]))

    def __call__(self, tokens):
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(LENGTH))
        x, mask = jax.vmap(self.norm)(x), jnp.broadcast_to(tokens > 0, (LENGTH, LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(jnp.tanh(self.pooler(x[0])))


class EquinoxVit(eqx.Module):
    patches: eqx.nn.Linear
    first: jax.Array
    positions: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.patches, self.head = eqx.nn.Linear(16, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, 2, key=keys[1])
        self.first, self.positions = (jax.random.normal(k, (n, WIDTH)) / 10 for n, k in zip((1, 10), keys[2:4]))
        self.blocks = [EquinoxBertBlock(k) for k in keys[4:]]

    def __call__(self, image):
        patches = image.reshape(3, 4, 3, 4).swapaxes(1, 2).reshape(9, 16)
        x = jnp.concatenate([self.first, jax.vmap(self.patches)(patches)]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[0])


# How each is trained


def each_next(model, batch):
    tokens, _ = batch
    return mean_loss(model(tokens), tokens, tokens > 0)  # the model shifts them


def each_tag(model, batch):
    tokens, strides = batch
    return mean_loss(model(tokens), jnp.broadcast_to(strides[:, None], tokens.shape), tokens > 0)


def each_example(model, batch):
    return mean_loss(jax.vmap(model)(batch[0]), batch[1])


def train_linen(module, loss_of, data):
    tx, (x, _) = optax.adam(3e-3), data(0)
    params = module.init(jax.random.key(0), x)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(lambda x: module.apply(p, x), batch))(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return run(step, (params, tx.init(params)), data)


def train_nnx(model, loss_of, data):
    @nnx.jit
    def step(state, batch):
        loss, grads = nnx.value_and_grad(loss_of)(state[0], batch)
        state[1].update(state[0], grads)
        return state, loss

    return run(step, (model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)), data)


def train_equinox(model, loss_of, data):
    tx = optax.adam(3e-3)

    @eqx.filter_jit
    def step(state, batch):
        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), loss

    return run(step, (model, tx.init(eqx.filter(model, eqx.is_inexact_array))), data)


def run(step, state, data):
    """The losses of all steps, and the labels of the kernels in a step."""
    labels, losses = find_labels_in_lowered(step.lower(state, data(0))), []
    for index in range(STEPS):
        state, loss = step(state, data(index))
        losses.append(float(loss))
    return losses, labels


CASES = {
    "linen language model": (train_linen, LinenLanguageModel, each_next, sequences),
    "linen tagger": (train_linen, LinenTagger, each_tag, sequences),
    "nnx language model": (train_nnx, lambda: NnxLanguageModel(nnx.Rngs(0)), each_next, sequences),
    "equinox text classifier": (train_equinox, lambda: EquinoxBert(jax.random.key(0)), each_example, sequences),
    "equinox image classifier": (train_equinox, lambda: EquinoxVit(jax.random.key(0)), each_example, images),
}


@pytest.mark.parametrize("name", CASES)
def test_swapped_it_trains_to_the_losses_of_the_stock_layers(name):
    train, make, loss_of, data = CASES[name]
    stock, none = train(make(), loss_of, data)
    losses, labels = train(ejlayers.swap(make()), loss_of, data)
    assert not none
    assert {"flash_attention", "flash_attention_bwd", "linear", "linear_bwd", "layer_norm"} <= {
        label.partition("#")[2].partition("@")[0] for label in labels
    }
    assert np.mean(stock[-10:]) < 0.8 * stock[0]  # there was something to learn
    np.testing.assert_allclose(losses, stock, atol=1e-4)
