"""The layers that Equinox lacks: attention of language models, a gated MLP, a head with its loss."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import ejkernel_ops as ek
import ejlayers
from ejlayers import Rotary

from .ops import kernels_of

WIDTH, LENGTH = 16, 9
KEY = jax.random.key(3)
OURS = ejlayers.equinox
X = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))


# Attention


def turned(x, theta=10000.0):
    """Halves of each head as complex numbers, turned."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], -1)


def reference(layer, x, seen, cap=None, rotary=False):
    """Grouped heads by repetition, and softmax with a sink."""
    projections = (layer.query_proj, layer.key_proj, layer.value_proj)
    q, k, v = ((x @ m.weight.T).reshape(len(x), -1, layer.head_dim) for m in projections)
    if layer.query_norm is not None:
        q, k = (a / jnp.sqrt(jnp.square(a).mean(-1, keepdims=True) + 1e-6) for a in (q, k))
    if rotary:
        q, k = turned(q), turned(k)
    k, v = (jnp.repeat(a, q.shape[1] // k.shape[1], 1) for a in (k, v))
    logits = jnp.einsum("qnh,knh->nqk", q, k) / np.sqrt(q.shape[-1])
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    exps = jnp.where(seen, jnp.exp(logits), 0)
    sink = 0 if layer.sinks is None else jnp.exp(layer.sinks)[:, None, None]
    probs = exps / (exps.sum(-1, keepdims=True) + sink)
    return jnp.einsum("nqk,knh->qnh", probs, v).reshape(len(x), -1) @ layer.output_proj.weight.T


def apart(i, j, left):
    return (i - j <= left) & (j <= i)


GRID = (np.arange(LENGTH)[:, None], np.arange(LENGTH)[None])
ALL = apart(*GRID, 99)
SEEN_BY_HEAD = np.asarray(jax.random.bernoulli(KEY, 0.7, (4, LENGTH, LENGTH))) | np.eye(LENGTH, dtype=bool)
ATTENTION = {
    "plain": ({}, {}, ALL, {}),
    "encoder": ({"causal": False}, {}, np.ones((LENGTH, LENGTH), bool), {}),
    "one key head, rotary": ({"num_kv_heads": 1, "rotary": Rotary()}, {}, ALL, {"rotary": True}),
    "heads of another size": ({"head_dim": 6, "out_features": 5}, {}, ALL, {}),
    "window, norm, sinks, cap": (
        {"num_kv_heads": 2, "sliding_window": 3, "qk_norm": True, "sinks": True, "logits_soft_cap": 0.7}, {},
        apart(*GRID, 3), {"cap": 0.7},
    ),
    "segments": ({}, {"segment_ids": np.arange(LENGTH) // 4}, ALL & (GRID[0] // 4 == GRID[1] // 4), {}),
    "length": ({}, {"kv_lengths": np.int32(5)}, ALL & (np.arange(LENGTH) < 5), {}),
    "mask": ({}, {"mask": SEEN_BY_HEAD}, ALL & SEEN_BY_HEAD, {}),
}  # fmt: skip


def attention(key=KEY, **kwargs):
    layer = OURS.Attention(WIDTH, 4, key=key, **kwargs)
    return eqx.tree_at(lambda m: m.sinks, layer, jnp.arange(4) / 4) if layer.sinks is not None else layer


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_the_formula(name):
    kwargs, call, seen, options = ATTENTION[name]
    layer = attention(**kwargs)
    np.testing.assert_allclose(layer(X[0], **call), reference(layer, X[0], seen, **options), atol=2e-5)


@pytest.mark.parametrize("name", ATTENTION)
def test_a_batch_is_one_kernel_call_of_each_layer(name):
    kwargs, call, _, _ = ATTENTION[name]
    layer = attention(**kwargs)

    def loss(layer, x):
        return jnp.square(jax.vmap(lambda x: layer(x, **call))(x)).sum()

    counts = kernels_of(eqx.filter_grad(loss), layer, X)
    rotary, norm = 2 * ("rotary" in kwargs), 2 * ("qk_norm" in kwargs)
    want = {"linear": 4, "flash_attention": 1, "rotary_embedding": rotary, "rms_norm": norm}
    assert counts == {f"{op}{way}": n for op, n in want.items() for way in ("", "_bwd") if n}


DECODING = [
    {"rotary": Rotary(), "num_kv_heads": 2},
    {"rotary": Rotary(fraction=0.5, interleaved=True), "sliding_window": (2, 0), "sinks": True, "qk_norm": True},
    {"dtype": jnp.bfloat16, "logits_soft_cap": 5.0},
]


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 1, 3)])
@pytest.mark.parametrize("kwargs", DECODING)
def test_decoding_gives_what_all_tokens_at_once_give(kwargs, sizes):
    layer = attention(**kwargs)
    x = X[0].astype(kwargs.get("dtype", jnp.float32))
    whole, cache, parts = layer(x), layer.init_cache(12), []
    decode = eqx.filter_jit(lambda layer, x, cache: layer(x, cache=cache))
    for a, b in itertools.pairwise(np.cumsum((0, *sizes))):
        out, cache = decode(layer, x[a:b], cache)
        parts.append(out)
    got = jnp.concatenate(parts)
    assert got.dtype == whole.dtype == cache.key.dtype
    assert cache.index == LENGTH
    tolerance = 1e-5 if whole.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, whole)), atol=tolerance)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 7)])
