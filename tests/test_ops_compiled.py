"""The Triton kernels of ops besides attention compile for Hopper without spills: looked at without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel_ops import Invocation
from ejkernel_ops.execution.check import program
from ejkernel_ops.kernels import (
    LAYER_NORM,
    LAYER_NORM_BWD,
    LINEAR,
    LINEAR_BWD,
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_BWD,
    RMS_NORM,
    RMS_NORM_BWD,
    ROTARY,
    ROTARY_BWD,
)
from ejkernel_ops.kernels.linear_cross_entropy.loss import Loss, Sums

from .compiled import compiled, launches

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
pytestmark = pytest.mark.once

HOPPER_SHARED = 232448


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def norm_calls(forward, backward, features, residual=True, bias=True, dtype=jnp.bfloat16):
    """The forward and the backward call of a norm, on a GPU that need not be there."""
    x, statistic = like(4, 512, features, dtype=dtype), like(4, 512, 1, dtype=jnp.float32)
    operands = (x, like(features), like(features) if bias else None, x if residual else None)
    outs = (x, x if residual else None, statistic if forward is LAYER_NORM else None, statistic)
    needs = (True, True, bias, residual)
    cotangents = (x, x if residual else None, None, None)
    return (
        Invocation(forward, operands, {"epsilon": 1e-6}, platform="cuda"),
        Invocation(backward, (*operands, *outs, *cotangents), {"epsilon": 1e-6}, needs=needs, platform="cuda"),
    )


def loss_calls(loss, bias=False, reduce=True, dtype=jnp.bfloat16):
    """The forward and the backward call of a cross-entropy."""
    wide, rows, number = jnp.float32, 4096, like(4096, dtype=jnp.float32)
    weight = (256, 50304) if loss.weight_layout == "io" else (50304, 256)
    operands = (like(rows, 256, dtype=dtype), like(*weight, dtype=dtype), like(rows, dtype=jnp.int32))
    operands = (*operands, like(50304, dtype=dtype) if bias else None, number)
    statics = {"loss": loss, "reduce": reduce, "precision": None}
    gradients = tuple(None if x is None else like(*x.shape, dtype=wide) for x in (*operands[:2], operands[3]))
    residuals = ((Sums(*[number] * 4), number), gradients if reduce else (None,) * 3, like(dtype=jnp.bool_))
    out = like(dtype=wide) if reduce else number
    needs = (True, True, False, bias, False)
    return (
        Invocation(LINEAR_CROSS_ENTROPY, operands, statics, platform="cuda", residuals=True),
        Invocation(LINEAR_CROSS_ENTROPY_BWD, (*operands, out, residuals, out), statics, needs=needs, platform="cuda"),
    )


def linear_calls(activation, bias=True, dtype=jnp.bfloat16):
    """The forward and the backward call of a linear map."""
    x, out = like(4, 512, 768, dtype=dtype), like(4, 512, 3072, dtype=dtype)
    operands = (x, like(768, 3072, dtype=dtype), like(3072, dtype=dtype) if bias else None)
    statics = {"activation": activation, "weight_layout": "io", "out_dtype": jnp.dtype(dtype), "precision": None}
    needs = (True, True, bias)
    return (
        Invocation(LINEAR, operands, statics, platform="cuda"),
        Invocation(LINEAR_BWD, (*operands, out, out, out, None), statics, needs=needs, platform="cuda"),
    )


def assert_fit(inv, configs, most_spills=0):
    """Compiles the kernels of some configs, of which there is at least one, and looks at spills and shared memory."""
    for cfg in configs:
        assert inv.kernel.illegal(inv, cfg) is None, cfg
        found = launches(program(inv, cfg), *inv.operands)
        assert found, cfg
        for launch in found:
            made = compiled(launch)
            assert made.spills <= most_spills, f"{launch}: {made}"
            assert made.shared <= HOPPER_SHARED, f"{launch}: {made}"


@pytest.mark.parametrize("features", [768, 4096])
@pytest.mark.parametrize("kernels", [(RMS_NORM, RMS_NORM_BWD), (LAYER_NORM, LAYER_NORM_BWD)], ids=["rms", "layer"])
def test_what_norms_run_without_tuning_spills_nothing(kernels, features):
    for inv in norm_calls(*kernels, features):
        assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)])


@pytest.mark.parametrize("features", [64, 1000, 8192])
def test_norms_of_other_widths_and_types_compile(features):
    for inv in norm_calls(LAYER_NORM, LAYER_NORM_BWD, features, residual=False, dtype=jnp.float32):
        assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)])


@pytest.mark.parametrize(
    "loss",
    [Loss(), Loss(logits_dtype="bfloat16"), Loss(weight_layout="oi", soft_cap=30.0, z_loss=1e-4, label_smoothing=0.1)],
    ids=["plain", "low", "all"],
)
@pytest.mark.parametrize("reduce", [True, False], ids=["reduced", "rows"])
def test_the_cross_entropy_spills_nothing_and_with_all_options_next_to_nothing(loss, reduce):
    for inv in loss_calls(loss, bias=loss.soft_cap is not None, reduce=reduce):
        assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)], 16 if loss.soft_cap else 0)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("features", [128, 32])
def test_rotary_embedding_spills_nothing(features, interleaved):
    x, positions = like(4, 4096, 16, 128), like(1, 4096, dtype=jnp.int32)
    statics = {"theta": 1e4, "features": features, "interleaved": interleaved, "scaling": None}
    for inv in (
        Invocation(ROTARY, (x, positions), statics, platform="cuda"),
        Invocation(ROTARY_BWD, (x, positions, x, x), statics, needs=(True, False), platform="cuda"),
    ):
        assert_fit(inv, inv.kernel.triton_cfgs(inv))


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "silu", "relu", "squared_relu"])
def test_activations_spill_nothing(activation):
    for inv in linear_calls(activation, bias=activation != "silu"):
        assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)])


@pytest.mark.kernels
@pytest.mark.parametrize("features", [64, 768, 1000, 2048, 4096, 8192])
@pytest.mark.parametrize("kernels", [(RMS_NORM, RMS_NORM_BWD), (LAYER_NORM, LAYER_NORM_BWD)], ids=["rms", "layer"])
def test_every_candidate_of_norms_spills_nothing(kernels, features):
    for inv in norm_calls(*kernels, features):
        assert_fit(inv, inv.kernel.triton_cfgs(inv))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_every_candidate_of_linear_maps_and_of_the_cross_entropy_spills_nothing(dtype):
    for inv in (*linear_calls("gelu", dtype=dtype), *loss_calls(Loss(), bias=True, dtype=dtype)):
        assert_fit(inv, inv.kernel.triton_cfgs(inv))
