"""Ops besides attention on Triton: the real kernels, interpreted on a CPU, and on a GPU as they are."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import ejkernel_ops as ops
from ejkernel_ops import (
    BwdParams,
    ConfigError,
    FwdParams,
    GatedLinearConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    MlpConfig,
    NormConfig,
    RotaryConfig,
    UnsupportedError,
    layer_norm,
    rms_norm,
)
from ejkernel_ops.triton_target import TARGETS

from . import test_gated_linear as gated_linear
from . import test_linear as linear
from . import test_linear_cross_entropy as cross_entropy
from . import test_mlp as mlp
from . import test_norm as norm
from . import test_rotary as rotary
from .reference import case_name, mostly_once, pairwise

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
ON_GPU = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else [pytest.mark.once]


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


@pytest.mark.parametrize("op", [rms_norm, layer_norm], ids=lambda op: op.__name__)
def test_a_norm_of_which_the_sum_alone_is_used_has_the_gradients_of_the_sum(op):
    arrays, cotangents = norm.inputs((5,), 8)

    def loss(arrays):
        return (op(**arrays, config=rows(2, 2, 4))[1] * cotangents["dsummed"]).sum()

    found = jax.grad(loss)(arrays)
    for name in ("x", "residual"):
        np.testing.assert_allclose(found[name], cotangents["dsummed"], rtol=1e-6)
    assert not found["scale"].any()


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (FwdParams(blocksize_m=3, num_warps=4), "powers of two"),
        (FwdParams(blocksize_m=1024, num_warps=1), "take fewer, or more warps"),
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


@pytest.mark.parametrize("activation", LINEAR_FACTORS["activation"])
def test_activations_of_extreme_numbers_are_those_of_xla(activation):
    x = jnp.array([[jnp.nan], [jnp.inf], [-jnp.inf], [1e30], [-1e30], [100.0], [-100.0], [0.0]])

    def run(config):
        out, pull = jax.vjp(lambda x: ops.linear(x, jnp.ones((1, 2)), activation=activation, config=config), x)
        return out, pull(jnp.ones_like(out))[0]

    for ours, plain in zip(run(activated((2, 2), (2, 2), 4)), run(LinearConfig(backend="xla"))):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


@pytest.mark.parametrize("config", [activated((2, 2), (2, 2), 4), LinearConfig(backend="xla")], ids=["triton", "xla"])
def test_the_range_of_a_product_in_float16_is_that_of_its_sum_with_the_bias(config):
    """The product is 80000, beyond float16; with its bias it is 50000, where GELU is the number itself."""
    x, weight, bias = (jnp.full(s, v, jnp.float16) for s, v in (((2, 8), 100.0), ((8, 2), 100.0), (2, -30000.0)))
    out, pull = jax.vjp(lambda x: ops.linear(x, weight, bias, activation="gelu", config=config), x)
    np.testing.assert_array_equal(out, np.full((2, 2), 50000, np.float16))
    np.testing.assert_array_equal(pull(jnp.ones_like(out))[0], np.full((2, 8), 200, np.float16))


def test_without_an_activation_there_is_nothing_for_triton():
    with pytest.raises(UnsupportedError, match="without an activation"):
        ops.linear(jnp.ones((4, 8)), jnp.ones((8, 8)), config=activated((2, 8), (2, 8), 4))


# Gated linear maps


def gated(fwd, bwd, span, recompute=False):
    """A config: tiles in either direction, and rows of a program of the backward."""
    tiles = activated(fwd, bwd, span)
    return GatedLinearConfig(backend="triton", fwd=tiles.fwd, bwd=tiles.bwd, recompute=recompute)


GATED_FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "rows": ((), (1,), (2, 3), (37,)),
    "features": ((8, 5), (16, 24)),
    "activation": ("silu", "gelu", "gelu_exact", "relu", "squared_relu"),
    "bias": (False, True),
    "layout": ("io", "oi"),
    "chunks": (((2, 8), (1, 16), 4), ((16, 2), (8, 4), 8)),
    "recompute": (False, True),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(GATED_FACTORS)), ids=case_name)
def test_gated_products_and_their_gradients_err_no_more_than_plain_ones(case):
    seed = zlib.crc32(case_name(case).encode())
    arrays, rng = gated_linear.inputs(
        case["rows"], case["features"], case["bias"], case["layout"], False, case["dtype"], seed
    )
    options = {"activation": case["activation"], "weight_layout": case["layout"]}
    gated_linear.judge(arrays, rng, gated(*case["chunks"], case["recompute"]), **options)


def test_both_weights_in_one_are_not_for_triton():
    with pytest.raises(UnsupportedError, match="takes two weights"):
        ops.gated_linear(jnp.ones((4, 8)), jnp.ones((8, 8)), config=gated((2, 8), (2, 8), 4))


# MLPs


def between(fwd, bwd, span):
    """A config: tiles in either direction, and rows of a program of the backward."""
    tiles = activated(fwd, bwd, span)
    return MlpConfig(backend="triton", fwd=tiles.fwd, bwd=tiles.bwd)


MLP_FACTORS = mlp.FACTORS | {
    "activation": ("gelu", "gelu_exact", "silu", "relu"),
    "chunks": (((2, 8), (1, 16), 4), ((16, 2), (8, 4), 8)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(MLP_FACTORS)), ids=case_name)
def test_mlps_and_their_gradients_err_no_more_than_two_plain_layers(case):
    mlp.judge(case, between(*case["chunks"]))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_gradient_of_an_mlp_may_be_asked_alone(gated):
    arrays, _ = mlp.inputs(gated=gated)

    def gradient(names):
        def loss(some):
            return (ops.mlp(**arrays | some, config=between((2, 8), (2, 8), 4)) ** 2).sum()

        return jax.jit(jax.grad(loss))({name: arrays[name] for name in names})

    whole = gradient(arrays)
    for name in arrays:
        np.testing.assert_allclose(gradient([name])[name], whole[name], rtol=1e-5, atol=1e-5, err_msg=name)


# Rotary embedding


def turns(fwd, bwd):
    """A config: heads of a program in either direction."""
    return RotaryConfig(
        backend="triton", fwd=FwdParams(blocksize_m=fwd, num_warps=4), bwd=BwdParams(blocksize_m=bwd, num_warps=4)
    )


ROTARY_FACTORS = rotary.FACTORS | {
    "shape": ((2, 33, 3, 16), (1, 65, 1, 8), (3, 1, 2, 24)),
    "fraction": (1.0, 0.5, 0.25),
    "chunks": ((16, 4), (1, 64)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(ROTARY_FACTORS)), ids=case_name)
def test_turned_heads_and_their_gradients_err_no_more_than_plain_ones(case):
    x = rotary.normal(*case["shape"], seed=zlib.crc32(case_name(case).encode()), dtype=case["dtype"])
    features = round(case["shape"][-1] * case["fraction"])
    scaling = None if case["scaling"] == "ntk" and features == 2 else rotary.SCALINGS.get(case["scaling"])
    options = {name: case[name] for name in ("fraction", "interleaved", "theta")}
    positions = rotary.POSITIONS[case["positions"]](*case["shape"][:2])
    rotary.judge(x, positions, turns(*case["chunks"]), scaling=scaling, **options)


def test_heads_of_float64_are_not_turned_on_triton():
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="x is float64"):
        ops.rotary_embedding(jnp.ones((1, 2, 1, 4)), jnp.arange(2), config=turns(1, 1))


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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("names", [["hidden"], ["weight"], ["bias"], ["hidden", "bias"]], ids="-".join)
def test_gradients_of_a_loss_may_be_asked_alone(names, recompute):
    arrays, labels, _ = cross_entropy.inputs((5,), 8, 40, weighted=False)

    def gradient(names):
        config = chunks(recompute)
        run = jax.jit(jax.grad(lambda some: ops.linear_cross_entropy(**arrays | some, labels=labels, config=config)))
        return run({name: arrays[name] for name in names})

    whole, some = gradient(["hidden", "weight", "bias"]), gradient(names)
    for name in names:
        np.testing.assert_allclose(some[name], whole[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("soft_cap", [1.0, 30.0, 1e6])
def test_a_soft_cap_keeps_the_digits_of_logits(soft_cap):
    arrays, labels, _ = cross_entropy.inputs((5,), 8, 40, weighted=False)
    options = {"labels": labels, "logits_soft_cap": soft_cap}
    ours, plain = (
        ops.linear_cross_entropy(**arrays, **options, config=config)
        for config in (chunks(False), LinearCrossEntropyConfig(backend="xla"))
    )
    np.testing.assert_allclose(ours, plain, rtol=2e-6)


def test_in_float16_gradients_wait_for_the_scale_of_the_loss():
    """Of 512 tokens and 1024 entries they are about 2e-6, and float16 ends at 6e-8."""
    rng = np.random.default_rng(0)
    hidden, weight = (rng.normal(size=s).astype(np.float16) / 4 for s in ((512, 16), (16, 1024)))
    labels = rng.integers(0, 1024, 512)

    def gradient(dtype, scale):
        def loss(hidden):
            return scale * ops.linear_cross_entropy(hidden, weight.astype(dtype), labels)

        return np.asarray(jax.grad(loss)(hidden.astype(dtype)), np.float64) / scale

    exact, scaled = gradient(np.float32, 1.0), gradient(np.float16, 1024.0)
    assert np.linalg.norm(scaled - exact) < 2e-3 * np.linalg.norm(exact)


# Meshes


def on_a_gpu(call, *arrays, mesh=None, spec=None):
    """The program of a call for a GPU that need not be there, in a mesh or not."""
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    if mesh is None:
        return jax.jit(call).trace(*like).lower(lowering_platforms=("cuda",)).as_text()
    if spec is not None:
        part = jax.shard_map(call, in_specs=spec, out_specs=spec)
        call = part if mesh.axis_types[0] == AxisType.Auto else lambda x: part(jax.sharding.reshard(x, spec))
    else:
        like = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, jax.P("data"))) for a in arrays]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(call).trace(*like).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_a_mesh_each_device_runs_triton_on_its_part(kind):
    """Under Auto axes XLA asks when it compiles; a call that is mapped, or whose types say how, has the kernel now."""
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(kind,))
    x = jnp.ones((8, 32))
    split = "CustomSPMDPartitioning" if kind == AxisType.Auto else "triton_kernel"
    assert split in on_a_gpu(rms_norm, x, mesh=mesh)
    assert "triton_kernel" in on_a_gpu(rms_norm, x, mesh=mesh, spec=jax.P("data"))


@pytest.mark.cpu
def test_a_program_of_one_device_is_tritons_however_many_there_are():
    assert jax.device_count() > 1
    assert "triton_kernel" in on_a_gpu(layer_norm, jnp.ones((8, 32)))


@pytest.mark.cpu
def test_what_xla_shares_out_alone_is_xlas():
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = jax.export.export(jax.jit(rms_norm), platforms=["cuda"], disabled_checks=checks)
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    assert "triton_kernel" in exported(x).mlir_module()
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, jax.P("data")))
    assert "triton_kernel" not in exported(split).mlir_module()


# What has no kernel


DERIVATIVES = {
    "forward": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "second": lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()),
}
MAPS = {
    "rms_norm": lambda x: rms_norm(x, jnp.ones(32), backend="triton"),
    "linear": lambda x: ops.linear(x, jnp.ones((32, 16)), activation="gelu", backend="triton"),
    "gated_linear": lambda x: ops.gated_linear(x, jnp.ones((32, 16)), jnp.ones((32, 16)), backend="triton"),
    "rotary_embedding": lambda x: ops.rotary_embedding(x[None, :, None], jnp.arange(8), backend="triton"),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(
        x, jnp.ones((32, 64)), jnp.zeros(8, jnp.int32), backend="triton"
    ),
}


@pytest.mark.parametrize("order", DERIVATIVES)
@pytest.mark.parametrize("name", MAPS)
def test_derivatives_that_kernels_do_not_have_are_refused_with_what_to_do(name, order):
    f = DERIVATIVES[order](lambda x: MAPS[name](x).sum())
    with pytest.raises(ops.UnsupportedError, match=rf"{name}\w*@v1 runs on the 'triton' .* pass backend='xla'"):
        jax.jit(f)(jnp.ones((8, 32)))
