"""Layers for Flax NNX against the stock ones: parameters, results, masks, decoding, errors."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from nnx_models import WIDTH, X, states_equal

import ejkernel_ops as ek
import ejlayers
from ejlayers.functional import einsum_as_linear

LAYERS = {
    "linear": (nnx.Linear, ejlayers.nnx.Linear, (WIDTH, 8), {}),
    "linear without bias": (nnx.Linear, ejlayers.nnx.Linear, (WIDTH, 8), {"use_bias": False}),
    "attention": (nnx.MultiHeadAttention, ejlayers.nnx.MultiHeadAttention, (4, WIDTH), {"decode": False}),
    "grouped heads": (
        nnx.MultiHeadAttention, ejlayers.nnx.MultiHeadAttention, (4, WIDTH),
        {"decode": False, "num_kv_heads": 2, "normalize_qk": True, "use_bias": False},
    ),
    "linear over the last axis": (nnx.LinearGeneral, ejlayers.nnx.LinearGeneral, (WIDTH, (4, 5)), {}),
    "linear over two axes": (nnx.LinearGeneral, ejlayers.nnx.LinearGeneral, ((9, WIDTH), 6), {"axis": (-2, -1)}),
    "linear over axes in another order": (
        nnx.LinearGeneral, ejlayers.nnx.LinearGeneral, ((2, WIDTH), (3, 5)), {"axis": (-1, 0), "use_bias": False},
    ),
    "linear with batch axes": (nnx.LinearGeneral, ejlayers.nnx.LinearGeneral, (WIDTH, 6), {"batch_axis": {0: 2}}),
    "einsum": (nnx.Einsum, ejlayers.nnx.Einsum, ("nta,hab->nthb", (8, WIDTH, 4), (8, 4)), {}),
    "einsum with dots": (nnx.Einsum, ejlayers.nnx.Einsum, ("... a, a b -> ... b", (WIDTH, 4)), {}),
    "einsum that is no linear map": (nnx.Einsum, ejlayers.nnx.Einsum, ("nta,na->nt", (2, WIDTH)), {}),
    "rms norm": (nnx.RMSNorm, ejlayers.nnx.RMSNorm, (WIDTH,), {"epsilon": 1e-3}),
    "rms norm without scale": (nnx.RMSNorm, ejlayers.nnx.RMSNorm, (WIDTH,), {"use_scale": False}),
    "layer norm": (nnx.LayerNorm, ejlayers.nnx.LayerNorm, (WIDTH,), {}),
    "layer norm over two axes": (nnx.LayerNorm, ejlayers.nnx.LayerNorm, (WIDTH,), {"reduction_axes": (-2, -1)}),
}  # fmt: skip
PLAIN = {"linear with batch axes", "einsum that is no linear map", "layer norm over two axes"}  # compute as Flax does


@pytest.mark.parametrize("name", LAYERS)
def test_same_seed_gives_the_same_parameters_state_and_results(name):
    stock, ours, args, kwargs = LAYERS[name]
    a, b = stock(*args, **kwargs, rngs=nnx.Rngs(3)), ours(*args, **kwargs, rngs=nnx.Rngs(3))
    assert isinstance(b, stock)
    states_equal(nnx.state(a), nnx.state(b))
    report = ejlayers.check(a, b, X)
    assert report.output_abs < 1e-5
    assert report.grad_rel < 1e-4
    backends = {row.backend for row in ejlayers.explain(jax.jit(lambda x: b(x)), X).rows}
    assert (backends == {"stock"}) == (name in PLAIN)


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in PLAIN])
def test_results_have_the_types_of_the_stock_layer(name):
    stock, ours, args, kwargs = LAYERS[name]
    for types in ({}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}):
        a, b = (layer(*args, **kwargs, **types, rngs=nnx.Rngs(3)) for layer in (stock, ours))
        for x in (X, X.astype(jnp.bfloat16)):
            want, got = a(x), b(x)
            assert got.dtype == want.dtype
            np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=0.05, atol=0.05)


def test_an_equation_is_a_linear_map_or_is_left_alone():
    x = jax.random.normal(jax.random.key(2), (2, 3, 4, 5))
    for equation, shape in {"abcd,de->abce": (5, 6), "abcd,efd->abcef": (6, 7, 5), "abcd,dcef->abfe": (5, 4, 6, 7),
                            "abcd,aefd->bcef": (2, 6, 7, 5), "...d,de->...e": (5, 6)}.items():  # fmt: skip
        kernel = jax.random.normal(jax.random.key(3), shape)
        product = einsum_as_linear(equation, x.ndim)
        np.testing.assert_allclose(product(x, kernel, None), jnp.einsum(equation, x, kernel), rtol=1e-4, atol=1e-4)
    for equation in ("abcd,de->abec", "abcd,ade->abce", "abcd,e->abcde", "abcd,def->abce", "aab,bc->aac", "abc,cd->abd",
                     "abcd,d->abc", "ab...d,de->ab...e", "abcd,de->abe", None):  # fmt: skip
        assert einsum_as_linear(equation, x.ndim) is None


SPREAD = [((WIDTH, (4, 8)), {}, (None, "model", None)), ((WIDTH, (4, 8)), {}, (None, None, "model")),
          (((6, WIDTH), 8), {"axis": (-2, -1)}, (None, "model", None)),
          (((6, WIDTH), 8), {"axis": (-2, -1)}, (None, None, "model"))]  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize(("args", "kwargs", "spec"), SPREAD, ids=str)
def test_a_general_linear_layer_keeps_the_sharding_of_the_stock_one(args, kwargs, spec):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = jax.random.normal(jax.random.key(0), (4, 6, WIDTH))
    with jax.set_mesh(mesh):
        outs = []
        for layer in (nnx.LinearGeneral, ejlayers.nnx.LinearGeneral):
            m = layer(*args, **kwargs, rngs=nnx.Rngs(0))
            m.kernel.set_value(jax.device_put(m.kernel[...], jax.P(*spec)))
            outs.append(jax.jit(lambda x, m=m: m(x))(jax.device_put(x, jax.P("data"))))
        stock, ours = outs
        assert ours.sharding == stock.sharding
        np.testing.assert_allclose(jax.device_get(ours), jax.device_get(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [
    ejlayers.nnx.LayerNorm, pytest.param(nnx.LayerNorm, marks=pytest.mark.cpu),  # on a GPU it adds in another order
])  # fmt: skip
def test_layer_norm_is_right_where_the_mean_is_great(layer):
    x = 2000 + jax.random.normal(jax.random.key(0), (4, 512))
    error = abs(float(layer(512, rngs=nnx.Rngs(0))(x).std()) - 1)
    assert error < 1e-3 if layer is ejlayers.nnx.LayerNorm else error > 1e-2


def test_an_embedding_looks_up_as_the_stock_layer_and_has_logits_as_a_kernel():
    a, b = (layer(11, WIDTH, rngs=nnx.Rngs(3)) for layer in (nnx.Embed, ejlayers.nnx.Embed))
    states_equal(nnx.state(a), nnx.state(b))
    ids = jnp.arange(12).reshape(3, 4) % 11
    np.testing.assert_array_equal(a(ids), b(ids))
    np.testing.assert_allclose(a.attend(X), b.attend(X), rtol=1e-5, atol=1e-5)
    assert [row.op for row in ejlayers.explain(jax.jit(lambda x: b.attend(x)), X).rows] == ["linear@v1"]


def test_a_mask_of_a_norm_is_honoured():
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, X.shape).at[..., 0].set(True)
    for stock, ours in ((nnx.RMSNorm, ejlayers.nnx.RMSNorm), (nnx.LayerNorm, ejlayers.nnx.LayerNorm)):
        a, b = (layer(WIDTH, rngs=nnx.Rngs(0)) for layer in (stock, ours))
        np.testing.assert_array_equal(a(X, mask=mask), b(X, mask=mask))


@pytest.mark.parametrize("name", LAYERS)
def test_each_stock_layer_swaps_in_place_and_back(name):
    stock, ours, args, kwargs = LAYERS[name]
    layer = stock(*args, **kwargs, rngs=nnx.Rngs(3))
    before = layer(X)
    assert ejlayers.swap(layer) is layer
    assert type(layer) is (stock if name in PLAIN else ours)
    assert ejlayers.report(layer).rows[0].replaced == (name not in PLAIN)
    np.testing.assert_allclose(layer(X), before, atol=1e-5)
    ejlayers.report(layer).revert()
    assert type(layer) is stock
    np.testing.assert_array_equal(layer(X), before)


def test_an_embedding_swaps_in_place_and_back():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    assert type(ejlayers.swap(layer)) is ejlayers.nnx.Embed
    assert type(ejlayers.report(layer).revert()) is nnx.Embed


def test_state_of_one_restores_into_the_other():
    a, b = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0)), ejlayers.nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(1))
    nnx.update(b, nnx.state(a))
    assert jnp.allclose(a(X), b(X), atol=1e-6)
    nnx.update(a, nnx.state(ejlayers.nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(2))))


MASKS = {
    "causal": ({"is_causal": True}, {}),
    "key padding": ({"mask": jnp.arange(9)[None, None, None, :] < jnp.array([5, 9])[:, None, None, None]}, {}),
    "causal and key padding": (
        {"is_causal": True, "mask": jnp.arange(9)[None, None, None, :] < jnp.array([5, 9])[:, None, None, None]}, {},
    ),
    "by head": ({"mask": jax.random.bernoulli(jax.random.key(1), 0.8, (2, 4, 9, 9)).at[..., 0].set(True)}, {}),
    "float mask": ({"mask": jnp.tril(jnp.ones((1, 1, 9, 9)))}, {}),
    "deterministic": ({"deterministic": True}, {"dropout_rate": 0.5}),
    "bfloat16": ({}, {"dtype": jnp.bfloat16}),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_attention_honours_every_argument_that_flax_passes(name):
    call, ctor = MASKS[name]
    a = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3), **ctor)
    b = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3), **ctor)
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    assert jnp.allclose(a(X, **call), b(X, **call), atol=tolerance)


def test_attention_takes_any_number_of_batch_axes():
    a = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3))
    b = ejlayers.swap(nnx.clone(a))
    for x in (X[0], X, jnp.stack([X, 2 * X])):
        one_by_one = [a(y, is_causal=True) for y in x.reshape(-1, 9, WIDTH)]
        assert jnp.allclose(b(x, is_causal=True), jnp.stack(one_by_one).reshape(x.shape), atol=1e-5)


def test_dropout_draws_anew_each_step_and_keeps_the_mean():
    layer = ejlayers.nnx.MultiHeadAttention(
        4, WIDTH, decode=False, dropout_rate=0.3, broadcast_dropout=False, deterministic=False, rngs=nnx.Rngs(3)
    )
    first, second = layer(X), layer(X)
    assert not jnp.allclose(first, second)
    draw = nnx.jit(lambda m, x: m(x))
    mean = jnp.stack([draw(layer, X) for _ in range(400)]).mean(0)
    assert jnp.abs(mean - layer(X, deterministic=True)).max() < 0.1


def test_shared_dropout_and_sown_weights_run_as_flax_does():
    kwargs = {"decode": False, "dropout_rate": 0.3, "deterministic": False}
    a = nnx.MultiHeadAttention(4, WIDTH, **kwargs, rngs=nnx.Rngs(3))
    b = ejlayers.nnx.MultiHeadAttention(4, WIDTH, **kwargs, rngs=nnx.Rngs(3))
    assert jnp.allclose(a(X), b(X), atol=1e-6)  # the same draws: broadcast_dropout is Flax's default
    with pytest.warns(DeprecationWarning, match="sow"):  # Flax's own, about its own sow
        b(X, sow_weights=True, deterministic=True)
    assert b.attention_weights.get_value()[0].shape == (2, 4, 9, 9)


@pytest.mark.parametrize(("kwargs", "call"), [
    ({}, {}), ({"dropout_rate": 0.3}, {"deterministic": True}), ({"dropout_rate": 0.3}, {"deterministic": False}),
    ({}, {"sow_weights": True}),
])  # fmt: skip
def test_a_mask_of_keys_and_causality_hold_together(kwargs, call):
    layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3), **kwargs)
    mask = jnp.ones((2, 1, 1, 9), bool).at[:, :, :, 5:].set(False)

    def run(x):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Flax's own, about its own sow
            return nnx.clone(layer)(x, mask=mask, is_causal=True, **call)

    np.testing.assert_allclose(run(X.at[:, 5:].add(7.0))[:, :5], run(X)[:, :5], atol=1e-6)  # hidden by the mask
    np.testing.assert_allclose(run(X.at[:, 3:5].add(7.0))[:, :3], run(X)[:, :3], atol=1e-6)  # hidden by causality
    assert not np.allclose(run(X.at[:, 2].add(7.0))[:, 4], run(X)[:, 4], atol=1e-3)


def test_decoding_equals_the_stock_layer():
    layers = [
        cls(4, WIDTH, decode=True, rngs=nnx.Rngs(3))
        for cls in (nnx.MultiHeadAttention, ejlayers.nnx.MultiHeadAttention)
    ]
    for layer in layers:
        layer.init_cache((2, 9, WIDTH))
    for t in range(3):
        a, b = (layer(X[:, t : t + 1]) for layer in layers)
        assert jnp.allclose(a, b, atol=1e-5)
    for a, b in zip(jax.tree.leaves(nnx.state(layers[0], nnx.Cache)), jax.tree.leaves(nnx.state(layers[1], nnx.Cache))):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 1, 3)])
@pytest.mark.parametrize("kwargs", [{}, {"num_kv_heads": 2, "normalize_qk": True}, {"dtype": jnp.bfloat16}])
def test_tokens_one_or_several_at_a_time_give_what_all_at_once_give(sizes, kwargs):
    layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3), **kwargs)
    whole = layer(X, is_causal=True)
    layer.init_cache((2, 12, WIDTH))  # longer than needed
    decode = nnx.jit(lambda layer, x, causal: layer(x, decode=True, is_causal=causal), static_argnums=2)
    at, parts = 0, []
    for i, n in enumerate(sizes):
        parts.append(decode(layer, X[:, at : at + n], bool(i % 2)))
        at += n
    assert layer.cached_key.dtype == whole.dtype
    got, want = np.asarray(jnp.concatenate(parts, 1), np.float32), np.asarray(whole, np.float32)
    np.testing.assert_allclose(got, want, atol=1e-5 if whole.dtype == jnp.float32 else 2e-2)


def test_a_mask_hides_keys_of_the_cache_too():
    layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3))
    seen = jnp.arange(9) != 1
    want = layer(X, mask=seen[None, None, None], is_causal=True)
    layer.init_cache((2, 9, WIDTH))
    got = [layer(X[:, i : i + 3], mask=seen[None, None, None], decode=True) for i in (0, 3, 6)]
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=1e-5)


def test_what_does_not_fit_into_a_cache_is_an_error_or_nan():
    layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=nnx.Rngs(3))
    with pytest.raises(ValueError, match="init_cache"):
        layer(X)
    layer.init_cache((2, 8, WIDTH))
    with pytest.raises(ValueError, match=r"the cache has room for 8 tokens.* 9 more do not fit after 0"):
        layer(X)
    with pytest.raises(ValueError, match="key has shape"):
        layer(X[:1])
    assert layer.cache_index[...] == 0
    layer(X[:, :6])
    with pytest.raises(ValueError, match=r"room for 8 tokens.* 3 more do not fit after 6"):
        layer(X[:, 6:])

    def decode(layer, x):
        return layer(x)

    checked = nnx.jit(decode)
    assert jnp.isnan(checked(layer, X[:, 6:])).all()
    graph, state = nnx.split(layer)
    run = checkify.checkify(jax.jit(lambda state, x: nnx.merge(graph, state)(x)))
    with pytest.raises(checkify.JaxRuntimeError, match="room for 8 tokens"):
        run(state, X[:, 6:])[0].throw()


def test_a_view_for_decoding_has_a_cache():
    layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(3))
    view = nnx.view(layer, decode=True, batch_size=2, max_length=9)
    np.testing.assert_allclose(view(X), layer(X, is_causal=True), atol=1e-5)
    with pytest.raises(TypeError, match="max_length is missing"):
        nnx.view(layer, decode=True, batch_size=2)


def test_bad_arguments_are_refused_as_by_the_stock_layer():
    layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Incompatible input dimension"):
        layer(jnp.ones((2, 3, 5)))
    with pytest.raises(ek.ConfigError, match="attention_fn"):
        ejlayers.nnx.MultiHeadAttention(4, WIDTH, attention_fn=lambda q, k, v, **kwargs: v, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="features"):
        ejlayers.nnx.Linear(4, 5, rngs=nnx.Rngs(0))(jnp.ones((2, 3)))


def test_bad_configs_are_refused_where_the_layer_is_made_or_changed():
    makers = [
        lambda **k: ejlayers.nnx.Linear(3, 4, rngs=nnx.Rngs(0), **k),
        lambda **k: ejlayers.nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0), **k),
    ]
    for make in makers:
        for bad in (
            {"config": 3},
            {"backend": "cuda"},
            {"config": make().config_type(backend="xla"), "backend": "triton"},
        ):
            with pytest.raises(ek.ConfigError, match=r"(config|backend) is"):
                make(**bad)
        with pytest.raises(ek.ConfigError, match="config is 3"):
            make().pin(config=3)


@pytest.mark.parametrize("kwargs", [{"sow_weights": True}, {"deterministic": False}])
def test_decoding_with_what_has_no_kernel_is_causal_and_does_not_overrun(kwargs):
    layer = ejlayers.nnx.MultiHeadAttention(
        4, WIDTH, decode=True, dropout_rate=1e-6, deterministic=True, rngs=nnx.Rngs(3)
    )
    want = layer(X, decode=False, is_causal=True)
    layer.init_cache((2, 9, WIDTH))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Flax's own, about its own sow
        got = [layer(X[:, a:b], is_causal=True, **kwargs) for a, b in ((0, 4), (4, 5), (5, 9))]
        np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=1e-4)
        with pytest.raises(ValueError, match="the cache has room for 9 tokens"):
            layer(X[:, :1], **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"sow_weights": True}, {"deterministic": False}])
def test_a_query_that_sees_nothing_gives_zero_however_it_is_computed(kwargs):
    layer = ejlayers.nnx.MultiHeadAttention(
        4, WIDTH, decode=False, use_bias=False, dropout_rate=0.1, deterministic=True, rngs=nnx.Rngs(3)
    )
    mask = jnp.ones((2, 1, 9, 9), bool).at[1, :, 3:].set(False)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        out = layer(X, mask=mask, **kwargs)
    np.testing.assert_array_equal(out[1, 3:], 0)
    assert np.abs(out[0]).min(-1).max() > 0


@pytest.mark.parametrize("name", ["linear", "linear without bias", "linear over the last axis", "einsum with dots"])
def test_a_preferred_type_is_that_of_the_product_before_the_bias(name):
    stock, ours, args, kwargs = LAYERS[name]
    if name == "einsum with dots":
        args = (*args, (4,))  # a bias
    types = [
        layer(*args, **kwargs, preferred_element_type=jnp.bfloat16, rngs=nnx.Rngs(0))(X).dtype
        for layer in (stock, ours)
    ]
    assert types[0] == types[1]


def test_the_stock_attention_function_is_no_other_one():
    ejlayers.nnx.MultiHeadAttention(4, WIDTH, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(3))
