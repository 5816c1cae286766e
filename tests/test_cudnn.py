"""cuDNN attention: what is eligible, what JAX is given, and all that is put in order around cuDNN."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import flash_attention
from ejkernel_ops.environment import child_environment
from ejkernel_ops.kernels.attention import cudnn
from ejkernel_ops.kernels.attention.xla import Statics

HOPPER, AMPERE, BLACKWELL = ((9, 0), 91200), ((8, 0), 91200), ((10, 0), 91800)


def statics(**options):
    """Static arguments of a plain call, but for some."""
    plain = {
        "causal": False, "sliding_window": None, "static_offset": 0, "softmax_scale": 0.125, "logits_soft_cap": None,
        "dropout_rate": 0.0, "precision": None,
    }  # fmt: skip
    return Statics(**{**plain, **options})


def like(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(q_len=64, kv_len=64, head_dim=64, v_dim=None, dtype=jnp.bfloat16, heads=4, kv_heads=2, **others):
    """Abstract operands of a call by name."""
    return {
        "query": like((2, q_len, heads, head_dim), dtype),
        "key": like((2, kv_len, kv_heads, head_dim), dtype),
        "value": like((2, kv_len, kv_heads, v_dim or head_dim), dtype),
        **dict.fromkeys(("bias", "mask", "q_offset", "q_segment_ids", "kv_segment_ids", "kv_lengths", "sinks", "dlse")),
        **others,
    }


BIAS, MASK = like((1, 4, 64, 64)), like((2, 1, 64, 64), jnp.bool_)
ELIGIBLE = [
    ({}, {}),
    ({"dtype": jnp.float16}, {"causal": True}),
    ({"q_len": 63, "kv_len": 77}, {"causal": True}),
    ({"q_len": 77, "kv_len": 63}, {"causal": True}),
    ({"head_dim": 72}, {"softmax_scale": 3.0}),
    ({"head_dim": 256}, {"precision": "highest"}),
    ({"mask": MASK, "kv_lengths": like((2,), jnp.int32)}, {"causal": True}),
    ({}, {"causal": True, "sliding_window": (5, 0)}),
    ({"mask": MASK}, {"sliding_window": (0, 0)}),
    ({}, {"sliding_window": (1 << 30, 1 << 30), "static_offset": 7}),
    ({"q_len": 1}, {"causal": True, "static_offset": 63}),
    ({"q_len": 1}, {"causal": True, "sliding_window": (63, 0), "static_offset": 63}),
    ({"q_len": 8}, {"sliding_window": (63, 55), "static_offset": 8}),
]


@pytest.mark.parametrize(("arrays", "options"), ELIGIBLE)
@pytest.mark.parametrize("backward", [False, True])
def test_what_cudnn_can_do_is_eligible(monkeypatch, arrays, options, backward):
    monkeypatch.setattr(cudnn, "_machine", lambda: HOPPER)
    assert cudnn.unsupported(operands(**arrays), statics(**options), backward=backward) is None


LIMITS = [
    ({"dtype": jnp.float32}, {}, "bfloat16 and float16"),
    ({"head_dim": 60}, {}, "multiple of 8"),
    ({"head_dim": 264}, {}, "at most 256"),
    ({"v_dim": 128}, {}, "one head_dim"),
    ({"bias": BIAS}, {}, "great size"),
    ({"kv_len": 0}, {}, "empty"),
    ({}, {"logits_soft_cap": 30.0}, "soft cap"),
    ({}, {"dropout_rate": 0.1}, "dropout"),
    ({}, {"softmax_scale": 0.0}, "softmax_scale is 0.0"),
    ({"sinks": like((4,))}, {}, "sinks"),
    ({"q_segment_ids": like((2, 64), jnp.int32), "kv_segment_ids": like((2, 64), jnp.int32)}, {}, "segment ids"),
    ({"q_offset": like((2,), jnp.int32)}, {"causal": True, "static_offset": None}, "q_offset is an array"),
    ({}, {"causal": True, "static_offset": 5}, "q_offset is 5"),
    ({"q_len": 1}, {"causal": True, "sliding_window": (5, 0), "static_offset": 63}, "q_offset is 63"),
    ({}, {"sliding_window": (5, 5)}, "no query sees a later key"),
    ({}, {"sliding_window": (5, 1 << 30)}, "no query sees a later key"),
    ({"q_len": 65}, {"causal": True, "sliding_window": (5, 0)}, "at most as many queries"),
]
BACKWARD_LIMITS = [
    ({"dlse": like((2, 64, 4), jnp.float32)}, {}, "through the log-sum-exp"),
    ({"q_len": 63, "mask": like((1, 4, 63, 64), jnp.bool_)}, {}, "even lengths"),
    ({"kv_len": 63, "mask": like((1, 1, 1, 63), jnp.bool_)}, {}, "even lengths"),
    ({"q_len": 1, "kv_len": 1}, {}, "one query and one key"),
    ({"q_len": 1, "kv_len": 5}, {"causal": True}, "one query and one key"),
]


@pytest.mark.parametrize(("arrays", "options", "reason"), LIMITS)
@pytest.mark.parametrize("backward", [False, True])
def test_each_limit_has_its_reason(monkeypatch, arrays, options, reason, backward):
    monkeypatch.setattr(cudnn, "_machine", lambda: HOPPER)
    assert reason in (cudnn.unsupported(operands(**arrays), statics(**options), backward=backward) or "")


@pytest.mark.parametrize(("arrays", "options", "reason"), BACKWARD_LIMITS)
def test_limits_of_the_gradient_leave_the_forward(monkeypatch, arrays, options, reason):
    monkeypatch.setattr(cudnn, "_machine", lambda: HOPPER)
    assert reason in (cudnn.unsupported(operands(**arrays), statics(**options), backward=True) or "")
    assert cudnn.unsupported(operands(**arrays), statics(**options), backward=False) is None


def test_gradients_of_equal_bits_are_not_promised(monkeypatch):
    monkeypatch.setattr(cudnn, "_machine", lambda: HOPPER)
    assert cudnn.unsupported(operands(), statics(), backward=False, deterministic=True) is None
    reason = cudnn.unsupported(operands(), statics(), backward=True, deterministic=True)
    assert "deterministic=False" in (reason or "")


@pytest.mark.once
@pytest.mark.parametrize(("flags", "eligible"), [
    ("--xla_gpu_deterministic_ops=true", True),
    ("--xla_gpu_deterministic_ops", True),
    ("--xla_gpu_autotune_level=0 --xla_gpu_exclude_nondeterministic_ops=1", True),
    ("--xla_gpu_deterministic_ops=false", False),
    ("--xla_gpu_deterministic_ops_too", False),
])  # fmt: skip
def test_gradients_of_a_process_whose_xla_is_deterministic_may_be_cudnns(flags, eligible):
    asked = "cudnn.unsupported(operands(), statics(), backward=True, deterministic=True)"
    told = subprocess.run(
        [sys.executable, "-c", f"from tests.test_cudnn import *; print({asked})"],
        env=child_environment() | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ("varies between runs" not in told.stdout) == eligible


@pytest.mark.parametrize(
    ("machine", "head_dim", "backward", "reason"),
    [
        (AMPERE, 128, True, None),
        (AMPERE, 136, False, "at most 128"),
        (BLACKWELL, 256, False, None),
        (BLACKWELL, 256, True, "at most 128"),
        (((7, 5), 91200), 64, False, "needs compute capability 8.0, this GPU has 7.5"),
        (((9, 0), 91002), 64, False, "cuDNN is 9.10.2, 9.11 is needed"),
        ("no GPU", 64, False, "no GPU"),
    ],
)
def test_limits_of_the_machine(monkeypatch, machine, head_dim, backward, reason):
    monkeypatch.setattr(cudnn, "_machine", lambda: machine)
    said = cudnn.unsupported(operands(head_dim=head_dim), statics(), backward=backward)
    assert said is None if reason is None else reason in (said or "")


def test_what_is_missing_is_named(monkeypatch):
    def at(capability):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(cudnn.jax, "local_devices", lambda backend: [device])

    def absent():
        raise RuntimeError("cuDNN is not detected.")

    assert "this process has no GPU" in cudnn._machine()
    module = types.SimpleNamespace(check_cudnn_version=lambda: 91501)
    monkeypatch.setattr(cudnn, "private_module", lambda: module)
    at("gfx942")
    assert cudnn._machine() == "cuDNN needs an NVIDIA GPU"
    at("9.0")
    assert cudnn._machine() == ((9, 0), 91501)
    module.check_cudnn_version = absent
    assert "install jax with its extra" in cudnn._machine()


# The version gate


@pytest.fixture
def gate():
    cudnn.private_module.cache_clear()
    yield cudnn.private_module
    cudnn.private_module.cache_clear()


def test_the_private_module_of_this_jax_is_as_expected(gate):
    assert isinstance(gate(), types.ModuleType), gate()


@pytest.mark.parametrize("name", ["_dot_product_attention_bwd_p", "_dot_product_attention_fwd_cuda_lowering"])
def test_a_jax_without_the_primitives_is_named(gate, monkeypatch, name):
    monkeypatch.delattr(gate(), name)
    gate.cache_clear()
    reason = cudnn.unsupported(operands(), statics(), backward=False)
    assert f"jax {jax.__version__} differs inside from 0.10.2 to 0.12" in reason
    assert name in reason


def test_a_jax_with_other_parameters_is_named(gate, monkeypatch):
    name = "_dot_product_attention_bwd_cuda_lowering"
    lowering = getattr(gate(), name)
    signature = inspect.signature(lowering)
    extra = inspect.Parameter("sinks", inspect.Parameter.KEYWORD_ONLY)
    lowering = types.SimpleNamespace(__call__=lowering)
    monkeypatch.setattr(gate(), name, lowering)
    signature = inspect.Signature([*signature.parameters.values(), extra], __validate_parameters__=False)
    monkeypatch.setattr(
        cudnn.inspect, "signature", lambda f, sign=inspect.signature: _either(f, lowering, signature, sign)
    )
    gate.cache_clear()
    assert "its primitives take" in gate()
    assert "sinks" in gate()


def _either(f, lowering, signature, otherwise):
    return signature if f is lowering else otherwise(f)


# What JAX is given: lowered for CUDA without one


def lowered(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def custom_call(text):
    """Target, config and operand types of the one cuDNN call."""
    (line,) = [line for line in text.splitlines() if "__cudnn$" in line]
    types_ = re.search(r": \((.*?)\) ->", line)
    assert types_ is not None
    return re.search(r"@(__cudnn\$\w+)", line)[1], line.replace("\\22", '"').replace('\\"', '"'), types_[1].split(", ")


@pytest.mark.parametrize(
    ("arrays", "options", "target", "kind", "window"),
    [
        ({}, {}, "__cudnn$fmhaSoftmax", "NO_MASK", 0),
        ({}, {"causal": True}, "__cudnn$fmhaSoftmax", "CAUSAL", 0),
        ({}, {"sliding_window": (5, 0)}, "__cudnn$fmhaSoftmax", "CAUSAL", 6),
        ({"kv_lengths": like((2,), jnp.int32)}, {}, "__cudnn$fmhaSoftmax", "PADDING", 0),
        ({"kv_lengths": like((2,), jnp.int32)}, {"causal": True}, "__cudnn$fmhaSoftmax", "PADDING_CAUSAL", 0),
        ({"mask": MASK}, {"causal": True}, "__cudnn$fmhaScaleBiasSoftmax", "CAUSAL", 0),
        ({"mask": MASK}, {}, "__cudnn$fmhaScaleBiasSoftmax", "NO_MASK", 0),
    ],
)
def test_the_lowered_call(arrays, options, target, kind, window):
    x, fixed = operands(**arrays), statics(**options)
    given = [x[name] for name in ("query", "key", "value", "mask", "kv_lengths")]
    out, lse = x["query"], like((2, 64, 4), jnp.float32)

    def gradients(*arrays):
        return cudnn.backward(*arrays, needs=(True,) * 11, statics=fixed)

    name, config, types_ = custom_call(lowered(lambda *a: cudnn.forward(*a, fixed), *given))
    lengths = ["tensor<2xi32>"] * 2 if "kv_lengths" in arrays else []
    tile = ["tensor<2x1x64x64xbf16>"] if "mask" in arrays else []
    wide, narrow = "tensor<2x64x4x64xbf16>", "tensor<2x64x2x64xbf16>"
    assert (name, types_) == (target, [wide, narrow, narrow, *tile, *lengths])
    assert f'"mask_type": "{kind}"' in config
    assert f'"sliding_window_length": {window},' in config
    assert '"fmha_scale": 0.125' in config

    name, config, types_ = custom_call(lowered(gradients, *given, out, lse, out))
    assert name == target + "Backward"
    assert types_ == [wide, narrow, narrow, "tensor<2x4x64xf32>", wide, *tile, wide, *lengths]
    assert f'"mask_type": "{kind}"' in config
    assert config.split("->")[-1].count("bf16") == 3  # a mask has no gradient


def test_keys_beyond_causality_are_cut_off():
    x = operands(q_len=32, mask=like((1, 1, 32, 64), jnp.bool_))
    given = [x[name] for name in ("query", "key", "value", "mask", "kv_lengths")]
    _, _, types_ = custom_call(lowered(lambda *a: cudnn.forward(*a, statics(causal=True)), *given))
    assert types_[1:] == ["tensor<2x32x2x64xbf16>"] * 2 + ["tensor<1x1x32x32xbf16>"]


# What is put in order around cuDNN, with dense attention in its place that makes NaN wherever cuDNN promises nothing


def dense(direction, arrays, *, scale, variadic_args, mask_type, sliding_window_length, **_):
    query, key, value, bias, _, kv_lengths, *_ = arrays
    group, (q_len, kv_len) = query.shape[2] // key.shape[2], (query.shape[1], key.shape[1])
    keys, values = (jnp.repeat(x, group, axis=2) for x in (key, value))
    rows, cols = jnp.arange(q_len)[:, None], jnp.arange(kv_len)
    seen = jnp.ones((1, 1, q_len, kv_len), bool)
    if "CAUSAL" in mask_type:
        seen = seen & (cols <= rows)
    if sliding_window_length is not None:
        assert "CAUSAL" in mask_type
        seen = seen & (cols > rows - sliding_window_length)
    if "PADDING" in mask_type:
        seen = seen & (cols < kv_lengths[:, None, None, None])
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", query, keys)
    if variadic_args[0]:
        assert bias.shape[2:] == (q_len, kv_len)
        scores = scores + bias
    scores = jnp.where(seen, scores, -jnp.inf)
    if direction == "fwd":
        top = scores.max(-1, keepdims=True)  # NaN where a row is empty
        total = jnp.exp(scores - top).sum(-1, keepdims=True)
        out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - top) / total, values)
        return out, (top + jnp.log(total))[..., 0]
    stats, out, dout = arrays[10:]
    probs = jnp.exp(scores - stats[..., None])
    dprobs = jnp.einsum("bqhd,bkhd->bhqk", dout, values)
    dscores = probs * (dprobs - (out * dout).sum(-1).transpose(0, 2, 1)[..., None])
    dq = scale * jnp.einsum("bhqk,bkhd->bqhd", dscores, keys)
    dk = scale * jnp.einsum("bhqk,bqhd->bkhd", dscores, query)
    dv = jnp.einsum("bhqk,bqhd->bkhd", probs, dout)
    dk, dv = (x.reshape(*x.shape[:2], key.shape[2], group, -1).sum(3) for x in (dk, dv))
    assert not variadic_args[1]
    return dq, dk, dv


def random(q_len, kv_len, seed=0, mask=None, kv_lengths=None):
    """Float32 operands: a mask of a given shape, lengths as given."""
    rng = np.random.default_rng(seed)
    sizes = ((2, q_len, 4, 8), (2, kv_len, 2, 8), (2, kv_len, 2, 8))
    query, key, value = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
    mask = None if mask is None else jnp.asarray(rng.random(mask) < 0.5)
    return [query, key, value, mask, None if kv_lengths is None else jnp.asarray(kv_lengths, jnp.int32)]


def results(arrays, fixed, dout, foreign_lse=False):
    """Output, log-sum-exp and gradients of the module, and of XLA, whose output the backward pass may get."""
    query, key, value, mask, kv_lengths = arrays

    @jax.jit
    def both(floats, dout):
        def attend(floats):
            options = {"causal": fixed.causal, "sliding_window": fixed.sliding_window, "softmax_scale": 0.125}
            return flash_attention(*floats, mask=mask, kv_lengths=kv_lengths, return_lse=True, backend="xla", **options)

        expected, pull = jax.vjp(attend, floats)
        actual = cudnn.forward(*floats, mask, kv_lengths, fixed)
        saved = expected if foreign_lse else actual
        grads = cudnn.backward(*floats, mask, kv_lengths, *saved, dout, (True,) * 11, fixed)
        return (*actual, *grads), (*expected, *pull((dout, jnp.zeros_like(expected[1])))[0])

    return both((query, key, value), dout)


def assert_equal(arrays, fixed, dead=None, **options):
    dout = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)
    actual, expected = results(arrays, fixed, dout if dead is None else dout.at[dead].set(jnp.nan), **options)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), actual, expected):
        assert (got is None) == (want is None), name
        if got is not None:
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, atol=3e-5, rtol=3e-5, err_msg=name)
    return actual


@pytest.mark.parametrize("foreign_lse", [False, True])
@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ({}, {}),
        ({"q_len": 5, "kv_len": 9}, {"causal": True}),
        ({"q_len": 9, "kv_len": 5}, {"causal": True}),
        ({}, {"causal": True, "sliding_window": (0, 0)}),
        ({}, {"sliding_window": (2, 0)}),
        ({"kv_lengths": (0, 3)}, {}),
        ({"kv_lengths": (-1, 99)}, {"causal": True}),
        ({"kv_lengths": (0, 3)}, {"sliding_window": (2, 0)}),
        ({"mask": (2, 4, 6, 6)}, {}),
        ({"mask": (2, 1, 6, 6), "kv_lengths": (2, 5)}, {"causal": True}),
        ({"mask": (1, 4, 6, 1)}, {"causal": True, "sliding_window": (1, 0)}),
        ({"kv_lengths": (0, 3)}, {"causal": True, "sliding_window": (1, 0)}),
        ({"q_len": 4, "kv_len": 6, "mask": (2, 1, 1, 6)}, {"causal": True}),
    ],
)
def test_masks_gradients_and_layouts(monkeypatch, arrays, options, foreign_lse):
    monkeypatch.setattr(cudnn, "_bind", dense)
    assert_equal(random(**{"q_len": 6, "kv_len": 6, **arrays}), statics(**options), foreign_lse=foreign_lse)


def test_nan_that_nobody_sees_reaches_nothing(monkeypatch):
    monkeypatch.setattr(cudnn, "_bind", dense)
    arrays = random(4, 6, mask=(2, 4, 4, 6), kv_lengths=(3, 0))
    arrays[3] = arrays[3].at[:, :2, :, 1].set(False)  # of the first key head
    hidden = np.zeros((2, 6, 2), bool)
    hidden[0, 3:] = hidden[1] = hidden[:, 1, 0] = hidden[:, 4:] = True
    arrays[1:3] = (jnp.where(hidden[..., None], jnp.nan, x) for x in arrays[1:3])
    arrays[0] = arrays[0].at[1].set(jnp.nan)
    actual = assert_equal(arrays, statics(causal=True), dead=1)
    assert not any(np.isnan(x).any() for x in actual if x is not None)


def test_gradients_that_nobody_asks_for_are_none(monkeypatch):
    monkeypatch.setattr(cudnn, "_bind", dense)
    arrays = random(6, 6, mask=(1, 4, 6, 6))
    out, lse = cudnn.forward(*arrays, statics())
    grads = cudnn.backward(*arrays, out, lse, out, (False, True, False), statics())
    assert [g is not None for g in grads] == [False, True, False]
