"""`rms_norm` and `layer_norm` on XLA: their numbers, and each rule of their documentation as a test."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    Autotuner,
    BwdParams,
    ConfigError,
    ConfigSelectorChain,
    FwdParams,
    NormConfig,
    UnsupportedError,
    autotune_lowered,
    find_labels_in_lowered,
    layer_norm,
    rms_norm,
)
from ejkernel_ops.kernels import LAYER_NORM_BWD, RMS_NORM
from ejkernel_ops.utils.meta import split_label

from . import reference
from .reference import assert_as_good_as_plain, case_name, pairwise

OPS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
both_ops = pytest.mark.parametrize("op", OPS)


@functools.partial(jax.jit, static_argnames=("op", "statics"))
def run(op, arrays, cotangents, statics=()):
    """Outputs and the gradient of every array."""

    def apply(arrays):
        outs = OPS[op](**arrays, **dict(statics))
        return dict(zip(("out", "summed"), outs if "residual" in arrays else [outs]))

    outs, pull = jax.vjp(apply, arrays)
    return outs | pull({name: cotangents["d" + name] for name in outs})[0]


def chunks(fwd, bwd):
    return NormConfig(backend="xla", fwd=FwdParams(blocksize_m=fwd), bwd=BwdParams(blocksize_m=bwd))


def inputs(rows=(6,), features=8, scale=True, bias=True, residual=True, dtype=np.float32, seed=0, rows_only=None):
    """Random arrays and cotangents; scale and bias are float32 whatever the rows are."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    arrays = {"x": normal(*rows, features)}
    arrays |= {"scale": normal(features, dtype=rows_only or dtype)} if scale else {}
    arrays |= {"bias": normal(features, dtype=rows_only or dtype)} if bias else {}
    arrays |= {"residual": normal(*rows, features)} if residual else {}
    return arrays, {"dout": normal(*rows, features)} | ({"dsummed": normal(*rows, features)} if residual else {})


def judge(op, drawn, config=None, epsilon=1e-6):
    """Checks outputs and gradients against the reference; returns the last ones.

    Rows are drawn a few times for the same program: errors of a few numbers compare badly.
    """
    results = []
    for arrays, cotangents in drawn:
        got = run(op, arrays, cotangents, (("config", config), ("epsilon", epsilon)))
        exact, plain = (
            getattr(reference, op)(arrays, **cotangents, epsilon=epsilon, plain=plain) for plain in (False, True)
        )
        results.append((got, exact, plain))
        assert got["out"].dtype == cotangents["dout"].dtype
        assert all(got[n].dtype == a.dtype and got[n].shape == a.shape for n, a in arrays.items())
    stacked = [{n: np.stack([r[n] for r in column]) for n in got} for column in zip(*results)]
    assert_as_good_as_plain(*stacked, arrays["x"].dtype)
    return got


FACTORS = {
    "op": tuple(OPS),
    "dtype": ("float32", "bfloat16", "float16"),
    "rows": ((), (1,), (2, 3), (63,), (113,)),
    "features": (8, 7, 65, 1),
    "scale": (True, False),
    "bias": (True, False),
    "residual": (True, False),
    "rows_only": (None, "float32"),
    "epsilon": (1e-6, 1e-2),
    "chunks": (None, (16, 5), (5, 64), (1, 16)),
}


@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=case_name)
def test_outputs_and_gradients_err_no_more_than_a_plain_norm(case):
    seed, case = zlib.crc32(case_name(case).encode()), dict(case)
    op, epsilon, config = (case.pop(n) for n in ("op", "epsilon", "chunks"))
    drawn = [inputs(**case, seed=seed + i) for i in range(4)]
    judge(op, drawn, config and chunks(*config), epsilon)


@both_ops
def test_float64_inputs_are_computed_in_float64(op):
    with jax.enable_x64(True):
        judge(op, [inputs(dtype=np.float64)], chunks(4, 4))