def test_examples_of_a_batch_decode_each_from_its_own_index(sizes):
    layer, decode = attention(rotary=Rotary()), jax.vmap(lambda layer, x, cache: layer(x, cache=cache), (None, 0, 0))
    _, first = layer(X[0, : sizes[0]], cache=layer.init_cache(LENGTH))  # which has some tokens already
    empty = eqx.filter_vmap(lambda: layer.init_cache(LENGTH), axis_size=1)()
    caches = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, empty)
    new = jnp.stack([X[0, sizes[0] : sizes[0] + 2], X[1, :2]])
    out, caches = decode(layer, new, caches)
    np.testing.assert_allclose(out[0], layer(X[0])[sizes[0] : sizes[0] + 2], atol=1e-5)
    np.testing.assert_allclose(out[1], layer(X[1])[:2], atol=1e-5)
    assert caches.index.tolist() == [sizes[0] + 2, 2]
    assert kernels_of(decode, layer, new, caches) == {"linear": 4, "rotary_embedding": 2, "flash_attention": 1}


def test_what_does_not_fit_into_a_cache_is_an_error_or_nan():
    layer = attention()
    decode = eqx.filter_jit(lambda layer, x, cache: layer(x, cache=cache))
    _, cache = layer(X[0, :6], cache=layer.init_cache(8))
    with pytest.raises(ValueError, match=r"room for 8 tokens.* 3 more do not fit after 6"):
        layer(X[0, 6:], cache=cache)
    assert jnp.isnan(decode(layer, X[0, 6:], cache)[0]).all()
    run = checkify.checkify(jax.jit(lambda x, cache: layer(x, cache=cache)))
    with pytest.raises(checkify.JaxRuntimeError, match="room for 8 tokens"):
        run(X[0, 6:], cache)[0].throw()


@pytest.mark.parametrize(("kwargs", "call", "message"), [
    ({}, {"x": X}, r"x has shape \(2, 9, 16\); expected \(length, 16\): for a batch use jax.vmap"),
    ({"causal": False}, {"cache": 9}, r"decoding needs causal=True"),
    ({}, {"cache": 9, "segment_ids": np.zeros(LENGTH, int)}, r"segment_ids are given while decoding"),
    ({"dropout_p": 0.5}, {"cache": 9, "key": KEY}, r"dropout is on while decoding; turn it off .*inference=True"),
    ({"dropout_p": 0.5}, {}, r"key is None and dropout is on, with p=0.5"),
    ({}, {"cache": 0}, "max_length is 0; expected at least 1 token"),
    ({}, {"x": X[0, :, :15]}, r"x has shape \(9, 15\); expected \(length, 16\)"),
    ({}, {"mask": np.ones((8, 9), bool)}, r"mask has shape \(8, 9\); expected what broadcasts to .*, \(4, 9, 9\)"),
    ({}, {"cache": 12, "mask": np.ones((9, 9), bool)}, r"mask has shape \(9, 9\); expected .* \(4, 9, 12\)"),
    ({}, {"bias": np.ones((1, 4, 9, 9))}, r"bias has shape \(1, 4, 9, 9\); expected .*, \(4, 9, 9\)"),
    ({}, {"segment_ids": np.ones(8, int)}, r"^segment_ids has shape \(8,\); expected \(9,\): for a batch use jax.vmap"),
    ({}, {"kv_lengths": np.ones(9, int)}, r"kv_lengths has shape \(9,\); expected \(\): for a batch use jax.vmap"),
    ({"rotary": Rotary()}, {"positions": np.ones((1, 9), int)}, r"positions has shape \(1, 9\); expected \(9,\)"),
])  # fmt: skip
def test_calls_that_cannot_be_are_refused(kwargs, call, message):
    layer, call = attention(**kwargs), {"x": X[0]} | call
    with pytest.raises(ValueError, match=message):
        layer(**call | ({"cache": layer.init_cache(call["cache"])} if "cache" in call else {}))


