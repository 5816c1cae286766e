"""`mlp`: its numbers, what it keeps, and each rule of its documentation as a test."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import BwdParams, FwdParams, MlpConfig, UnsupportedError, gated_linear, linear, mlp

from .reference import assert_as_good_as_plain, case_name, mostly_once, pairwise
from .reference import mlp as reference


@functools.partial(jax.jit, static_argnames="statics")
def run(arrays, dout, statics):
    """Output and the gradient of every array."""
    out, pull = jax.vjp(lambda arrays: mlp(**arrays, **dict(statics)), arrays)
    return {"out": out, **pull(dout)[0]}


def chunks(fwd, bwd):
    return MlpConfig(backend="xla", fwd=FwdParams(blocksize_m=fwd), bwd=BwdParams(blocksize_m=bwd))


def _drawn(rng, size):
    """Of variance 1 and bounded: of products of several normal numbers the largest are most of the error."""
    return rng.uniform(-1, 1, size) * 3**0.5


def inputs(rows=(6,), features=(8, 5, 4), gated=False, bias=True, layout="io", dtype=np.float32, seed=0):
    """Random arrays, and a random generator for the rest."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    into, hidden, out = features
    sizes = {"up_weight": (into, hidden), **({"gate_weight": (into, hidden)} if gated else {})}
    sizes["down_weight"] = (hidden, out)
    arrays = {"x": _drawn(rng, (*rows, into))}
    arrays |= {n: _drawn(rng, size) / max(1, size[0]) ** 0.5 for n, size in sizes.items()}
    arrays = {n: a.T if layout == "oi" and n.endswith("weight") else a for n, a in arrays.items()}
    if bias:
        arrays |= {n.replace("weight", "bias"): _drawn(rng, size[1]) for n, size in sizes.items()}
    return {n: a.astype(dtype) for n, a in arrays.items()}, rng


def judge(case, config=None):
    """Checks output and gradients of a case of the table against the reference."""
    seed, results = zlib.crc32(case_name(case).encode()), []
    options = {"activation": case["activation"], "weight_layout": case["layout"]}
    for repeat in range(24):  # errors of a few numbers compare badly
        arrays, rng = inputs(
            *(case[n] for n in ("rows", "features", "gated", "bias", "layout", "dtype")), seed + repeat
        )
        results.append(compared(arrays, rng, config, **options))
    stacked = [{n: np.stack([r[n] for r in column]) for n in column[0]} for column in zip(*results)]
    assert_as_good_as_plain(*stacked, jnp.dtype(case["dtype"]))


def compared(arrays, rng, config=None, **options):
    """Output and gradients; the exact ones; those of a plain program."""
    common = np.result_type(*(a.dtype for n, a in arrays.items() if not n.endswith("bias")))
    out_features = arrays["down_weight"].shape[0 if options.get("weight_layout") == "oi" else 1]
    dout = _drawn(rng, (*arrays["x"].shape[:-1], out_features)).astype(common)
    got = run(arrays, dout, (("config", config), *sorted(options.items())))
    assert got["out"].dtype == common
    assert all(got[n].dtype == a.dtype and got[n].shape == a.shape for n, a in arrays.items())
    return got, *(reference(arrays, dout=dout, **options, plain=p) for p in (False, True))


FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "rows": ((), (1,), (2, 3), (63,)),
    "features": ((8, 16, 8), (7, 5, 3), (4, 12, 6)),
    "gated": (False, True),
    "activation": ("gelu", "gelu_exact", "silu", "relu"),
    "bias": (True, False),
    "layout": ("io", "oi"),
    "chunks": (None, (16, 5), (5, 64), (1, 16)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(FACTORS)), ids=case_name)
def test_output_and_gradients_err_no_more_than_two_plain_layers(case):
    judge(case, chunks(*case["chunks"]) if case["chunks"] else None)


