"""Layers for Flax Linen: same parameters, same results, and everything that the stock layers take."""

import logging

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import checkify

import ejkernel_ops as ek
import ejlayers
from ejlayers import fallback

WIDTH = 16
X = jax.random.normal(jax.random.key(0), (2, 9, WIDTH))
KEY = jax.random.key(3)
ours = ejlayers.linen


def trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, want)), rtol=tolerance, atol=tolerance)


def labels(layer, *args, **kwargs):
    return [row.op for row in ejlayers.explain(jax.jit(lambda *a: layer.apply(*a, **kwargs)), *args).rows]


# Drop-in


def own_product(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


BOXED = {"kernel_init": nn.with_partitioning(nn.initializers.normal(), (None, "model"))}


LAYERS = {
    "dense": ("Dense", {"features": 8}),
    "dense without bias": ("Dense", {"features": 8, "use_bias": False}),
    "dense with its own product": ("Dense", {"features": 8, "dot_general": own_product}),
    "dense with partitioned weights": ("Dense", {"features": 8} | BOXED),
    "general": ("DenseGeneral", {"features": (4, 5)}),
    "general over two axes": ("DenseGeneral", {"features": 6, "axis": (-1, -2)}),
    "general over the first axis": ("DenseGeneral", {"features": (3, 5), "axis": (-1, 0), "use_bias": False}),
    "general with batch axes": ("DenseGeneral", {"features": 6, "batch_dims": (0,)}),
    "general with partitioned weights": ("DenseGeneral", {"features": (4, 2)} | BOXED),
    "einsum": ("Einsum", {"shape": (8, WIDTH, 4), "einsum_str": "nta,hab->nthb"}),
    "einsum with dots": ("Einsum", {"shape": (WIDTH, 4), "einsum_str": "... a, a b -> ... b", "use_bias": False}),
    "einsum that is no linear map": ("Einsum", {"shape": (2, WIDTH), "einsum_str": "nta,na->nt"}),
    "rms norm": ("RMSNorm", {"epsilon": 1e-3}),
    "rms norm without scale": ("RMSNorm", {"use_scale": False}),
    "layer norm": ("LayerNorm", {}),
    "layer norm without bias": ("LayerNorm", {"use_bias": False}),
    "layer norm over two axes": ("LayerNorm", {"reduction_axes": (-2, -1)}),
    "attention": ("MultiHeadDotProductAttention", {"num_heads": 4}),
    "attention by another name": ("MultiHeadAttention", {"num_heads": 4, "out_features": 6}),
    "attention with norms": (
        "MultiHeadDotProductAttention",
        {"num_heads": 2, "qkv_features": 8, "normalize_qk": True, "use_bias": False},
    ),
}  # fmt: skip
PLAIN = {  # compute as Flax does
    "dense with its own product", "general with batch axes", "einsum that is no linear map", "layer norm over two axes",
}  # fmt: skip


def both(name, **more):
    kind, kwargs = LAYERS[name]
    return [getattr(package, kind)(**kwargs, **more) for package in (nn, ours)]


@pytest.mark.parametrize("name", LAYERS)
def test_same_seed_gives_the_same_parameters_and_results(name):
    a, b = both(name)
    assert isinstance(b, type(a))
    assert type(b).__name__ == type(a).__name__
    variables = a.init(KEY, X)
    trees_equal(variables, b.init(KEY, X))
    report = ejlayers.check(a, b, variables, X)
    assert report.output_abs < 1e-5
    assert report.grad_rel < 1e-4
    backends = {row.backend for row in ejlayers.explain(jax.jit(lambda v, x: b.apply(v, x)), variables, X).rows}
    assert (backends == {"stock"}) == (name in PLAIN)


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in PLAIN])
@pytest.mark.parametrize("types", [{}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}], ids=str)
def test_results_have_the_types_of_the_stock_layer(name, types):
    a, b = both(name, **types)
    for x in (X, X.astype(jnp.bfloat16)):
        variables = a.init(KEY, x)
        trees_equal(variables, b.init(KEY, x))
        want, got = a.apply(variables, x), b.apply(variables, x)
        assert got.dtype == want.dtype
        close(got, want, 0.05)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_rounds_at_the_end_alone(kind):
    x, options = 100 + X, {"dtype": jnp.bfloat16}
    a, b = (getattr(package, kind)(**options) for package in (nn, ours))
    exact = getattr(nn, kind)().apply(v := a.init(KEY, x), x)
    for layer in (a, b):
        assert np.abs(np.asarray(layer.apply(v, x), np.float32) - exact).max() < 0.01
    a, b = (getattr(package, kind)(force_float32_reductions=False) for package in (nn, ours))
    assert b.apply(v, x.astype(jnp.bfloat16)).dtype == a.apply(v, x.astype(jnp.bfloat16)).dtype


