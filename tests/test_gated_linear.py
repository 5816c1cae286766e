"""`gated_linear` on XLA: its numbers, and each rule of its documentation as a test."""

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
    GatedLinearConfig,
    UnsupportedError,
    autotune_lowered,
    gated_linear,
)

from .reference import assert_as_good_as_plain, case_name, mostly_once, pairwise
from .reference import gated_linear as reference


@functools.partial(jax.jit, static_argnames="statics")
def run(arrays, dout, statics):
    """Output and the gradient of every array."""
    out, pull = jax.vjp(lambda arrays: gated_linear(**arrays, **dict(statics)), arrays)
    return {"out": out, **pull(dout)[0]}


def chunks(fwd, bwd, recompute=False):
    return GatedLinearConfig(fwd=FwdParams(blocksize_m=fwd), bwd=BwdParams(blocksize_m=bwd), recompute=recompute)


def inputs(rows=(6,), features=(8, 5), bias=True, layout="io", fused=False, dtype=np.float32, seed=0):
    """Random arrays, and a random generator for the rest."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    weights = [rng.normal(size=features) / max(1, features[0]) ** 0.5 for _ in range(2)]
    pair = {"gate_weight": np.concatenate(weights, 1)} if fused else dict(zip(("gate_weight", "up_weight"), weights))
    biases = {n: rng.normal(size=features[1]) for n in ("gate_bias", "up_bias") if bias}
    arrays = {"x": rng.normal(size=(*rows, features[0])), **pair, **biases}
    arrays = {n: a.T if layout == "oi" and n.endswith("weight") else a for n, a in arrays.items()}
    return {n: a.astype(dtype) for n, a in arrays.items()}, rng


def judge(arrays, rng, config=None, repeats=8, **options):
    """Checks output and gradients against the reference; returns them.

    Rows are drawn a few times more for the same program: errors of a few numbers compare badly.
    """
    x, common = arrays["x"], np.result_type(*(a.dtype for n, a in arrays.items() if not n.endswith("bias")))
    features = arrays["up_weight" if "up_weight" in arrays else "gate_weight"].shape[
        0 if options.get("weight_layout") == "oi" else 1
    ] // (1 if "up_weight" in arrays else 2)
    results = []
    for _ in range(repeats):
        arrays = arrays | {"x": rng.normal(size=x.shape).astype(x.dtype)}
        dout = rng.normal(size=(*x.shape[:-1], features)).astype(common)
        got = run(arrays, dout, (("config", config), *sorted(options.items())))
        results.append((got, *(reference(arrays, dout=dout, **options, plain=p) for p in (False, True))))
    stacked = [{n: np.stack([r[n] for r in column]) for n in got} for column in zip(*results)]
    assert_as_good_as_plain(*stacked, common)
    assert got["out"].dtype == common
    assert all(got[n].dtype == a.dtype and got[n].shape == a.shape for n, a in arrays.items())
    return got


FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "rows": ((), (1,), (2, 3), (63,)),
    "features": ((8, 16), (7, 5), (1, 3)),
    "activation": ("silu", "gelu", "gelu_exact", "relu", "squared_relu"),
    "bias": (True, False),
    "layout": ("io", "oi"),
    "fused": (False, True),
    "chunks": (None, (16, 5, False), (5, 64, True), (1, 16, True)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(FACTORS)), ids=case_name)
def test_output_and_gradients_err_no_more_than_plain_products(case):
    seed = zlib.crc32(case_name(case).encode())
    arrays, rng = inputs(*(case[n] for n in ("rows", "features", "bias", "layout", "fused", "dtype")), seed)
    config = chunks(*case["chunks"]) if case["chunks"] else None
    judge(arrays, rng, config, activation=case["activation"], weight_layout=case["layout"])


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        for recompute in (False, True):
            judge(*inputs(dtype=np.float64), chunks(4, 4, recompute))


def test_mixed_types_give_their_common_type_and_gradients_of_their_own():
    arrays, rng = inputs()
    arrays["x"] = arrays["x"].astype(jnp.bfloat16)
    assert judge(arrays, rng)["out"].dtype == np.float32


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_and_recomputed_products_change_nothing(fused):
    arrays, rng = inputs((7, 3), fused=fused)
    dout = rng.normal(size=(7, 3, 5)).astype(np.float32)
    one, *others = (run(arrays, dout, (("config", c),)) for c in (None, chunks(4, 5), chunks(4, 5, True)))
    for other in others:
        for name, x in one.items():
            np.testing.assert_allclose(other[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


def test_one_weight_or_two_are_the_same():
    two, rng = inputs()
    one = {"x": two["x"], "gate_weight": np.concatenate([two["gate_weight"], two["up_weight"]], 1)}
    one["gate_bias"] = np.concatenate([two["gate_bias"], two["up_bias"]])
    dout = rng.normal(size=(6, 5)).astype(np.float32)
    got, want = run(one, dout, ()), run(two, dout, ())
    for name, parts in (("gate_weight", ("gate_weight", "up_weight")), ("gate_bias", ("gate_bias", "up_bias"))):
        np.testing.assert_allclose(got[name], np.concatenate([want[n] for n in parts], -1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x"], want["x"], rtol=1e-5, atol=1e-6)


def test_products_that_are_computed_again_are_not_held():
    """A step of six layers needs as little memory as with `jax.checkpoint` around the plain expression."""

    def temporary(fn):
        def loss(x, weights):
            for gate, up, down in weights:
                x = x + fn(x, gate, up) @ down
            return x.sum()

        def weight(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        weights = [(weight(32, 1024), weight(32, 1024), weight(1024, 32))] * 6
        lowered = jax.jit(jax.grad(loss, 1)).lower(weight(4096, 32), weights)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    saved, again = (
        temporary(functools.partial(gated_linear, config=GatedLinearConfig(recompute=r))) for r in (False, True)
    )
    assert again < 0.9 * saved
    assert again < 1.02 * temporary(jax.checkpoint(plain))


def test_no_rows_give_no_rows_and_zero_gradients():
    arrays, _ = inputs((2, 0))
    got = run(arrays, np.zeros((2, 0, 5), np.float32), ())
    assert got["out"].shape == (2, 0, 5)
    assert got["x"].shape == (2, 0, 8)
    assert not np.any(got["gate_weight"])
    assert not np.any(got["up_bias"])


def test_the_gradient_of_one_array_alone_is_that_among_all():
    arrays, rng = inputs()
    dout = rng.normal(size=(6, 5)).astype(np.float32)

    def alone(arrays, name):
        apply = functools.partial(gated_linear, config=chunks(4, 4))
        return jax.vjp(lambda a: apply(**(arrays | {name: a})), arrays[name])[1](dout)[0]

    together = run(arrays, dout, ())
    for name, x in jax.jit(lambda arrays: {n: alone(arrays, n) for n in arrays})(arrays).items():
        np.testing.assert_allclose(x, together[name], rtol=1e-5, atol=1e-6, err_msg=name)


def plain(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def gradients(fn):
    return jax.grad(lambda *a: jnp.sum(fn(*a) ** 2), argnums=(0, 1, 2))


def scanned(fn):
    return lambda x, *w: jax.lax.scan(lambda c, _: (jax.checkpoint(fn)(c, *w), None), x, None, length=2)[0]


TRANSFORMS = {
    "grad": gradients,
    "grad(vmap), shared weights": lambda f: gradients(jax.vmap(f, (0, None, None))),
    "vmap(grad)": lambda f: jax.vmap(gradients(f), (0, None, None)),
    "vmap(grad), own weights": lambda f: (
        lambda x, g, u: jax.vmap(gradients(f))(x, jnp.stack([g, 2 * g]), jnp.stack([u, -u]))
    ),
    "grad(scan(remat))": lambda f: gradients(scanned(f)),
    "grad(grad)": lambda f: gradients(lambda *a: gradients(f)(*a)[1]),
    "grad(grad) of one weight": lambda f: jax.grad(
        lambda x, g, u: (jax.grad(lambda u: (f(x, g, u) ** 2).sum())(u) ** 2).sum(), 1
    ),
    "jvp": lambda f: lambda x, g, u: jax.jvp(f, (x, g, u), (jnp.cos(x), jnp.sin(g), u)),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_it_are_those_of_the_plain_expression(name, recompute):
    arrays, _ = inputs((2, 3), (4, 4), bias=False)
    ours = functools.partial(gated_linear, config=chunks(2, 2, recompute))
    got, want = (jax.jit(TRANSFORMS[name](fn))(*arrays.values()) for fn in (ours, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_both_directions_are_tuned():
    lowered = jax.jit(gradients(gated_linear)).lower(*inputs((300,), bias=False)[0].values())
    result = autotune_lowered(ConfigSelectorChain(tuner=Autotuner(num_iters=1)), lowered, strict=True)
    assert [e.op_id_v for e in result.entries] == ["gated_linear@v1", "gated_linear_bwd@v1"]
    assert all(t.status == "timed" for e in result.entries for t in e.trials)
    assert {t.cfg.recompute for t in result.entries[1].trials} == {False, True}


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


BAD = [  # argument, value, type of the error, what its message must say besides the argument's name
    ("x", ones(), ValueError, ["()", "(..., in)"]),
    ("x", ones(4, 5), ValueError, ["5 features", "takes 3", "'io'", "weight_layout='oi'"]),
    ("x", ones(4, 3, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("x", None, TypeError, ["NoneType", "array"]),
    ("gate_weight", ones(3), ValueError, ["(3,)", "two axes"]),
    ("up_weight", ones(3, 4), ValueError, ["(3, 4)", "(3, 5)"]),
    ("up_weight", None, ValueError, ["(3, 5)", "even", "5"]),
    ("gate_bias", ones(3), ValueError, ["(3,)", "(5,)"]),
    ("gate_bias", ones(10), ValueError, ["(10,)", "(5,)"]),
    ("up_bias", ones(5, dtype=bool), TypeError, ["bool", "float"]),
    ("activation", None, ValueError, ["None", "silu", "squared_relu"]),
    ("weight_layout", "in out", ValueError, ["'in out'", "'io'", "'oi'"]),
    ("precision", 3, ValueError, ["3", "highest"]),
    ("config", {"blocksize_m": 4}, ConfigError, ["blocksize_m", "GatedLinearConfig"]),
    ("backend", "cudnn", UnsupportedError, ["'cudnn'", "xla"]),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), BAD, ids=[f"{n}-{e.__name__}-{i}" for i, (n, _, e, _) in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name_with_what_came_and_what_was_expected(name, value, error, words):
    arrays = {"x": ones(4, 3), "gate_weight": ones(3, 5), "up_weight": ones(3, 5)}
    options = {}
    (arrays if name in arrays or isinstance(value, jax.ShapeDtypeStruct) else options)[name] = value
    shown = "gate_weight" if name == "up_weight" and value is None else name
    with pytest.raises(error) as caught:
        jax.jit(lambda arrays: gated_linear(**arrays, **options)).lower(arrays)
    assert all(word in str(caught.value) for word in [shown, *words]), str(caught.value)


def test_whether_products_are_computed_again_is_true_or_false():
    with pytest.raises(ConfigError, match="recompute is 'yes'; expected None, True or False"):
        GatedLinearConfig(recompute="yes")
