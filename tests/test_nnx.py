"""Layers for Flax NNX, and what is done around a model: swap, report, tune, explain, check, set_config."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

import ejkernel_ops as ek
import ejlayers
from ejlayers.functional import einsum_as_linear

WIDTH = 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x, is_causal=True)
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.tied = self.head

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = jax.random.normal(jax.random.key(0), (2, 9, WIDTH))


def model(seed=0):
    return Model(nnx.Rngs(seed))


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
    optimizer.update(model, grads)
    return loss


def adam(m):
    return nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param)


def states_equal(a, b):
    a, b = (nnx.to_flat_state(s) for s in (a, b))
    assert [path for path, _ in a] == [path for path, _ in b]
    for (_, x), (_, y) in zip(a, b):
        assert type(x) is type(y)
        assert np.array_equal(jax.random.key_data(x[...]) if "key" in str(x.dtype) else x[...],
                              jax.random.key_data(y[...]) if "key" in str(y.dtype) else y[...])  # fmt: skip


# Layers


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
    assert bool(ejlayers.explain(jax.jit(lambda x: b(x)), X).rows) == (name not in PLAIN)


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


def test_layer_norm_is_right_where_the_mean_is_great():
    x = 2000 + jax.random.normal(jax.random.key(0), (4, 512))
    assert abs(float(ejlayers.nnx.LayerNorm(512, rngs=nnx.Rngs(0))(x).std()) - 1) < 1e-3
    assert abs(float(nnx.LayerNorm(512, rngs=nnx.Rngs(0))(x).std()) - 1) > 1e-2


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
        ejlayers.nnx.MultiHeadAttention(4, WIDTH, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))
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


# swap and report


def test_swap_keeps_object_variables_ties_and_optimizer():
    m = model()
    optimizer, variables = adam(m), [v for _, v in nnx.to_flat_state(nnx.state(m))]
    before = nnx.state(m)
    assert ejlayers.swap(m) is m
    assert m.tied is m.head
    assert type(m.head) is ejlayers.nnx.Linear
    assert isinstance(m.head, nnx.Linear)
    states_equal(before, nnx.state(m))
    assert m.head.kernel is next(v for v in variables if v is m.head.kernel)
    twin = model()
    stock_losses = [float(step(twin, o, X)) for o in [adam(twin)] for _ in range(5)]
    losses = [float(step(m, optimizer, X)) for _ in range(5)]
    assert np.allclose(losses, stock_losses, atol=1e-5)


def test_swapping_twice_is_swapping_once():
    m = ejlayers.swap(model())
    config = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))
    ejlayers.set_config(m, {"head": config})
    ejlayers.swap(m)
    assert m.head.config == config
    assert all(row.replaced for row in ejlayers.report(m).rows)


def test_revert_and_original_are_stock_again():
    m = model()
    definition = nnx.graphdef(m)
    ejlayers.swap(m, config=ek.LinearConfig(backend="xla"))
    stock = ejlayers.report(m).original()
    assert type(stock.head) is nnx.Linear
    assert stock.head.kernel is m.head.kernel  # the same parameters
    assert stock.tied is stock.head
    assert type(m.head) is ejlayers.nnx.Linear
    assert ejlayers.report(m).revert() is m
    assert nnx.graphdef(m) == definition


def test_layers_with_their_own_functions_and_subclasses_are_skipped_with_a_reason():
    class Special(nnx.Linear):
        pass

    m = model()
    m.head = Special(WIDTH, 8, rngs=nnx.Rngs(0))
    m.blocks[0].up.dot_general = lambda *a, **k: jax.lax.dot_general(*a, **k)
    m.blocks[1].attention.attention_fn = lambda q, k, v, **kw: v
    report = {row.path: row for row in ejlayers.report(ejlayers.swap(m)).rows}
    assert report["blocks.0.up"].note == "custom dot_general"
    assert report["blocks.1.attention"].note == "custom attention_fn"
    assert "subclass" in report["head"].note
    assert report["blocks.0.down"].replaced
    assert "custom dot_general" in str(ejlayers.report(m))


def test_rules_choose_by_path_and_type_and_the_first_wins():
    config = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))
    rules = {"blocks.*.up": config, "blocks.1.**": False, nnx.MultiHeadAttention: True, "head": False}
    m = ejlayers.swap(model(), rules=rules)
    found = {row.path: (row.replaced, row.note) for row in ejlayers.report(m).rows}
    assert found["blocks.0.up"][1] == "pinned: fwd.blocksize_m=4"
    assert found["blocks.1.up"][0]
    assert found["blocks.1.attention"] == (False, "a rule says so")
    assert found["head"] == (False, "a rule says so")
    assert found["blocks.0.attention"] == (True, "")
    with pytest.raises(ek.ConfigError, match=r"'blocks\.0\.upp' matches no layer.*did you mean 'blocks\.0\.up'"):
        ejlayers.swap(model(), rules={"blocks.0.upp": True})
    with pytest.raises(ek.ConfigError, match=r"rule 'head' has no effect: rule '\*\*' before it"):
        ejlayers.swap(model(), rules={"**": True, "head": False})
    with pytest.raises(ek.ConfigError, match="expected a AttentionConfig"):
        ejlayers.swap(model(), rules={"**.attention": config})
    with pytest.raises(ek.ConfigError, match="expected True, False or"):
        ejlayers.swap(model(), rules={"**": 3})


def test_a_config_that_no_layer_takes_is_refused():
    m = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ek.ConfigError, match="config has a NormConfig, which no layer takes"):
        ejlayers.swap(m, config=[ek.NormConfig(), ek.LinearConfig(backend="xla")])
    assert type(m) is nnx.Linear


def test_abstract_stacked_and_vmapped_models_swap():
    abstract = ejlayers.swap(nnx.eval_shape(lambda: model()))
    assert type(abstract.head) is ejlayers.nnx.Linear

    @nnx.vmap
    def stack(key):
        return Block(nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 3)
    stacked, plain = ejlayers.swap(stack(keys)), stack(keys)

    def run(blocks):
        def layer(x, block):
            return block(x)

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, blocks)

    assert jnp.allclose(run(stacked), run(plain), atol=1e-5)
    rows = ejlayers.explain(nnx.jit(run), stacked).rows
    assert {(r.path, r.op, r.executions) for r in rows} == {
        ("attention", "flash_attention@v1", 3),
        *(
            (path, "linear@v1", 3)
            for path in ("up", "down", *(f"attention.{n}" for n in ("query", "key", "value", "out")))
        ),
    }


def test_what_is_no_model_is_refused():
    with pytest.raises(ek.ConfigError, match=r"expected a flax\.nnx\.Module"):
        ejlayers.swap({"a": 1})


# check, explain, set_config, tune


def test_check_sees_a_difference():
    a, b = model(), ejlayers.swap(model())
    assert ejlayers.check(b, X).output_abs < 1e-5
    b.head.bias[...] += 0.5
    report = ejlayers.check(a, b, X)
    assert 0.4 < report.output_abs < 0.6
    assert "outputs differ" in str(report)


def test_explain_has_paths_and_sources_and_leaves_labels_and_model_alone():
    m = ejlayers.swap(model())
    pinned = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4), bwd=ek.BwdParams(blocksize_m=8))
    ejlayers.set_config(m, {"blocks.0.up": pinned})
    definition, optimizer = nnx.graphdef(m), adam(m)
    report = ejlayers.explain(step, m, optimizer, X)
    assert nnx.graphdef(m) == definition
    rows = {(r.path, r.op): r for r in report.rows}
    assert len(rows) == len(report.rows) == 30  # fifteen layers, forward and backward
    assert rows["blocks.0.up", "linear@v1"].config == "fwd.blocksize_m=4"
    assert rows["blocks.0.up", "linear@v1"].source == "heuristic+pinned"  # the back end was not pinned
    assert rows["blocks.0.up", "linear_bwd@v1"].config == "bwd.blocksize_m=8"
    assert rows["blocks.1.up", "linear@v1"].source == "heuristic"
    assert {r.label for r in report.rows} == set(ek.find_labels_in_lowered(step.lower(m, optimizer, X)))
    assert report.to_markdown().count("\n") == 31
    assert report.to_dict()[0]["count"] == 1
    assert "blocks.0.up" in str(report)


def test_pinned_config_beats_a_result_and_does_not_leak():
    m = ejlayers.swap(model())
    ejlayers.set_config(m, {"blocks.0.up": ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))})
    result = ejlayers.tune(nnx.jit(lambda m, x: m(x)), m, X, selector=quick(), whole_step=False)
    tuned = {
        e.call_key: ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=5))
        for e in result.entries
        if e.op_id_v == "linear@v1"
    }
    overlay = {ek.Key(result.device, "linear@v1", key): cfg for key, cfg in tuned.items()}
    with ek.overlay_cache(overlay):
        rows = {r.path: r for r in ejlayers.explain(nnx.jit(lambda m, x: m(x)), m, X).rows}
    assert rows["blocks.0.up"].config == "fwd.blocksize_m=4"
    assert rows["blocks.1.up"].config == "fwd.blocksize_m=5"


def test_changing_a_config_retraces_once_and_the_optimizer_goes_on():
    m, traces = ejlayers.swap(model()), []
    optimizer = adam(m)

    @nnx.jit
    def counted(m, optimizer, x):
        traces.append(1)
        return step(m, optimizer, x)

    counted(m, optimizer, X)
    config = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))
    for tree in (m, (m, optimizer), {"model": m}):  # equal content: no further trace
        ejlayers.set_config(tree, {"**.head" if tree is not m else "head": config})
        counted(m, optimizer, X)
    assert len(traces) == 2
    ejlayers.set_config(m, {"head": None})
    assert m.head.config is None


def quick():
    return ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))


def test_tune_takes_every_kind_of_step_and_changes_no_argument():
    m = ejlayers.swap(model())
    optimizer, before = adam(m), nnx.clone(nnx.state(m))
    chain = quick()
    result = ejlayers.tune(step, m, optimizer, X, selector=chain)
    states_equal(before, nnx.state(m))
    assert sorted({e.op_id_v for e in result.entries}) == [
        "flash_attention@v1", "flash_attention_bwd@v1", "linear@v1", "linear_bwd@v1",
    ]  # fmt: skip
    assert sum(e.count for e in result.entries if e.op_id_v == "linear@v1") == 13
    assert result.step_ms is not None
    assert "whole step" in str(result)

    def plain(model, optimizer, x):
        return step(model, optimizer, x)

    kept = [ejlayers.tune(s, m, optimizer, X, selector=chain, whole_step=False) for s in (step, plain)]
    assert kept[0].digest == kept[1].digest
    with result:
        assert np.isfinite(step(m, optimizer, X))


def test_whole_step_waits_for_steps_that_return_nothing_and_survives_those_that_raise():
    m = ejlayers.swap(model())

    @nnx.jit
    def silent(m, x):
        for _ in range(20):
            x = m.blocks[0](x)
        m.head.bias[...] += x.mean()

    @nnx.jit
    def loud(m, x):
        return silent(m, x), m(x)

    chain, x = quick(), jnp.ones((4, 64, WIDTH))
    times = [ejlayers.tune(step, m, x, selector=chain).step_ms[0] for step in (silent, loud)]
    assert times[0] > times[1] / 3

    def broken(m, x):
        return jax.pure_callback(lambda x: 1 / 0, x, m(x))

    result = ejlayers.tune(nnx.jit(broken), m, x, selector=chain)
    assert len(result.entries) > 0
    assert "could not be timed" in result.notes[0]


def test_swap_takes_unhashable_models_and_a_rule_puts_a_stock_layer_back():
    @dataclasses.dataclass
    class Plain(nnx.Module):
        head: nnx.Linear

    m = ejlayers.swap(Plain(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))
    assert ejlayers.report(m).rows[0].replaced
    ejlayers.swap(m, rules={"head": False})
    assert type(m.head) is nnx.Linear
    assert ejlayers.report(m).rows[0].note == "a rule says so"


def test_check_does_not_pass_over_nan():
    a, b = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ejlayers.nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    b.bias[...] = b.bias[...].at[2].set(jnp.nan)
    assert ejlayers.check(a, b, jnp.ones((2, 4))).output_abs == float("inf")


def test_tune_takes_abstract_arguments_and_functions_of_arrays():
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    result = ejlayers.tune(jax.grad(lambda w: ek.linear(w, w).sum()), w, selector=quick())
    assert sorted(e.op_id_v for e in result.entries) == ["linear@v1", "linear_bwd@v1"]
    assert result.step_ms is None