def test_layer_norm_is_right_where_the_mean_is_great():
    x = 2000 + jax.random.normal(jax.random.key(0), (4, 512))
    stds = [float(layer.apply(layer.init(KEY, x), x).std()) for layer in (nn.LayerNorm(), ours.LayerNorm())]
    assert abs(stds[0] - 1) > 1e-2
    assert abs(stds[1] - 1) < 1e-3


def test_a_mask_of_a_norm_is_honoured():
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, X.shape).at[..., 0].set(True)
    for kind in ("RMSNorm", "LayerNorm"):
        a, b = getattr(nn, kind)(), getattr(ours, kind)()
        variables = b.init(KEY, X)
        np.testing.assert_array_equal(a.apply(variables, X, mask=mask), b.apply(variables, X, mask=mask))


def test_an_embedding_looks_up_as_the_stock_layer_and_has_logits_as_a_kernel():
    a, b = (layer(11, WIDTH) for layer in (nn.Embed, ours.Embed))
    ids = jnp.arange(12).reshape(3, 4) % 11
    variables = a.init(KEY, ids)
    trees_equal(variables, b.init(KEY, ids))
    np.testing.assert_array_equal(a.apply(variables, ids), b.apply(variables, ids))
    close(a.apply(variables, X, method="attend"), b.apply(variables, X, method="attend"))
    assert labels(b, variables, X, method="attend") == ["linear@v1"]


class Named(nn.Module):
    package: object

    @nn.compact
    def __call__(self, x):
        x = self.package.LayerNorm()(x)
        x = self.package.MultiHeadDotProductAttention(4)(x)
        return self.package.Dense(3)(self.package.Dense(WIDTH)(x))


def test_layers_name_themselves_as_the_stock_ones():
    trees_equal(*(Named(package).init(KEY, X) for package in (nn, ours)))
    assert "Dense_1" in Named(ours).init(KEY, X)["params"]


def test_an_equation_may_come_with_the_call():
    a, b = (package.Einsum((WIDTH, 4)) for package in (nn, ours))
    variables = b.init(KEY, X, "...a,ab->...b")
    trees_equal(a.init(KEY, X, "...a,ab->...b"), variables)
    close(b.apply(variables, X, "...a,ab->...b"), a.apply(variables, X, "...a,ab->...b"))
    with pytest.raises(ValueError, match="einsum_str"):
        b.clone(einsum_str="...a,ab->...b").apply(variables, X, "...a,ab->...b")


def test_fields_are_those_of_the_stock_layer_and_two_more_by_keyword():
    assert ours.Dense(8, False, jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="positional"):
        ours.Dense(*range(14))


def test_parameters_of_attention_load_into_nnx():
    layer = ours.MultiHeadDotProductAttention(4)
    variables = layer.init(KEY, X)
    other = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    nnx.replace_by_pure_dict(state := nnx.state(other, nnx.Param), variables["params"])
    nnx.update(other, state)
    close(layer.apply(variables, X), other(X))


def test_bad_configs_and_attention_functions_are_refused_where_the_layer_is_made():
    for make in (lambda **k: ours.Dense(4, **k), lambda **k: ours.MultiHeadDotProductAttention(2, **k), ours.RMSNorm):
        other = make().config_type(backend="xla")
        for bad in ({"config": 3}, {"backend": "cuda"}, {"config": other, "backend": "triton"}):
            with pytest.raises(ek.ConfigError, match=r"(config|backend) is"):
                make(**bad)
    with pytest.raises(ek.ConfigError, match="attention_fn is given"):
        ours.MultiHeadDotProductAttention(4, attention_fn=lambda q, k, v: v)
    with pytest.raises(ek.ConfigError, match="config is 3"):
        ours.KernelAttention(config=3)


# Arguments of attention