@pytest.mark.parametrize(("args", "kwargs", "message"), [
    ((16, 4), {"num_kv_heads": 3}, "num_heads is 4; expected a multiple of num_kv_heads, which is 3"),
    ((18, 4), {}, "in_features is 18, no multiple of num_heads, 4; pass head_dim"),
])  # fmt: skip
def test_heads_that_do_not_divide_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        OURS.Attention(*args, **kwargs, key=KEY)


def test_dropout_of_attention_draws_by_key_and_can_be_off():
    layer = attention(dropout_p=0.5)
    draw = jax.vmap(lambda key: layer(X[0], key=key))(jax.random.split(KEY))
    assert not np.allclose(*draw)
    np.testing.assert_array_equal(draw[0], layer(X[0], key=jax.random.split(KEY)[0]))
    for quiet in (layer(X[0], inference=True), eqx.nn.inference_mode(layer)(X[0])):
        np.testing.assert_allclose(quiet, attention()(X[0]), atol=1e-6)


# Gated MLP and head


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_mlp_is_that_of_the_formula(activation):
    layer = OURS.GatedMLP(WIDTH, 24, 8, activation=activation, use_bias=True, key=KEY)
    gate, up = (X[0] @ m.weight.T + m.bias for m in (layer.gate, layer.up))
    want = (getattr(jax.nn, activation)(gate) * up) @ layer.down.weight.T + layer.down.bias
    for run, x, rows in ((layer, X[0], want), (jax.vmap(layer), X[0], want), (layer, X[0, 0], want[0])):
        np.testing.assert_allclose(run(x), rows, atol=1e-5)
    for run in (layer, jax.vmap(layer), jax.vmap(jax.vmap(layer))):
        assert kernels_of(lambda x, run=run: run(x), X) == {"gated_linear": 1, "linear": 1}


LABELS = jnp.arange(18).reshape(2, LENGTH) % 11


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"use_bias": True, "logits_soft_cap": 3.0}])
def test_the_loss_of_a_head_is_that_of_its_logits(tied, kwargs):
    head = OURS.LMHead(WIDTH, 11, tied=tied, key=KEY, **kwargs)
    given = {"weight": jax.random.normal(KEY, (11, WIDTH))} if tied else {}
    logits = head(X, **given)
    np.testing.assert_allclose(logits[0, 0], head(X[0, 0], **given), atol=1e-5)
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
    np.testing.assert_allclose(head.loss(X, LABELS, **given), plain.mean(), rtol=1e-5)
    np.testing.assert_allclose(head.loss(X, LABELS, reduction="none", **given), plain, rtol=1e-5)
    by_example = jax.vmap(lambda x, y: head.loss(x, y, **given))(X, LABELS)
    np.testing.assert_allclose(by_example, plain.mean(1), rtol=1e-5)
    assert len(jax.tree.leaves(head)) == (not tied) + ("use_bias" in kwargs)
    assert kernels_of(lambda x: head.loss(x, LABELS, **given), X) == {"linear_cross_entropy": 1}


