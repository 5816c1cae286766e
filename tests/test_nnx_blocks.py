"""The layers that Flax NNX lacks: attention of language models, a gated MLP, a head with its loss."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ejkernel_ops as ek
import ejlayers
from ejlayers import Rotary

WIDTH = 16
X = jax.random.normal(jax.random.key(0), (2, 9, WIDTH))
POSITIONS = jnp.arange(9)


def turned(x, positions, theta=10000.0):
    """Halves of each head as complex numbers, turned."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], -1)


def reference(layer, x, seen, cap=None, rotary=False):
    """Grouped heads by repetition, and softmax with a sink."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, m.kernel[...]) for m in (layer.query, layer.key, layer.value))
    if layer.query_norm is not None:
        q, k = (a / jnp.sqrt(jnp.square(a).mean(-1, keepdims=True) + 1e-6) for a in (q, k))
    if rotary:
        q, k = (turned(a, POSITIONS) for a in (q, k))
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(q.shape[-1])
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    exps = jnp.where(seen, jnp.exp(logits), 0)
    sink = 0 if layer.sinks is None else jnp.exp(layer.sinks[...])[:, None, None]
    probs = exps / (exps.sum(-1, keepdims=True) + sink)
    return jnp.einsum("bnqk,bknh,nhd->bqd", probs, v, layer.out.kernel[...])


def apart(i, j, left):
    return (i - j <= left) & (j <= i)


GRID = (np.arange(9)[:, None], np.arange(9)[None])
ATTENTION = {
    "plain": ({}, {}, apart(*GRID, 99), {}),
    "encoder": ({"causal": False}, {}, np.ones((9, 9), bool), {}),
    "one key head, rotary": ({"num_kv_heads": 1, "rotary": Rotary()}, {}, apart(*GRID, 99), {"rotary": True}),
    "window, norm, sinks, cap": (
        {"num_kv_heads": 2, "sliding_window": 3, "qk_norm": True, "sinks": True, "logits_soft_cap": 0.7}, {},
        apart(*GRID, 3), {"cap": 0.7},
    ),
    "segments": (
        {}, {"segment_ids": np.tile(np.arange(9) // 4, (2, 1))}, apart(*GRID, 99) & (GRID[0] // 4 == GRID[1] // 4), {},
    ),
    "lengths": (
        {}, {"kv_lengths": np.array([9, 5])},
        apart(*GRID, 99) & (np.arange(9) < np.array([9, 5])[:, None])[:, None, None], {},
    ),
}  # fmt: skip


def attention(seed=3, **kwargs):
    layer = ejlayers.nnx.Attention(WIDTH, 4, rngs=nnx.Rngs(seed), **kwargs)
    if layer.sinks is not None:
        layer.sinks[...] = jnp.arange(4) / 4
    return layer


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_the_formula(name):
    kwargs, call, seen, options = ATTENTION[name]
    layer = attention(**kwargs)
    np.testing.assert_allclose(layer(X, **call), reference(layer, X, seen, **options), atol=2e-5)


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 1, 3)])
@pytest.mark.parametrize("kwargs", [
    {"rotary": Rotary(), "num_kv_heads": 2},
    {"rotary": Rotary(fraction=0.5, interleaved=True), "sliding_window": (2, 0), "sinks": True, "qk_norm": True},
    {"dtype": jnp.bfloat16, "logits_soft_cap": 5.0},
])  # fmt: skip
def test_decoding_gives_what_all_tokens_at_once_give(kwargs, sizes):
    layer = attention(**kwargs)
    whole = layer(X)
    layer.init_cache(2, 12)
    decode = nnx.jit(lambda layer, x: layer(x, decode=True))
    cuts = np.cumsum((0, *sizes))
    got = jnp.concatenate([decode(layer, X[:, a:b]) for a, b in itertools.pairwise(cuts)], 1)
    assert got.dtype == whole.dtype == layer.cached_key.dtype
    tolerance = 1e-5 if whole.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, whole)), atol=tolerance)


@pytest.mark.parametrize(("kwargs", "call", "message"), [
    ({}, {}, r"decode=True without a cache; call init_cache"),
    ({"causal": False}, {"cache": True}, r"decoding needs causal=True"),
    ({}, {"cache": True, "segment_ids": np.zeros((2, 9), int)}, r"segment_ids are given while decoding"),
    ({"dropout_rate": 0.5}, {"cache": True}, r"dropout is on while decoding; turn it off .deterministic=True"),
])  # fmt: skip
def test_decoding_that_cannot_be_is_refused(kwargs, call, message):
    layer = attention(**kwargs)
    if call.pop("cache", False):
        layer.init_cache(2, 9)
    with pytest.raises(ValueError, match=message):
        layer(X, decode=True, **call)


@pytest.mark.parametrize(("args", "kwargs", "message"), [
    ((16, 4), {"num_kv_heads": 3}, "num_heads is 4; expected a multiple of num_kv_heads, which is 3"),
    ((18, 4), {}, "in_features is 18, no multiple of num_heads, 4; pass head_dim"),
])  # fmt: skip
def test_heads_that_do_not_divide_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        ejlayers.nnx.Attention(*args, **kwargs, rngs=nnx.Rngs(0))


def test_dropout_of_attention_draws_anew_and_can_be_off():
    layer = attention(dropout_rate=0.5)
    assert not np.allclose(layer(X), layer(X))
    np.testing.assert_allclose(layer(X, deterministic=True), attention()(X), atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_mlp_is_that_of_the_formula(activation):
    layer = ejlayers.nnx.GatedMLP(WIDTH, 24, 8, activation=activation, use_bias=True, rngs=nnx.Rngs(0))
    hidden = getattr(jax.nn, activation)(layer.gate(X)) * layer.up(X)
    np.testing.assert_allclose(layer(X), layer.down(hidden), atol=1e-5)
    assert [row.op for row in ejlayers.explain(jax.jit(lambda x: layer(x)), X).rows] == ["gated_linear@v1", "linear@v1"]


LABELS = jnp.arange(18).reshape(2, 9) % 11


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"use_bias": True, "logits_soft_cap": 3.0}])
def test_the_loss_of_a_head_is_that_of_its_logits(tied, kwargs):
    embedding = nnx.Embed(11, WIDTH, rngs=nnx.Rngs(1)) if tied else None
    head = ejlayers.nnx.LMHead(WIDTH, 11, embedding=embedding, rngs=nnx.Rngs(0), **kwargs)
    plain = optax.softmax_cross_entropy_with_integer_labels(head(X), LABELS)
    np.testing.assert_allclose(head.loss(X, LABELS), plain.mean(), rtol=1e-5)
    np.testing.assert_allclose(head.loss(X, LABELS, reduction="none"), plain, rtol=1e-5)
    assert len(nnx.to_flat_state(nnx.state(head, nnx.Param))) == 1 + ("use_bias" in kwargs)


def test_a_head_refuses_an_embedding_of_other_sizes():
    with pytest.raises(
        ValueError, match=r"embedding has sizes \(11, 16\); expected \(vocab_size, features\), \(12, 16\)"
    ):
        ejlayers.nnx.LMHead(WIDTH, 12, embedding=nnx.Embed(11, WIDTH, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match="rngs is missing"):
        ejlayers.nnx.LMHead(WIDTH, 12)


class Llama(nnx.Module):
    """Two blocks of it all, with tied embeddings."""

    def __init__(self, rngs):
        make = ejlayers.nnx
        self.embed = make.Embed(11, WIDTH, rngs=rngs)
        self.norms = nnx.List([make.RMSNorm(WIDTH, rngs=rngs) for _ in range(5)])
        self.attentions = nnx.List([make.Attention(WIDTH, 4, num_kv_heads=2, rotary=Rotary(), rngs=rngs) for _ in "ab"])
        self.mlps = nnx.List([make.GatedMLP(WIDTH, 24, rngs=rngs) for _ in "ab"])
        self.head = make.LMHead(WIDTH, 11, embedding=self.embed)

    def hidden(self, tokens):
        x = self.embed(tokens)
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.norms[4](x)

    def loss(self, tokens):
        return self.head.loss(self.hidden(tokens[:, :-1]), tokens[:, 1:])


@nnx.jit
def train(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(Llama.loss)(model, tokens)
    optimizer.update(model, grads)
    return loss


def test_a_model_of_them_learns_and_its_modules_pin_configs():
    model = Llama(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(train(model, optimizer, LABELS)) for _ in range(30)]
    assert losses[-1] < losses[0] / 3
    pinned = {
        "attentions.0": ek.AttentionConfig(fwd=ek.FwdParams(q_blocksize=4)),
        "mlps.*": ek.GatedLinearConfig(recompute=True),
        "head": ek.LinearCrossEntropyConfig(recompute=True),
    }
    ejlayers.set_config(model, pinned)
    rows = {(r.path, r.op): r for r in ejlayers.explain(train, model, optimizer, LABELS).rows}
    assert "q_blocksize=4" in rows["attentions.0", "flash_attention@v1"].config
    assert "pinned" in rows["mlps.1", "gated_linear_bwd@v1"].source
    assert "pinned" in rows["head", "linear_cross_entropy@v1"].source
    with pytest.raises(ek.ConfigError, match="expected a GatedLinearConfig"):
        ejlayers.set_config(model, {"mlps.0": pinned["head"]})
    assert float(train(model, optimizer, LABELS)) < losses[0] / 3


def test_evaluation_turns_dropout_off_and_a_view_decodes():
    layer = attention(dropout_rate=0.5)
    assert not np.allclose(layer(X), layer(X))
    layer.eval()
    np.testing.assert_array_equal(layer(X), layer(X))
    decoder = nnx.view(layer, decode=True, batch_size=2, max_length=9)
    np.testing.assert_allclose(jnp.concatenate([decoder(X[:, :4]), decoder(X[:, 4:])], 1), layer(X), atol=1e-5)


def test_a_layer_put_in_the_place_of_a_gate_counts():
    mlp = ejlayers.nnx.GatedMLP(16, 8, rngs=nnx.Rngs(0))
    mlp.gate = nnx.LoRALinear(16, 8, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1))
    mlp.gate.lora.lora_b[...] += 1.0
    want = (jax.nn.silu(mlp.gate(X)) * (X @ mlp.up.kernel[...])) @ mlp.down.kernel[...]
    np.testing.assert_allclose(mlp(X), want, rtol=1e-4, atol=1e-5)


def test_options_of_a_call_of_the_loss_come_before_the_layers():
    head = ejlayers.nnx.LMHead(16, 11, config=ek.LinearCrossEntropyConfig(recompute=True), rngs=nnx.Rngs(0))
    labels = jnp.zeros((2, 9), int)
    given = ek.LinearCrossEntropyConfig(recompute=False)
    np.testing.assert_allclose(head.loss(X, labels, config=given), head.loss(X, labels), rtol=1e-5)
