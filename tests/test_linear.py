"""`linear` on XLA: its numbers, and each rule of its documentation as a test."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import BwdParams, ConfigError, FwdParams, LinearConfig, UnsupportedError, linear

from .reference import assert_as_good_as_plain, case_name, mostly_once, pairwise
from .reference import linear as reference


@functools.partial(jax.jit, static_argnames="statics")
def run(arrays, dout, statics):
    """Output and the gradient of every array."""
    out, pull = jax.vjp(lambda arrays: linear(**arrays, **dict(statics)), arrays)
    return {"out": out, **pull(dout)[0]}


def chunks(fwd, bwd):
    return LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=fwd), bwd=BwdParams(blocksize_m=bwd))


def inputs(rows=(6,), features=(8, 5), bias=True, layout="io", dtype=np.float32, seed=0):
    """Random arrays, and a random generator for the rest."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    arrays = {
        "x": rng.normal(size=(*rows, features[0])).astype(dtype),
        "weight": (rng.normal(size=features) / max(1, features[0]) ** 0.5).astype(dtype),
        **({"bias": rng.normal(size=features[1]).astype(dtype)} if bias else {}),
    }
    return arrays | ({"weight": arrays["weight"].T} if layout == "oi" else {}), rng


def judge(arrays, rng, config=None, repeats=4, **options):
    """Checks output and gradients against the reference; returns them.

    Rows are drawn a few times more for the same program: errors of a few numbers compare badly.
    """
    x, out_dtype = arrays["x"], options.get("preferred_element_type")
    common = np.promote_types(x.dtype, arrays["weight"].dtype)
    out_features = arrays["weight"].shape[0 if options.get("weight_layout") == "oi" else 1]
    results = []
    for _ in range(repeats):
        arrays = arrays | {"x": rng.normal(size=x.shape).astype(x.dtype)}
        dout = rng.normal(size=(*x.shape[:-1], out_features)).astype(common if out_dtype is None else out_dtype)
        got = run(arrays, dout, (("config", config), *sorted(options.items())))
        results.append((got, *(reference(arrays, dout=dout, **options, plain=p) for p in (False, True))))
    stacked = [{n: np.stack([r[n] for r in column]) for n in got} for column in zip(*results)]
    assert_as_good_as_plain(*stacked, common)
    assert got["out"].dtype == dout.dtype
    assert all(got[n].dtype == a.dtype and got[n].shape == a.shape for n, a in arrays.items())
    return got


FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "rows": ((), (1,), (2, 3), (63,), (113,)),
    "features": ((8, 16), (7, 5), (1, 3)),
    "activation": (None, "gelu", "gelu_exact", "silu", "relu", "squared_relu"),
    "bias": (True, False),
    "layout": ("io", "oi"),
    "preferred": (None, "float32"),
    "chunks": (None, (16, 5), (5, 64), (1, 16)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(FACTORS)), ids=case_name)
def test_output_and_gradients_err_no_more_than_a_plain_product(case):
    seed = zlib.crc32(case_name(case).encode())
    arrays, rng = inputs(case["rows"], case["features"], case["bias"], case["layout"], case["dtype"], seed)
    options = dict(activation=case["activation"], weight_layout=case["layout"])
    config = chunks(*case["chunks"]) if case["chunks"] else None
    judge(arrays, rng, config, preferred_element_type=case["preferred"], **options)


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        arrays, rng = inputs(dtype=np.float64)
        judge(arrays, rng, chunks(4, 4), activation="silu")


def test_mixed_types_give_their_common_type_and_gradients_of_their_own():
    arrays, rng = inputs()
    arrays["x"] = arrays["x"].astype(jnp.bfloat16)
    assert judge(arrays, rng, activation="gelu")["out"].dtype == np.float32


def test_sums_bias_and_activation_are_in_float32_for_low_precision_inputs():
    """A product of 4096 ones and a bias of 1 is 4097: in bfloat16 the sum would stop at 256, the bias be lost."""
    arrays = {"x": np.ones((2, 4096)), "weight": np.ones((4096, 3)), "bias": np.ones(3)}
    arrays = {n: a.astype(jnp.bfloat16) for n, a in arrays.items()}
    out = jax.jit(functools.partial(linear, preferred_element_type=jnp.float32))(**arrays)
    np.testing.assert_array_equal(out, np.full((2, 3), 4097))