def test_squares_are_those_of_layers():
    """Their errors are those of their largest number, which the table above cannot judge."""
    arrays, rng = inputs((40,), gated=True)
    got, exact, _ = compared(arrays, rng, activation="squared_relu")
    for name, x in got.items():
        np.testing.assert_allclose(x, exact[name].astype(np.float32), rtol=2e-5, atol=2e-5, err_msg=name)


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        arrays, rng = inputs(dtype=np.float64, gated=True)
        assert_as_good_as_plain(*compared(arrays, rng, chunks(4, 4), activation="silu"), np.float64)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_second_derivatives_are_those_of_two_layers(gated):
    arrays, _ = inputs(gated=gated)

    def layers(x, arrays=arrays):
        bias = {n: arrays[n] for n in ("gate_bias", "up_bias") if n in arrays}
        if gated:
            hidden = gated_linear(x, arrays["gate_weight"], arrays["up_weight"], activation="gelu", **bias)
        else:
            hidden = linear(x, arrays["up_weight"], arrays["up_bias"], activation="gelu")
        return linear(hidden, arrays["down_weight"], arrays["down_bias"])

    def curvature(fn):
        inner = jax.grad(lambda x: (fn(x) ** 2).sum())
        return jax.jit(jax.grad(lambda x: (inner(x) ** 2).sum()))(arrays["x"])

    ours = curvature(lambda x: mlp(**arrays | {"x": x}, activation="gelu"))
    np.testing.assert_allclose(ours, curvature(layers), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_gradient_alone_is_that_among_all(gated):
    arrays, rng = inputs(gated=gated)
    dout = rng.normal(size=(6, 4)).astype(np.float32)
    together = run(arrays, dout, ())

    @jax.jit
    def alone(arrays):
        return {n: jax.vjp(lambda a: mlp(**(arrays | {n: a})), arrays[n])[1](dout)[0] for n in arrays}  # noqa: B023

    for name, x in alone(arrays).items():
        np.testing.assert_allclose(x, together[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_for_the_gradient_products_are_kept_and_nothing_else_of_their_size(gated):
    arrays, _ = inputs((64,), (8, 32, 8), gated=gated)
    _, pull = jax.vjp(lambda x: mlp(**arrays | {"x": x}), arrays["x"])
    kept = [x for x in jax.tree.leaves(pull) if getattr(x, "shape", ())[-1:] == (32,) and x.ndim == 2 and len(x) == 64]
    assert len(kept) == (2 if gated else 1)


def test_mixed_types_give_their_common_type_and_gradients_of_their_own():
    arrays, rng = inputs()
    arrays["x"] = arrays["x"].astype(jnp.bfloat16)
    assert_as_good_as_plain(*compared(arrays, rng, activation="gelu"), jnp.bfloat16)


def test_no_rows_give_no_rows_and_zero_gradients():
    arrays, _ = inputs((2, 0))
    got = run(arrays, np.zeros((2, 0, 4), np.float32), ())
    assert got["out"].shape == (2, 0, 4)
    assert not any(np.any(got[n]) for n in arrays if n != "x")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": np.ones((6, 5), np.float32)}, "x has 5 features and up_weight takes 8.*pass weight_layout='oi'"),
        ({"up_weight": np.ones(8, np.float32)}, "up_weight has shape .*two axes"),
        ({"gate_weight": np.ones((8, 6), np.float32)}, "gate_weight has shape .*expected that of up_weight"),
        ({"down_weight": np.ones((6, 4), np.float32)}, "down_weight takes 6 features and up_weight makes 5"),
        ({"up_bias": np.ones(4, np.float32)}, r"up_bias has shape \(4,\); expected \(5,\)"),
        ({"down_bias": np.ones(5, np.float32)}, r"down_bias has shape \(5,\); expected \(4,\)"),
        ({"gate_bias": np.ones(5, np.float32)}, "gate_bias is given without gate_weight"),
        ({"activation": "tanh"}, "activation is 'tanh'; expected one of gelu"),
        ({"weight_layout": "hwio"}, "weight_layout is 'hwio'"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(change, match):
    arrays, _ = inputs()
    with pytest.raises(ValueError, match=match):
        mlp(**arrays | change)


def test_integers_are_refused():
    arrays, _ = inputs()
    with pytest.raises(TypeError, match="down_bias is int"):
        mlp(**arrays | {"down_bias": np.ones(4, int)})


def test_a_back_end_that_there_is_not_is_refused():
    arrays, _ = inputs()
    with pytest.raises(UnsupportedError, match="cudnn"):
        mlp(**arrays, backend="cudnn")
