"""The layers that Flax Linen lacks: attention of language models, a gated MLP, a head with its loss."""

import itertools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import ejkernel_ops as ek
import ejlayers
from ejlayers import Rotary

WIDTH = 16
KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(0), (2, 9, WIDTH))
LABELS = jnp.arange(18).reshape(2, 9) % 11
ours = ejlayers.linen


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, want)), rtol=tolerance, atol=tolerance)


def turned(x, theta=10000.0):
    """Halves of each head as complex numbers, turned by the positions."""
    half = x.shape[-1] // 2
    angles = np.arange(9)[:, None, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def reference(params, x, seen, cap=None, rotary=False):
    """Grouped heads by repetition, and softmax with a sink."""
    q, k, v = (np.einsum("btd,dnh->btnh", x, params[name]["kernel"]) for name in ("query", "key", "value"))
    if "query_norm" in params:
        q, k = (a / np.sqrt(np.square(a).mean(-1, keepdims=True) + 1e-6) for a in (q, k))
    if rotary:
        q, k = turned(q), turned(k)
    k, v = (np.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    logits = np.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(q.shape[-1])
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    exps = np.where(seen, np.exp(logits), 0)
    sink = np.exp(params["sinks"])[:, None, None] if "sinks" in params else 0
    probs = exps / (exps.sum(-1, keepdims=True) + sink)
    return np.einsum("bnqk,bknh,nhd->bqd", probs, v, params["out"]["kernel"])


AT, OF = np.arange(9)[:, None], np.arange(9)[None]
CAUSAL = OF <= AT
ATTENTION = {
    "plain": ({}, {}, CAUSAL, {}),
    "encoder": ({"causal": False}, {}, np.ones((9, 9), bool), {}),
    "one key head, rotary": ({"num_kv_heads": 1, "rotary": Rotary()}, {}, CAUSAL, {"rotary": True}),
    "window, norm, sinks, cap": (
        {"num_kv_heads": 2, "sliding_window": 3, "qk_norm": True, "sinks": True, "logits_soft_cap": 0.7}, {},
        CAUSAL & (AT - OF <= 3), {"cap": 0.7},
    ),
    "segments": ({}, {"segment_ids": np.tile(np.arange(9) // 4, (2, 1))}, CAUSAL & (AT // 4 == OF // 4), {}),
    "lengths": ({}, {"kv_lengths": np.array([9, 5])}, CAUSAL & (OF < np.array([9, 5])[:, None, None, None]), {}),
    "sizes": ({"head_dim": 8, "out_features": 6}, {}, CAUSAL, {}),
}  # fmt: skip


def attention(size=9, **fields):
    layer = ours.Attention(4, **fields)
    variables = jax.jit(layer.init)(KEY, jnp.zeros((2, size, WIDTH)))
    if "sinks" in variables["params"]:
        variables["params"]["sinks"] = jnp.arange(4) / 4
    return layer, variables


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_the_formula(name):
    fields, call, seen, options = ATTENTION[name]
    layer, variables = attention(**fields)
    close(layer.apply(variables, X, **call), reference(variables["params"], X, seen, **options))


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 1, 3)])
@pytest.mark.parametrize("fields", [
    {"rotary": Rotary(), "num_kv_heads": 2},
    {"rotary": Rotary(fraction=0.5, interleaved=True), "sliding_window": (2, 0), "sinks": True, "qk_norm": True},
    {"dtype": jnp.bfloat16, "logits_soft_cap": 5.0},
])  # fmt: skip
def test_decoding_gives_what_all_tokens_at_once_give(fields, sizes):
    layer, variables = attention(size=12, decode=True, **fields)
    whole = layer.clone(decode=False).apply({"params": variables["params"]}, X)
    step = jax.jit(lambda v, x: layer.apply(v, x, mutable="cache"))
    parts, cuts = [], np.cumsum((0, *sizes))
    for a, b in itertools.pairwise(cuts):
        out, cache = step(variables, X[:, a:b])
        variables = variables | cache
        parts.append(out)
    assert variables["cache"]["cache_index"] == 9
    assert parts[0].dtype == whole.dtype == variables["cache"]["cached_key"].dtype
    close(jnp.concatenate(parts, 1), whole, 1e-5 if whole.dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize(("fields", "call", "message"), [
    ({"causal": False}, {}, "decoding needs causal=True"),
    ({}, {"segment_ids": np.zeros((2, 9), int)}, "segment_ids are given while decoding"),
    ({"dropout_rate": 0.5}, {"deterministic": False}, "dropout is on while decoding; turn it off .deterministic=True"),
])  # fmt: skip
def test_decoding_that_cannot_be_is_refused(fields, call, message):
    layer = ours.Attention(4, decode=True, **fields)
    _, variables = attention(decode=True)
    with pytest.raises(ValueError, match=message):
        layer.apply(variables, X, mutable="cache", rngs={"dropout": KEY}, **call)


@pytest.mark.parametrize(("width", "fields", "message"), [
    (16, {"num_kv_heads": 3}, "num_heads is 4; expected a multiple of num_kv_heads, which is 3"),
    (18, {}, "in_features is 18, no multiple of num_heads, 4; pass head_dim"),
])  # fmt: skip
def test_heads_that_do_not_divide_are_refused(width, fields, message):
    with pytest.raises(ValueError, match=message):
        ours.Attention(4, **fields).init(KEY, jnp.ones((2, 3, width)))


def test_dropout_of_attention_draws_anew_and_can_be_off():
    layer, variables = attention()
    dropping = ours.Attention(4, dropout_rate=0.5)
    first, second = (dropping.apply(variables, X, rngs={"dropout": jax.random.key(i)}) for i in range(2))
    assert not np.allclose(first, second)
    close(dropping.apply(variables, X, deterministic=True), layer.apply(variables, X))
    close(dropping.clone(deterministic=True).apply(variables, X), layer.apply(variables, X))
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        dropping.apply(variables, X)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_mlp_is_that_of_the_formula(activation):
    layer = ours.GatedMLP(24, 8, activation=activation, use_bias=True, bias_init=nn.initializers.normal())
    variables = layer.init(KEY, X)
    gate, up, down = ({"params": variables["params"][name]} for name in ("gate", "up", "down"))
    hidden = getattr(jax.nn, activation)(nn.Dense(24).apply(gate, X)) * nn.Dense(24).apply(up, X)
    close(layer.apply(variables, X), nn.Dense(8).apply(down, hidden))
    rows = ejlayers.explain(jax.jit(layer.apply), variables, X).rows
    assert [(row.path, row.op) for row in rows] == [("GatedMLP", "gated_linear@v1"), ("down", "linear@v1")]


class Tied(nn.Module):
    fields: dict

    def setup(self):
        self.embed = nn.Embed(11, WIDTH)
        self.head = ours.LMHead(WIDTH, 11, embedding=self.embed, **self.fields)

    def __call__(self, hidden):
        return self.head(hidden)

    def loss(self, hidden, labels, **options):
        return self.head.loss(hidden, labels, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{}, {"use_bias": True, "logits_soft_cap": 3.0}], ids=str)
def test_the_loss_of_a_head_is_that_of_its_logits(tied, fields):
    head = Tied(fields) if tied else ours.LMHead(WIDTH, 11, **fields)
    variables = head.init(KEY, X, LABELS, method="loss")
    plain = optax.softmax_cross_entropy_with_integer_labels(head.apply(variables, X), LABELS)
    close(head.apply(variables, X, LABELS, method="loss"), plain.mean())
    close(head.apply(variables, X, LABELS, reduction="none", method="loss"), plain)
    assert len(jax.tree.leaves(variables)) == 1 + ("use_bias" in fields)


def test_a_head_refuses_an_embedding_of_other_sizes():
    with pytest.raises(
        ValueError, match=r"embedding has sizes \(11, 16\); expected \(vocab_size, features\), \(12, 16\)"
    ):
        ours.LMHead(WIDTH, 12, embedding=nn.Embed(11, WIDTH))


def test_bad_configs_are_refused_where_a_layer_is_made():
    for make in (
        lambda **k: ours.Attention(4, **k),
        lambda **k: ours.GatedMLP(4, **k),
        lambda **k: ours.LMHead(4, 5, **k),
    ):
        with pytest.raises(ek.ConfigError, match="config is 3"):
            make(config=3)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + ours.Attention(4, num_kv_heads=2, rotary=Rotary(), name="attention")(ours.RMSNorm()(x))
        return x + ours.GatedMLP(24, name="mlp")(ours.RMSNorm()(x)), None


class Llama(nn.Module):
    """Two stacked blocks of it all, with tied embeddings."""

    def setup(self):
        self.embed = ours.Embed(11, WIDTH)
        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        self.layers = stack()
        self.norm = ours.RMSNorm()
        self.head = ours.LMHead(WIDTH, 11, embedding=self.embed)

    def __call__(self, tokens):
        x, _ = self.layers(self.embed(tokens[:, :-1]), jnp.zeros(2))
        return self.head.loss(self.norm(x), tokens[:, 1:])


def test_a_model_of_them_learns_and_its_modules_pin_configs():
    model, optimizer = Llama(), optax.adam(1e-2)

    def step_of(model):
        @jax.jit
        def step(params, state):
            loss, grads = jax.value_and_grad(model.apply)({"params": params}, LABELS)
            updates, state = optimizer.update(grads["params"], state)
            return optax.apply_updates(params, updates), state, loss

        return step

    params = model.init(KEY, LABELS)["params"]
    state, step, losses = optimizer.init(params), step_of(model), []
    for _ in range(30):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 3
    pinned = {
        "layers.attention": ek.AttentionConfig(fwd=ek.FwdParams(q_blocksize=4)),
        "layers.mlp": ek.GatedLinearConfig(recompute=True),
        "head": ek.LinearCrossEntropyConfig(recompute=True),
    }
    other = ejlayers.set_config(model, pinned)
    found = {(r.path, r.op): r for r in ejlayers.explain(step_of(other), params, state).rows}
    assert "q_blocksize=4" in found["layers.attention", "flash_attention@v1"].config
    assert "pinned" in found["layers.mlp", "gated_linear_bwd@v1"].source
    assert "pinned" in found["head", "linear_cross_entropy@v1"].source
    assert found["layers.attention", "flash_attention@v1"].executions == 4  # two layers, forward and again backward
    with pytest.raises(ek.ConfigError, match="expected a GatedLinearConfig"):
        ejlayers.set_config(model, {"layers.mlp": pinned["head"]}).init(KEY, LABELS)
    np.testing.assert_allclose(
        other.apply({"params": params}, LABELS), model.apply({"params": params}, LABELS), rtol=1e-5
    )