PADDING = jnp.arange(9)[None, None, None, :] < jnp.array([5, 9])[:, None, None, None]
CALLS = {
    "causal mask": ({"mask": nn.make_causal_mask(X[..., 0])}, {}),
    "key padding": ({"mask": PADDING}, {}),
    "by head": ({"mask": jax.random.bernoulli(jax.random.key(1), 0.8, (2, 4, 9, 9)).at[..., 0].set(True)}, {}),
    "other keys": ({"inputs_k": X[:, :4], "inputs_v": 2 * X[:, :4]}, {}),
    "other keys that are the values": ({"inputs_k": X[:, :5]}, {}),
    "precision": ({}, {"precision": "highest"}),
    "deterministic": ({"deterministic": True}, {"dropout_rate": 0.5}),
    "deterministic layer": ({}, {"dropout_rate": 0.5, "deterministic": True}),
    "shared dropout": ({"dropout_rng": KEY}, {"dropout_rate": 0.5, "deterministic": False}),
    "bfloat16": ({}, {"dtype": jnp.bfloat16, "force_fp32_for_softmax": True}),
    "products of one's own": ({}, {"qk_attn_weights_einsum_cls": lambda: jnp.einsum,
                                   "attn_weights_value_einsum_cls": lambda: jnp.einsum}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_function", [True, False])
def test_attention_honours_every_argument_that_flax_passes(name, as_function):
    call, fields = CALLS[name]
    a = nn.MultiHeadDotProductAttention(4, **fields)
    b = a.clone(attention_fn=ours.KernelAttention()) if as_function else ours.MultiHeadDotProductAttention(4, **fields)
    variables = a.init(KEY, X, **call)
    close(b.apply(variables, X, **call), a.apply(variables, X, **call), 2e-2 if name == "bfloat16" else 1e-5)


def test_the_deprecated_layer_warns_and_is_recorded_as_the_stock_one():
    mask = nn.make_causal_mask(X[..., 0])
    found = []
    for layer in (nn.SelfAttention(4), ours.SelfAttention(4)):
        with pytest.warns(DeprecationWarning, match="SelfAttention"):
            variables, table = layer.init(KEY, X), layer.tabulate(KEY, X)
        with pytest.warns(DeprecationWarning, match="SelfAttention"):
            found.append((layer.apply(variables, X, mask, capture_intermediates=True), table))
    (a, first), (b, second) = found
    assert first == second
    assert jax.tree.structure(a) == jax.tree.structure(b)
    close(a[0], b[0])


def test_the_softmax_is_in_float32_whatever_the_layer_computes_in():
    x = 4 * X
    variables = nn.MultiHeadDotProductAttention(4).init(KEY, x)
    exact = nn.MultiHeadDotProductAttention(4).apply(variables, x)
    errors = []
    for layer in (nn.MultiHeadDotProductAttention, ours.MultiHeadDotProductAttention):
        got = layer(4, dtype=jnp.bfloat16).apply(variables, x)
        errors.append(float(jnp.sqrt(jnp.square(got.astype(jnp.float32) - exact).mean())))
    assert errors[1] < errors[0]


def test_a_mask_that_hides_every_key_gives_zero():
    layer = ours.MultiHeadDotProductAttention(4, use_bias=False)
    out = layer.apply(layer.init(KEY, X), X, mask=jnp.zeros((2, 1, 9, 9), bool).at[0].set(True))
    assert (out[1] == 0).all()
    assert jnp.abs(out[0]).min() > 0


def test_dropout_of_its_own_draws_anew_and_keeps_the_mean():
    layer = ours.MultiHeadDotProductAttention(4, dropout_rate=0.3, broadcast_dropout=False, deterministic=False)
    variables = layer.init({"params": KEY, "dropout": KEY}, X)
    draw = jax.jit(lambda key: layer.apply(variables, X, rngs={"dropout": key}))
    draws = jax.lax.map(draw, jax.random.split(KEY, 400))
    assert not np.allclose(draws[0], draws[1])
    plain = layer.clone(deterministic=True).apply(variables, X)
    assert jnp.abs(draws.mean(0) - plain).max() < 0.1
    with pytest.raises(ValueError, match="deterministic"):
        layer.clone(deterministic=None).apply(variables, X)


def test_sown_weights_run_as_flax_does_and_one_line_says_so(caplog):
    fallback._told.clear()
    layers = [package.MultiHeadDotProductAttention(4) for package in (nn, ours)]
    variables = layers[0].init(KEY, X)
    with caplog.at_level(logging.WARNING):
        a, b, _ = (
            layer.apply(variables, X, sow_weights=True, mutable="intermediates") for layer in (*layers, layers[1])
        )
    trees_equal(a, b)
    assert [record.message for record in caplog.records] == [
        "flash_attention runs as the framework's own, not as a kernel: sow_weights=True"
    ]


def test_captured_intermediates_are_those_of_the_stock_layers():
    variables = Named(nn).init(KEY, X)
    trees = [Named(p).apply(variables, X, capture_intermediates=True)[1] for p in (nn, ours)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    for a, b in zip(*map(jax.tree.leaves, trees)):
        close(a, b)


def test_checkpoints_go_both_ways():
    a, b = nn.Dense(8), ours.Dense(8)
    variables = a.init(KEY, X)
    for source, target in ((variables, b.init(KEY, 2 * X)), (b.init(KEY, X), variables)):
        trees_equal(source, flax.serialization.from_bytes(target, flax.serialization.to_bytes(source)))


# Decoding


def decoding(cls=None, size=9, **fields):
    layer = (cls or ours.MultiHeadDotProductAttention)(4, decode=True, **fields)
    return layer, layer.init(KEY, jnp.zeros((2, size, WIDTH)))


def test_decoding_one_token_equals_the_stock_layer():
    (a, va), (b, vb) = decoding(nn.MultiHeadDotProductAttention), decoding()
    trees_equal(va, vb)
    mask = (jnp.arange(9) != 1)[None, None, None]
    for t in range(4):
        for call in ({}, {"mask": mask}):
            (want, ca), (got, cb) = (
                layer.apply(v, X[:, t : t + 1], mutable="cache", **call) for layer, v in ((a, va), (b, vb))
            )
            close(got, want)
        assert jax.tree.structure(ca) == jax.tree.structure(cb)
        for x, y in zip(jax.tree.leaves(ca), jax.tree.leaves(cb)):
            close(x, y, 1e-6)
        va, vb = va | ca, vb | cb


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 1, 3)])
@pytest.mark.parametrize("fields", [{}, {"normalize_qk": True, "qkv_features": 32}, {"dtype": jnp.bfloat16}], ids=str)
def test_tokens_one_or_several_at_a_time_give_what_all_at_once_give(sizes, fields):
    layer, variables = decoding(size=12, **fields)
    causal = nn.make_causal_mask(X[..., 0])
    whole = nn.MultiHeadDotProductAttention(4, **fields).apply({"params": variables["params"]}, X, mask=causal)
    step = jax.jit(lambda v, x: layer.apply(v, x, mutable="cache"))
    at, parts = 0, []
    for n in sizes:
        out, cache = step(variables, X[:, at : at + n])
        variables, at = variables | cache, at + n
        parts.append(out)
    assert variables["cache"]["cached_key"].dtype == whole.dtype
    close(jnp.concatenate(parts, 1), whole, 1e-5 if whole.dtype == jnp.float32 else 2e-2)