@both_ops
def test_a_float64_scale_alone_has_its_norm_and_gradients_in_float64(op):
    with jax.enable_x64(True):
        arrays, cotangents = inputs(residual=False, rows_only=np.float64)
        got = run(op, arrays, cotangents)
        assert got["out"].dtype == np.float32
        exact = getattr(reference, op)(arrays, **cotangents)
        np.testing.assert_allclose(got["scale"], exact["scale"], rtol=1e-13)


@both_ops
def test_scale_and_bias_are_not_rounded_to_the_type_of_the_rows(op):
    """In bfloat16 this scale and this bias would be 1."""
    x = jnp.asarray([[256.0, -256.0]], jnp.bfloat16)
    scale, bias = jnp.full(2, 1 + 2**-9), jnp.array([-1.0, 1.0]) * (1 + 2**-10)
    out = OPS[op](x, scale, bias, epsilon=0.0)
    np.testing.assert_array_equal(out, jnp.asarray([[2**-10, -(2**-10)]], jnp.bfloat16))


@both_ops
def test_a_residual_of_another_type_gives_sum_and_norm_in_the_common_type(op):
    arrays, cotangents = inputs()
    arrays["x"] = arrays["x"].astype(jnp.bfloat16)
    got = run(op, arrays, cotangents)
    assert [got[n].dtype for n in ("out", "summed", "x", "residual")] == [
        np.float32,
        np.float32,
        "bfloat16",
        np.float32,
    ]
    np.testing.assert_array_equal(got["x"], got["residual"].astype(jnp.bfloat16))
    exact = getattr(reference, op)(arrays, **cotangents)
    np.testing.assert_allclose(got["residual"], exact["residual"], rtol=1e-4, atol=1e-5)


@both_ops
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_norm_is_that_of_the_sum_as_it_is_returned(op, dtype):
    (arrays, _), fn = inputs((64,), 16, dtype=dtype), OPS[op]
    out, summed = jax.jit(fn)(**arrays)
    np.testing.assert_array_equal(summed, arrays["x"] + arrays["residual"])
    np.testing.assert_array_equal(out, jax.jit(fn)(np.asarray(summed), arrays["scale"], arrays["bias"]))


def test_rows_far_from_0_have_their_variance_to_the_last_digits():
    """The mean of the squares less the square of the mean would have no digit left."""
    x = (2000 + np.random.default_rng(0).normal(size=(16, 1000))).astype(np.float32)
    out = np.asarray(jax.jit(layer_norm)(x)).astype(np.float64)
    np.testing.assert_allclose(out.std(-1), 1, atol=1e-5)
    exact = reference.layer_norm({"x": x}, dout=x)["out"]
    np.testing.assert_allclose(out, exact, atol=1e-3)


@pytest.mark.parametrize("features", [1, 7, 1000])
@pytest.mark.parametrize("number", [0.0, 3.7, 2000.1])
def test_a_row_of_equal_numbers_gives_0_and_finite_gradients(number, features):
    """Its mean, if rounded, would differ from the numbers, and epsilon makes much of a small difference."""
    arrays, cotangents = inputs((3,), features, bias=False, residual=False)
    got = run("layer_norm", arrays | {"x": np.full((3, features), number, np.float32)}, cotangents)
    assert not np.any(got["out"])
    assert not np.any(got["scale"])
    assert np.isfinite(got["x"]).all()


def test_a_row_of_zeros_gives_0_and_finite_gradients():
    arrays, cotangents = inputs((3,), bias=False, residual=False)
    got = run("rms_norm", arrays | {"x": np.zeros((3, 8), np.float32)}, cotangents)
    assert not np.any(got["out"])
    assert not np.any(got["scale"])
    np.testing.assert_allclose(got["x"], 1000 * cotangents["dout"] * arrays["scale"], rtol=1e-6)


@both_ops
def test_epsilon_may_be_0(op):
    judge(op, [inputs(seed=i) for i in range(4)], epsilon=0.0)


