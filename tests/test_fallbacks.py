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


def runs(name, framework, *, param=None, dtype=None):
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
    types |= {} if dtype is None else {"dtype": dtype}
    if framework == "nnx":
        more = {"rngs": nnx.Rngs(0)} | ({"decode": False} if name == "attention" else {})
        layers = [getattr(package, kind)(*args, **types, **more | {"rngs": nnx.Rngs(0)}) for package in packages]
        return [lambda x, layer=layer: getattr(layer, method)(x) for layer in layers]
    layers = [getattr(package, kind)(*args, **types) for package in packages]

    def applied(layer):
        return lambda x: layer.apply(layers[0].init(KEY, x, method=method), x, method=method)

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
