"""What no kernel takes computes as the stock layer does, and is told: types, dropout, functions of one's own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import ejlayers

WIDTH = 16
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 9, WIDTH))
STOCK = {"nnx": nnx, "linen": nn, "equinox": eqx.nn}
EQUATION = "nta,hab->nthb"

# name -> framework -> class, arguments, method
LAYERS = {
    "linear": {"nnx": ("Linear", (WIDTH, 8)), "linen": ("Dense", (8,)), "equinox": ("Linear", (WIDTH, 8))},
    "general": {"nnx": ("LinearGeneral", (WIDTH, (4, 5))), "linen": ("DenseGeneral", ((4, 5),))},
    "einsum": {"nnx": ("Einsum", (EQUATION, (8, WIDTH, 4))), "linen": ("Einsum", ((8, WIDTH, 4), EQUATION))},
    "rms norm": {"nnx": ("RMSNorm", (WIDTH,)), "linen": ("RMSNorm", ()), "equinox": ("RMSNorm", (WIDTH,))},
    "layer norm": {"nnx": ("LayerNorm", (WIDTH,)), "linen": ("LayerNorm", ()), "equinox": ("LayerNorm", (WIDTH,))},
    "embedding": {"nnx": ("Embed", (11, WIDTH), "attend"), "linen": ("Embed", (11, WIDTH), "attend")},
    "attention": {
        "nnx": ("MultiHeadAttention", (4, WIDTH)), "linen": ("MultiHeadDotProductAttention", (4,)),
        "equinox": ("MultiheadAttention", (4, WIDTH)),
    },
    "rotary embedding": {"equinox": ("RotaryPositionalEmbedding", (WIDTH,))},
}  # fmt: skip
CASES = [(name, framework) for name, found in LAYERS.items() for framework in found]


def runs(name, framework, *, param=None, dtype=None, **options):
    """The stock layer and ours over equal parameters, as functions of inputs `(batch, length, features)`."""
    kind, args, *method = LAYERS[name][framework]
    method = method[0] if method else "__call__"
    packages = (STOCK[framework], getattr(ejlayers, framework))
    types = {} if param is None else {"dtype" if framework == "equinox" else "param_dtype": param}
    if framework == "equinox":
        keys = {"key": KEY} if kind in ("Linear", "MultiheadAttention") else {}
        layers = [getattr(package, kind)(*args, **types, **keys) for package in packages]
        calls = {"attention": lambda f: jax.vmap(lambda x: f(x, x, x)), "rotary embedding": jax.vmap}
        call = calls.get(name, lambda f: jax.vmap(jax.vmap(f)))
        return [lambda x, layer=layer: call(layer)(x) for layer in layers]
    types |= options | ({} if dtype is None else {"dtype": dtype})
    if framework == "nnx":
        more = {"rngs": nnx.Rngs(0)} | ({"decode": False} if name == "attention" else {})
        layers = [getattr(package, kind)(*args, **types, **more | {"rngs": nnx.Rngs(0)}) for package in packages]
        return [lambda x, layer=layer: getattr(layer, method)(x) for layer in layers]
    layers = [getattr(package, kind)(*args, **types) for package in packages]

    keys = {"params": KEY, "dropout": KEY}

    def applied(layer):
        return lambda x: layer.apply(layers[0].init(keys, x, method=method), x, method=method, rngs=keys)

    return [applied(layer) for layer in layers]


def outcome(run, x):
    """The outputs, or `None` where there are none."""
    try:
        return run(x)
    except Exception as error:  # what the stock layer does not take, ours need not take
        return error


def same(stock, ours, x, tolerance):
    """Whether the stock layer takes the input; then ours gives the same."""
    want, got = outcome(stock, x), outcome(ours, x)
    if isinstance(want, Exception):
        return False
    if isinstance(got, Exception):
        raise got
    assert got.dtype == want.dtype
    np.testing.assert_allclose(*(np.asarray(y).astype(complex) for y in (got, want)), rtol=tolerance, atol=tolerance)
    return True


FLOAT8 = jnp.float8_e4m3fn
TYPES = {"complex": (X + 2j * X[::-1], 1e-4), "float8": (X.astype(FLOAT8), 0.15), "integer": (jnp.round(9 * X), 0.15)}


# Flax casts complex numbers where it was told another type, and so in the softmax of its attention.
complex_is_cast = pytest.mark.filterwarnings("ignore:Casting")


@complex_is_cast
@pytest.mark.cpu
@pytest.mark.parametrize(("name", "framework"), CASES)
def test_types_that_the_stock_layer_takes_ours_takes(name, framework):
    taken = set()
    for param in (None, jnp.complex64, FLOAT8) if name != "rotary embedding" else (None,):
        stock, ours = runs(name, framework, param=param)
        for kind, (x, tolerance) in TYPES.items():
            x = x.astype(int) if kind == "integer" else x
            if same(stock, ours, x, tolerance if param is not FLOAT8 else 0.15):
                taken.add((kind, param))
    assert taken


@pytest.mark.parametrize(
    ("name", "framework"), [c for c in CASES if c[0] != "rotary embedding" and c != ("attention", "nnx")]
)
def test_a_type_that_no_kernel_takes_has_a_row_that_says_so(name, framework):
    _, ours = runs(name, framework, param=jnp.complex64 if name == "embedding" else None)
    found = ejlayers.explain(jax.jit(lambda x: ours(x)), X + 1j).rows
    assert {row.backend for row in found} == {"stock"}
    assert any("is complex64" in row.note for row in found)


@complex_is_cast
@pytest.mark.cpu
@pytest.mark.parametrize("types", [{"dtype": jnp.bfloat16, "param": jnp.complex64}, {"dtype": jnp.float32}], ids=str)
@pytest.mark.parametrize(("name", "framework"), [case for case in CASES if case[1] == "nnx"])
def test_what_is_brought_to_a_type_that_a_kernel_takes_is_a_kernels(name, framework, types):
    _, ours = runs(name, framework, **types)
    assert "stock" not in {row.backend for row in ejlayers.explain(jax.jit(lambda x: ours(x)), X).rows}


def test_a_swap_leaves_layers_of_such_weights_alone_and_says_why():
    m = ejlayers.swap(nnx.Linear(3, 4, param_dtype=jnp.complex64, rngs=nnx.Rngs(0)))
    assert ejlayers.report(m).rows[0].note == "kernel is complex64"
    model = ejlayers.swap(nn.Dense(4, param_dtype=jnp.complex64))
    x = jnp.ones((2, 3))
    assert ejlayers.report(model, model.init(KEY, x), x).rows[0].note == "the type to compute in is complex64"
    m = ejlayers.swap(eqx.nn.MultiheadAttention(2, 4, dtype=jnp.complex64, key=KEY))
    assert ejlayers.report(m).rows[0].note == "query_proj.weight is complex64"


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "framework"), CASES)
def test_layers_work_where_types_must_not_be_mixed(name, framework):
    kinds, taken = (jnp.float32, jnp.bfloat16), []
    with jax.numpy_dtype_promotion("strict"):
        for param in kinds:
            for dtype in (None,) if framework == "equinox" else (None, *kinds):
                stock, ours = runs(name, framework, param=param, dtype=dtype)
                taken += [same(stock, ours, X.astype(kind), 0.05) for kind in kinds]
    assert sum(taken) >= 2


@pytest.mark.cpu
def test_gradients_work_where_types_must_not_be_mixed():
    x = X.astype(jnp.bfloat16)
    for name in ("rms norm", "linear", "attention"):
        grads = [
            jax.grad(lambda x, run=run: run(x).astype(jnp.float32).sum()) for run in runs(name, "nnx", dtype=x.dtype)
        ]
        with jax.numpy_dtype_promotion("strict"):
            got = grads[1](x)
        np.testing.assert_allclose(*(np.asarray(g, np.float32) for g in (got, grads[0](x))), rtol=0.05, atol=0.05)


# Attention


def attention(framework, **kwargs):
    """Ours, called with `(batch, length, features)`, and its report."""
    if framework == "nnx":
        layer = ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0), **kwargs)
        return lambda x, **call: nnx.clone(layer)(x, **call), ejlayers.report(layer)
    layer = ejlayers.swap(nn.MultiHeadDotProductAttention(4, **kwargs))
    variables, rngs = layer.init({"params": KEY, "dropout": KEY}, X), {"dropout": KEY}

    def run(x, **call):
        return layer.apply(variables, x, rngs=rngs, mutable="intermediates", **call)[0]

    return run, ejlayers.report(layer, variables, X, rngs=rngs)


DROPPING = {"dropout_rate": 0.5, "deterministic": False}
ATTENTION = {
    "shared dropout": (DROPPING, {}, "dropout with broadcast_dropout=True", True),
    "sown weights": ({}, {"sow_weights": True}, "sow_weights=True", False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flax's own, about its own sow
@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_the_framework_has_a_row_with_its_reason(name, framework):
    kwargs, call, reason, is_of_the_layer = ATTENTION[name]
    run, report = attention(framework, **kwargs)
    rows = ejlayers.explain(jax.jit(lambda x: run(x, **call)), X).rows
    [row] = [row for row in rows if row.op == "flash_attention@v1"]
    assert (row.backend, row.note, row.count) == ("stock", reason, 1)
    notes = {row.layer: row.note for row in report.rows}
    note = notes.get("MultiHeadAttention", notes.get("MultiHeadDotProductAttention"))
    assert note == (f"as the stock layer: {reason}" if is_of_the_layer else "")


@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_dropout_of_everything_is_what_the_stock_layer_makes_of_it(framework, is_shared):
    """NaN; later versions of Flax refuse it."""
    options = {"dropout_rate": 1.0, "deterministic": False, "broadcast_dropout": is_shared}
    want, got = (outcome(run, X) for run in runs("attention", framework, **options))
    assert type(want) is type(got)
    np.testing.assert_equal(*(str(out) if isinstance(out, Exception) else np.asarray(out) for out in (got, want)))


def test_a_function_that_is_put_into_a_swapped_layer_is_reported_and_explained():
    class Model(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.attention(x)

    model = ejlayers.swap(Model())
    model.attention.attention_fn = own = lambda query, key, value, **options: value
    rows = {row.path: row for row in ejlayers.report(model).rows}
    assert rows["attention"].note == "as the stock layer: custom attention_fn"
    [row] = [r for r in ejlayers.explain(nnx.jit(lambda m, x: m(x)), model, X).rows if r.path == "attention"]
    assert (row.backend, row.note) == ("stock", "custom attention_fn")
    np.testing.assert_allclose(model(X), model.attention.out(model.attention.value(X)), atol=1e-6)
    assert ejlayers.report(model).revert().attention.attention_fn is own


@pytest.mark.parametrize("p", [jnp.array(0.5), 1.0], ids=str)
def test_dropout_of_equinox_that_no_kernel_computes_is_told(p):
    stock, ours = (m.MultiheadAttention(4, WIDTH, dropout_p=p, key=KEY) for m in (eqx.nn, ejlayers.equinox))
    np.testing.assert_allclose(*(layer(X[0], X[0], X[0], key=KEY) for layer in (stock, ours)), atol=1e-6)
    rows = ejlayers.explain(eqx.filter_jit(lambda m, x: m(x, x, x, key=KEY)), ours, X[0]).rows
    reason = None if isinstance(p, float) else "dropout with a p that is an array"
    assert [row.note for row in rows if row.backend == "stock"] == [reason] * (reason is not None)
    assert ejlayers.report(ours).rows[0].note == ("" if reason is None else f"as the stock layer: {reason}")


@pytest.mark.parametrize("framework", ["nnx", "linen", "equinox"])
def test_our_own_attention_that_drops_everything_gives_zero(framework):
    made = getattr(ejlayers, framework).Attention
    if framework == "nnx":
        out = made(WIDTH, 4, dropout_rate=1.0, rngs=nnx.Rngs(0))(X)
    elif framework == "linen":
        out, _ = made(4, dropout_rate=1.0).init_with_output({"params": KEY, "dropout": KEY}, X)
    else:
        out = made(WIDTH, 4, dropout_p=1.0, key=KEY)(X[0], key=KEY)
    np.testing.assert_array_equal(out, 0)


# Meshes


def spread(shape, spec):
    return jax.device_put(jax.random.normal(KEY, shape), jax.P(*spec))


SPECS = [("data",), (None, "data"), ("data", "model"), (None, "model", None)]


@pytest.mark.cpu
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_several_batch_axes_may_be_spread_over_a_mesh_with_explicit_axes(spec):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    stock, ours = runs("attention", "linen")
    mask, positions = jnp.ones((4, 1, 1, 6), bool).at[..., 4:].set(False), jnp.arange(24).reshape(4, 6)
    head = ejlayers.nnx.LMHead(WIDTH, 11, rngs=nnx.Rngs(0))

    def attended(x, positions, mask):
        heads = x.reshape(*x.shape[:-1], 4, 4)
        turned = ejlayers.Rotary()(heads, positions)
        return ejlayers.functional.attend(turned, turned, heads, mask=mask, kv_lengths=jnp.full(x.shape[:2], 5))

    plain = jax.random.normal(KEY, (2, 4, 6, WIDTH))
    labels = jnp.arange(48).reshape(2, 4, 6) % 11
    wanted = stock(plain), attended(plain, positions, mask), head.loss(plain, labels, reduction="none")
    with jax.set_mesh(mesh):
        x = spread(plain.shape, spec)
        outs = jax.jit(lambda x: (ours(x), attended(x, positions, mask)))(x)
        for out in outs:
            assert jax.typeof(out).sharding.spec[:2] == jax.typeof(x).sharding.spec[:2]
        loss = jax.jit(lambda x: head.loss(x, labels, reduction="none"))(x)
        for got, want in zip((*outs, loss), wanted):
            np.testing.assert_allclose(jax.device_get(got), jax.device_get(want), rtol=1e-4, atol=1e-4)
        calls = [row.count for row in ejlayers.explain(jax.jit(lambda x: ours(x)), x).rows if "flash" in row.op]
        assert calls == [1]


@pytest.mark.cpu
@pytest.mark.parametrize("spec", [("data",), (None, "data")], ids=str)
def test_examples_of_a_mesh_decode_each_from_its_own_index(spec):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    new, cached = (jax.random.normal(KEY, (2, 2, n, 2, 8)) for n in (1, 6))
    index = jnp.array([[1, 2], [3, 4]])
    step = jax.jit(lambda new, cached, index: ejlayers.cache.attend_cached(new, new, new, cached, cached, index))
    wanted = step(new, cached, index)
    with jax.set_mesh(mesh):
        got = step(*(jax.device_put(x, jax.P(*spec)) for x in (new, cached, index)))
        for ours, plain in zip(jax.device_get(got), jax.device_get(wanted)):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