@both_ops
def test_chunks_of_rows_change_nothing(op):
    arrays, cotangents = inputs((7, 3))
    whole, chunked = (run(op, arrays, cotangents, (("config", c),)) for c in (None, chunks(4, 5)))
    for name, x in whole.items():
        np.testing.assert_allclose(chunked[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


@both_ops
def test_sums_over_many_rows_keep_their_digits(op):
    """Added one by one in float32, 2**15 rows would lose some five times as much."""
    arrays, cotangents = inputs((1 << 15,), 8, residual=False)
    got, exact = run(op, arrays, cotangents), getattr(reference, op)(arrays, **cotangents)
    for name in ("scale", "bias"):
        np.testing.assert_allclose(got[name], exact[name], atol=1e-4, err_msg=name)


@both_ops
def test_no_rows_give_no_rows_and_zero_gradients(op):
    arrays, cotangents = inputs((2, 0))
    got = run(op, arrays, cotangents)
    assert all(got[n].shape == (2, 0, 8) for n in ("out", "summed", "x", "residual"))
    assert not np.any(got["scale"])
    assert not np.any(got["bias"])


@both_ops
def test_zero_cotangents_give_zero_gradients(op):
    arrays, cotangents = inputs()
    got = run(op, arrays, {n: np.zeros_like(c) for n, c in cotangents.items()})
    assert all(not np.any(got[n]) for n in arrays)


@both_ops
@pytest.mark.parametrize("config", [None, chunks(4, 4)], ids=["whole", "chunks"])
def test_the_gradient_of_one_array_alone_is_that_among_all(op, config):
    arrays, cotangents = inputs()

    def alone(arrays, name):
        pull = jax.vjp(lambda a: OPS[op](**(arrays | {name: a}), config=config), arrays[name])[1]
        return pull((cotangents["dout"], cotangents["dsummed"]))[0]

    together = run(op, arrays, cotangents)
    for name, x in jax.jit(lambda arrays: {n: alone(arrays, n) for n in arrays})(arrays).items():
        np.testing.assert_allclose(x, together[name], rtol=1e-5, atol=1e-6, err_msg=name)


@both_ops
def test_gradients_through_one_of_both_results_are_those_with_a_zero_cotangent_of_the_other(op):
    arrays, cotangents = inputs()
    for used, name in enumerate(("dout", "dsummed")):
        grads = jax.jit(jax.grad(lambda a: jnp.sum(OPS[op](**a)[used] * cotangents[name])))(arrays)  # noqa: B023
        wanted = run(op, arrays, {n: c * (n == name) for n, c in cotangents.items()})
        for n, grad in grads.items():
            np.testing.assert_allclose(grad, wanted[n], rtol=1e-5, atol=1e-6, err_msg=f"{name} {n}")


@both_ops
def test_only_the_gradients_that_are_asked_for_are_computed(op):
    arrays, _ = inputs(residual=False)

    def sums(*wanted):
        some, rest = ({n: a for n, a in arrays.items() if (n in wanted) == asked} for asked in (True, False))
        lowered = jax.jit(jax.grad(lambda some, rest: jnp.sum(OPS[op](**some, **rest)))).lower(some, rest)
        return lowered.as_text().count("stablehlo.dot_general")

    along_rows = {"rms_norm": 1, "layer_norm": 2}[op]
    assert [sums("bias"), sums("scale"), sums("x")] == [1, 1, along_rows]
    assert sums("x", "scale", "bias") == along_rows + 2


@both_ops
def test_labels_are_those_of_both_directions(op):
    arrays, cotangents = inputs()
    labels = find_labels_in_lowered(run.lower(op, arrays, cotangents))
    assert {split_label(text)[0] for text in labels} == {f"{op}@v1", f"{op}_bwd@v1"}


@both_ops
def test_both_directions_are_tuned(op):
    arrays, cotangents = inputs((300,))
    selector = ConfigSelectorChain(tuner=Autotuner(num_iters=1))
    result = autotune_lowered(selector, run.lower(op, arrays, cotangents), strict=True)
    assert [entry.op_id_v for entry in result.entries] == [f"{op}@v1", f"{op}_bwd@v1"]
    assert all({trial.status for trial in entry.trials} == {"timed"} for entry in result.entries)
    assert [len(entry.trials) for entry in result.entries] == [3, 3]
    assert all(isinstance(entry.cfg, NormConfig) for entry in result.entries)


def test_the_kernels_take_rows_alone_and_return_the_statistics():
    normed, summed, mean, rstd = RMS_NORM(jnp.full((2, 3), 2.0))
    assert (summed, mean) == (None, None)
    np.testing.assert_allclose(normed, np.ones((2, 3)), rtol=1e-6)
    np.testing.assert_allclose(rstd, np.full((2, 1), 0.5), rtol=1e-6)
    assert LAYER_NORM_BWD.op_id_v == "layer_norm_bwd@v1"


@both_ops
def test_numpy_arrays_and_lists_are_taken_as_jax_takes_them(op):
    out = jax.eval_shape(lambda: OPS[op](np.ones((2, 3)), [1.0, 2.0, 3.0]))
    assert (out.shape, out.dtype) == ((2, 3), jnp.float32)


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


BAD = [  # argument, value, type of the error, what its message must say besides the argument's name
    ("x", ones(), ValueError, ["()", "(..., features)"]),
    ("x", ones(4, 0), ValueError, ["(4, 0)", "at least one feature"]),
    ("x", ones(4, 5, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("x", None, TypeError, ["NoneType", "array"]),
    ("scale", ones(3), ValueError, ["(3,)", "(5,)", "reshape"]),
    ("scale", ones(1, 5), ValueError, ["(1, 5)", "(5,)", "reshape"]),
    ("scale", ones(5, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("bias", ones(), ValueError, ["()", "(5,)", "reshape"]),
    ("bias", ones(5, dtype=bool), TypeError, ["bool", "float"]),
    ("residual", ones(5), ValueError, ["(5,)", "(4, 5)", "broadcast"]),
    ("residual", ones(4, 5, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("epsilon", -1e-6, ValueError, ["-1e-06", "not negative"]),
    ("epsilon", float("nan"), ValueError, ["nan", "finite"]),
    ("epsilon", float("inf"), ValueError, ["inf", "finite"]),
    ("epsilon", "small", TypeError, ["'small'", "number"]),
    ("precision", 3, ValueError, ["3", "highest"]),
    ("config", {"blocksize_m": 4}, ConfigError, ["blocksize_m", "NormConfig"]),
    ("config", NormConfig(backend="xla", fwd=FwdParams(num_warps=4)), ConfigError, ["num_warps=4", "blocksize_m"]),
    ("backend", "cpu", ConfigError, ["'cpu'", "triton, pallas, cudnn, xla"]),
    ("backend", "cudnn", UnsupportedError, ["'cudnn'", "xla"]),
]


@both_ops
@pytest.mark.parametrize(
    ("name", "value", "error", "words"), BAD, ids=[f"{n}-{e.__name__}-{i}" for i, (n, _, e, _) in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name_with_what_came_and_what_was_expected(op, name, value, error, words):
    arrays, options = {"x": ones(4, 5), "scale": ones(5), "bias": ones(5), "residual": ones(4, 5)}, {}
    (arrays if name in arrays else options)[name] = value
    with pytest.raises(error) as caught:
        jax.jit(lambda arrays: OPS[op](**arrays, **options)).lower(arrays)
    assert all(word in str(caught.value) for word in [name, *words]), str(caught.value)


@both_ops
def test_a_traced_epsilon_is_refused(op):
    with pytest.raises(TypeError, match=r"epsilon is .* known when the program is traced"):
        jax.jit(lambda x, epsilon: OPS[op](x, epsilon=epsilon)).lower(ones(4, 5), ones())