def test_chunks_of_rows_change_nothing():
    arrays, rng = inputs((7, 3))
    dout = rng.normal(size=(7, 3, 5)).astype(np.float32)
    whole, chunked = (run(arrays, dout, (("activation", "gelu"), ("config", c))) for c in (None, chunks(4, 5)))
    for name, x in whole.items():
        np.testing.assert_allclose(chunked[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


def test_no_rows_give_no_rows_and_zero_gradients():
    arrays, _ = inputs((2, 0))
    got = run(arrays, np.zeros((2, 0, 5), np.float32), (("activation", "silu"),))
    assert got["out"].shape == (2, 0, 5)
    assert got["x"].shape == (2, 0, 8)
    assert not np.any(got["weight"])
    assert not np.any(got["bias"])


def test_no_features_give_the_bias():
    arrays, rng = inputs((5,), (0, 3))
    got = run(arrays, rng.normal(size=(5, 3)).astype(np.float32), (("config", chunks(2, 2)),))
    np.testing.assert_array_equal(got["out"], np.broadcast_to(arrays["bias"], (5, 3)))
    assert got["x"].shape == (5, 0)


def test_the_gradient_of_one_array_alone_is_that_among_all():
    arrays, rng = inputs()
    dout = rng.normal(size=(6, 5)).astype(np.float32)

    def alone(arrays, name):
        apply = functools.partial(linear, activation="silu", config=chunks(4, 4))
        return jax.vjp(lambda a: apply(**(arrays | {name: a})), arrays[name])[1](dout)[0]

    together = run(arrays, dout, (("activation", "silu"),))
    for name, x in jax.jit(lambda arrays: {n: alone(arrays, n) for n in arrays})(arrays).items():
        np.testing.assert_allclose(x, together[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_zero_cotangents_give_zero_gradients():
    arrays, _ = inputs()
    got = run(arrays, np.zeros((6, 5), np.float32), (("activation", "gelu"),))
    assert all(not np.any(got[n]) for n in arrays)


def test_the_weight_of_either_layout_gives_the_same_and_is_not_copied():
    arrays, _ = inputs(features=(8, 8))
    transposed = arrays | {"weight": np.ascontiguousarray(arrays["weight"].T)}
    one, other = jax.jit(linear), jax.jit(functools.partial(linear, weight_layout="oi"))
    np.testing.assert_allclose(other(**transposed), one(**arrays), rtol=1e-6, atol=1e-6)
    assert "transpose" not in other.lower(**transposed).as_text()


def test_numpy_arrays_and_lists_are_taken_as_jax_takes_them():
    x = np.ones((2, 3))  # float64, as NumPy makes it, is float32 to JAX
    out = jax.eval_shape(lambda: linear(x, x.T.tolist(), [0.0, 1.0]))
    assert (out.shape, out.dtype) == ((2, 2), jnp.float32)


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


BAD = [  # argument, value, type of the error, what its message must say besides the argument's name
    ("x", ones(), ValueError, ["()", "(..., in)"]),
    ("x", ones(4, 5), ValueError, ["5 features", "takes 3", "'io'", "weight_layout='oi'"]),
    ("x", ones(4, 7), ValueError, ["7 features", "takes 3", "'io'"]),
    ("x", ones(4, 3, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("x", None, TypeError, ["NoneType", "array"]),
    ("weight", ones(3), ValueError, ["(3,)", "two axes"]),
    ("weight", ones(3, 5, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("bias", ones(3), ValueError, ["(3,)", "(5,)"]),
    ("bias", ones(5, dtype=bool), TypeError, ["bool", "float"]),
    ("activation", "gelu_fast", ValueError, ["'gelu_fast'", "gelu_exact", "squared_relu"]),
    ("weight_layout", "in out", ValueError, ["'in out'", "'io'", "'oi'"]),
    ("preferred_element_type", "int32", TypeError, ["int32", "float"]),
    ("preferred_element_type", "foo", TypeError, ["'foo'", "float"]),
    ("weight", ones(3, 5, dtype=jnp.float8_e4m3fn), TypeError, ["float8_e4m3fn", "cast it to bfloat16"]),
    ("precision", 3, ValueError, ["3", "highest"]),
    ("config", {"blocksize_m": 4}, ConfigError, ["blocksize_m", "LinearConfig"]),
    ("config", LinearConfig(backend="xla", fwd=FwdParams(num_warps=4)), ConfigError, ["num_warps=4", "blocksize_m"]),
    ("backend", "cpu", ConfigError, ["'cpu'", "triton, pallas, cudnn, xla"]),
    ("backend", "cudnn", UnsupportedError, ["'cudnn'", "xla"]),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), BAD, ids=[f"{n}-{e.__name__}-{i}" for i, (n, _, e, _) in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name_with_what_came_and_what_was_expected(name, value, error, words):
    arrays, options = {"x": ones(4, 3), "weight": ones(3, 5), "bias": ones(5)}, {}
    (arrays if name in arrays else options)[name] = value
    with pytest.raises(error) as caught:
        jax.jit(lambda arrays: linear(**arrays, **options)).lower(arrays)
    assert all(word in str(caught.value) for word in [name, *words]), str(caught.value)


def test_more_rows_than_a_block_may_have_are_taken():
    """A block is at most 2**20 rows: more rows at once would be no config."""
    lowered = jax.jit(jax.grad(lambda x: linear(x, jnp.ones((1, 1))).sum())).lower(ones((1 << 20) + 1, 1))
    assert lowered.out_info.shape == ((1 << 20) + 1, 1)