def test_a_swapped_layer_decodes_several_tokens_too():
    layer, variables = decoding(nn.MultiHeadDotProductAttention)
    swapped, want = ejlayers.swap(layer), []
    out, cache = swapped.apply(variables, X, mutable="cache")
    for t in range(9):
        part, after = layer.apply(variables, X[:, t : t + 1], mutable="cache")
        variables = variables | after
        want.append(part)
    close(out, jnp.concatenate(want, 1))
    for got, kept in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
        close(got, kept)


def test_what_does_not_fit_into_a_cache_is_an_error_or_nan():
    layer, variables = decoding(size=8)
    with pytest.raises(ValueError, match=r"the cache has room for 8 tokens.* 9 more do not fit after 0"):
        layer.apply(variables, X, mutable="cache")
    with pytest.raises(ValueError, match="key has shape"):
        layer.apply(variables, X[:1, :2], mutable="cache")
    variables |= layer.apply(variables, X[:, :6], mutable="cache")[1]
    with pytest.raises(ValueError, match=r"room for 8 tokens.* 3 more do not fit after 6"):
        layer.apply(variables, X[:, 6:], mutable="cache")
    step = jax.jit(lambda v, x: layer.apply(v, x, mutable="cache")[0])
    assert jnp.isnan(step(variables, X[:, 6:])).all()
    with pytest.raises(checkify.JaxRuntimeError, match="room for 8 tokens"):
        checkify.checkify(step)(variables, X[:, 6:])[0].throw()


def test_decoding_with_what_has_no_kernel_draws_as_flax_does_and_takes_several_tokens():
    layer, variables = decoding(dropout_rate=0.5, deterministic=False)
    stock = nn.MultiHeadDotProductAttention(4, decode=True, dropout_rate=0.5, deterministic=False)
    a, b = (m.apply(variables, X[:, :1], rngs={"dropout": KEY}, mutable="cache")[0] for m in (stock, layer))
    close(a, b)
    quiet, variables = decoding(dropout_rate=1e-6, deterministic=False)
    whole = quiet.clone(decode=False).apply(
        {"params": variables["params"]}, X, mask=nn.make_causal_mask(X[..., 0]), rngs={"dropout": KEY}
    )
    parts = []
    for a, b in ((0, 3), (3, 4), (4, 8)):
        out, cache = quiet.apply(variables, X[:, a:b], rngs={"dropout": KEY}, mutable="cache")
        variables = variables | cache
        parts.append(out)
    close(jnp.concatenate(parts, 1), whole[:, :8], 1e-4)
    with pytest.raises(ValueError, match="room for"):
        quiet.apply(variables, X[:, :8], rngs={"dropout": KEY}, mutable="cache")
