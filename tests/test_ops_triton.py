"""Norms and the cross-entropy on Triton: the real kernels, interpreted on a CPU, and on a GPU as they are."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ops
from ejkernel_ops import (
    BwdParams,
    ConfigError,
    FwdParams,
    LinearConfig,
    LinearCrossEntropyConfig,
    NormConfig,
    UnsupportedError,
    layer_norm,
    rms_norm,
)

from . import test_linear as linear
from . import test_linear_cross_entropy as cross_entropy
from . import test_norm as norm
from .reference import case_name, mostly_once, pairwise

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
ON_GPU = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if not ON_GPU:
        monkeypatch.setenv("EJKERNEL_OPS_INTERPRET", "1")
    with jax.default_matmul_precision("highest"):  # a GPU rounds the operands of float32 products otherwise
        yield


# Norms


def rows(fwd, bwd, span):
    """A config: rows of a tile in either direction, and rows of a program of the backward."""
    return NormConfig(
        backend="triton",
        fwd=FwdParams(blocksize_m=fwd, num_warps=4),
        bwd=BwdParams(blocksize_m=bwd, num_warps=4, blocksize_k=span),
    )


NORM_FACTORS = norm.FACTORS | {"chunks": ((1, 1, 8), (2, 4, 16), (8, 2, 2)), "features": (8, 7, 65, 3, 768)}


@pytest.mark.parametrize("case", mostly_once(pairwise(NORM_FACTORS)), ids=case_name)
def test_norms_and_their_gradients_err_no_more_than_a_plain_norm(case):
    seed, case = zlib.crc32(case_name(case).encode()), dict(case)
    op, epsilon, sizes = (case.pop(n) for n in ("op", "epsilon", "chunks"))
    norm.judge(op, [norm.inputs(**case, seed=seed + i) for i in range(4)], rows(*sizes), epsilon)


@pytest.mark.parametrize("op", [rms_norm, layer_norm], ids=lambda op: op.__name__)
def test_rows_of_equal_numbers_and_rows_far_from_zero_keep_their_digits(op):
    x = jnp.stack([jnp.full(48, 1 / 3), 1e4 + jnp.linspace(-1.0, 1.0, 48)])
    ours, plain = (op(x, config=config, epsilon=1e-6) for config in (rows(1, 1, 1), NormConfig(backend="xla")))
    np.testing.assert_allclose(ours, plain, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("op", [rms_norm, layer_norm], ids=lambda op: op.__name__)
def test_gradients_of_a_norm_are_the_same_bits_each_time_and_each_may_be_asked_alone(op):
    arrays, cotangents = norm.inputs((37,), 24)

    def gradient(names):
        def loss(some):
            out, summed = op(**arrays | some, config=rows(2, 2, 8))
            return (out * cotangents["dout"]).sum() + (summed * cotangents["dsummed"]).sum()

        return jax.jit(jax.grad(loss))({name: arrays[name] for name in names})

    whole, again = gradient(arrays), gradient(arrays)
    for name in arrays:
        np.testing.assert_array_equal(again[name], whole[name])
        np.testing.assert_allclose(gradient([name])[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (FwdParams(blocksize_m=3, num_warps=4), "powers of two"),
        (FwdParams(blocksize_m=1024, num_warps=1), "take fewer rows"),
    ],
)
def test_tiles_of_norms_that_cannot_be_are_errors_that_say_why(params, match):
    with pytest.raises(ConfigError, match=match):
        rms_norm(jnp.ones((4, 64)), config=NormConfig(backend="triton", fwd=params))


# Activations of linear maps


def activated(fwd, bwd, span):
    """A config: tiles in either direction, and rows of a program of the backward."""
    return LinearConfig(
        backend="triton",
        fwd=FwdParams(blocksize_m=fwd[0], blocksize_n=fwd[1], num_warps=4),
        bwd=BwdParams(blocksize_m=bwd[0], blocksize_n=bwd[1], num_warps=4, blocksize_k=span),
    )


LINEAR_FACTORS = linear.FACTORS | {
    "activation": ("gelu", "gelu_exact", "silu", "relu", "squared_relu"),
    "chunks": (((2, 8), (1, 16), 4), ((16, 2), (8, 4), 8)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(LINEAR_FACTORS)), ids=case_name)
def test_activated_products_and_their_gradients_err_no_more_than_plain_ones(case):
    seed = zlib.crc32(case_name(case).encode())
    arrays, rng = linear.inputs(case["rows"], case["features"], case["bias"], case["layout"], case["dtype"], seed)
    options = {"activation": case["activation"], "weight_layout": case["layout"]}
    linear.judge(arrays, rng, activated(*case["chunks"]), preferred_element_type=case["preferred"], **options)


def test_without_an_activation_there_is_nothing_for_triton():
    with pytest.raises(UnsupportedError, match="without an activation"):
        ops.linear(jnp.ones((4, 8)), jnp.ones((8, 8)), config=activated((2, 8), (2, 8), 4))


# The cross-entropy


def chunks(recompute, size=4, block=16):
    sizes = {"blocksize_m": size, "blocksize_n": block, "num_warps": 4}
    return LinearCrossEntropyConfig(
        backend="triton", recompute=recompute, fwd=FwdParams(**sizes), bwd=BwdParams(**sizes)
    )


LOSS_FACTORS = cross_entropy.FACTORS | {
    "vocab": (37, 64, 2),
    "rows": ((5,), (2, 3), (23,)),
    "chunks": ("made", "again"),
    "block": (16, 32, 64),
    "size": (4, 64),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(LOSS_FACTORS)), ids=case_name)
def test_losses_and_their_gradients_err_no_more_than_a_plain_computation(case):
    recompute = case["chunks"] == "again" or case["reduction"] == "none"
    cross_entropy.judge(case, chunks(recompute, case["size"], case["block"]))