@pytest.mark.parametrize(("tied", "weight", "message"), [
    (True, None, "weight is missing: the head is tied; pass that of the embedding"),
    (False, (11, WIDTH), "weight is given, and the head has its own; make it with tied=True"),
    (True, (WIDTH, 11), r"weight has shape \(16, 11\); expected \(vocab_size, features\), \(11, 16\)"),
])  # fmt: skip
def test_a_head_refuses_a_weight_that_is_missing_given_twice_or_of_other_sizes(tied, weight, message):
    head = OURS.LMHead(WIDTH, 11, tied=tied, key=KEY)
    for call in (head, lambda x, **kw: head.loss(x, LABELS[0], **kw)):
        with pytest.raises(ValueError, match=message):
            call(X[0], weight=None if weight is None else jnp.ones(weight))
    with pytest.raises(ValueError, match="key is missing"):
        OURS.LMHead(WIDTH, 11)


def test_a_head_can_be_tied_by_equinox():
    embedding = eqx.nn.Embedding(11, WIDTH, key=KEY)
    pair = (embedding, OURS.LMHead(WIDTH, 11, key=jax.random.key(5)))
    shared = ejlayers.swap(eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight))
    np.testing.assert_allclose(shared()[1](X[0]), X[0] @ embedding.weight.T, atol=1e-5)
    assert len(jax.tree.leaves(eqx.filter(shared, eqx.is_array))) == 1


class Llama(eqx.Module):
    """Two blocks of it all, with tied embeddings."""

    embed: eqx.nn.Embedding
    norms: list
    attentions: list
    mlps: list
    head: OURS.LMHead

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(11, WIDTH, key=keys[0])
        self.norms = [OURS.RMSNorm(WIDTH, use_bias=False) for _ in range(5)]
        self.attentions = [OURS.Attention(WIDTH, 4, num_kv_heads=2, rotary=Rotary(), key=k) for k in keys[1:3]]
        self.mlps = [OURS.GatedMLP(WIDTH, 24, key=k) for k in keys[3:]]
        self.head = OURS.LMHead(WIDTH, 11, tied=True)

    def hidden(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for i in range(2):
            x = x + self.attentions[i](jax.vmap(self.norms[2 * i])(x))
            x = x + self.mlps[i](jax.vmap(self.norms[2 * i + 1])(x))
        return jax.vmap(self.norms[4])(x)

    def loss(self, tokens):
        return self.head.loss(jax.vmap(self.hidden)(tokens[:, :-1]), tokens[:, 1:], weight=self.embed.weight)


TX = optax.adam(1e-2)


@eqx.filter_jit
def train(model, state, tokens):
    loss, grads = eqx.filter_value_and_grad(lambda m: m.loss(tokens))(model)
    updates, state = TX.update(grads, state)
    return eqx.apply_updates(model, updates), state, loss


def test_a_model_of_them_learns_and_its_modules_pin_configs():
    model, losses = Llama(KEY), []
    state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(30):
        model, state, loss = train(model, state, LABELS)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 3
    pinned = {
        "**.attentions.0": ek.AttentionConfig(fwd=ek.FwdParams(q_blocksize=4)),
        "**.mlps.*": ek.GatedLinearConfig(recompute=True),
        "**.head": ek.LinearCrossEntropyConfig(recompute=True),
    }
    model, state = ejlayers.set_config((model, state), pinned)
    rows = {(r.path, r.op): r for r in ejlayers.explain(train, model, state, LABELS).rows}
    assert "q_blocksize=4" in rows["attentions.0", "flash_attention@v1"].config
    assert "pinned" in rows["mlps.1", "gated_linear_bwd@v1"].source
    assert "pinned" in rows["head", "linear_cross_entropy@v1"].source
    with pytest.raises(ek.ConfigError, match="expected a GatedLinearConfig"):
        ejlayers.set_config(model, {"mlps.0": pinned["**.head"]})
    assert float(train(model, state, LABELS)[2]) < losses[0] / 3


def test_a_layer_put_in_the_place_of_a_gate_counts():
    class Shifted(ejlayers.equinox.Linear):
        def __call__(self, x, *, key=None):
            return super().__call__(x) + 100.0

    mlp = ejlayers.equinox.GatedMLP(16, 8, key=jax.random.key(0))
    shifted = eqx.tree_at(lambda m: m.gate, mlp, Shifted(16, 8, use_bias=False, key=jax.random.key(1)))
    x = jax.random.normal(jax.random.key(2), (3, 16))
    want = (jax.nn.silu(x @ shifted.gate.weight.T + 100.0) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    np.testing.assert_allclose(jax.vmap(shifted)(x), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(shifted(x), want, rtol=1e-4, atol=1e-3)
