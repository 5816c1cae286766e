"""cuDNN attention on a real GPU: every feature that is eligible, forward and gradients, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import flash_attention
from ejkernel_ops.kernels.attention import cudnn

from .reference import assert_as_good_as_plain, attention

pytestmark = pytest.mark.gpu
FIXED_ORDER = cudnn._FIXED_ORDER  # with XLA_FLAGS=--xla_gpu_deterministic_ops=true all of this holds too

SHAPE = {"lengths": (256, 256), "heads": (4, 4), "dim": 64, "dtype": jnp.bfloat16, "mask": None, "kv_lengths": None}
SOME = np.array([0, 1, 100, 255], np.int32)
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal in float16": {"causal": True, "dtype": jnp.float16},
    "causal, grouped heads of 128": {"causal": True, "dim": 128, "heads": (8, 2), "lengths": (512, 512)},
    "odd lengths": {"lengths": (255, 255)},
    "causal, more keys": {"causal": True, "lengths": (127, 255)},
    "causal, more queries": {"causal": True, "lengths": (255, 127)},
    "window 0": {"causal": True, "sliding_window": (0, 0)},
    "window 1": {"causal": True, "sliding_window": (1, 0)},
    "window 100, odd, grouped": {"causal": True, "sliding_window": (100, 0), "lengths": (251, 255), "heads": (4, 2)},
    "lengths": {"kv_lengths": SOME},
    "lengths, causal": {"kv_lengths": SOME, "causal": True},
    "lengths, window 5": {"kv_lengths": SOME, "causal": True, "sliding_window": (5, 0)},
    "lengths, one key head": {"kv_lengths": SOME, "lengths": (77, 255), "heads": (4, 1)},
    "mask": {"mask": (4, 1, 256, 256)},
    "mask of heads, causal": {"mask": (1, 4, 256, 256), "causal": True},
    "mask of keys": {"mask": (4, 1, 1, 256), "heads": (4, 2)},
    "mask of queries in float16": {"mask": (1, 1, 256, 1), "dtype": jnp.float16},
    "mask, causal, lengths": {"mask": (4, 1, 256, 256), "causal": True, "kv_lengths": SOME},
    "causal, 72 wide": {"causal": True, "dim": 72},
    "causal, 256 wide": {"causal": True, "dim": 256, "heads": (2, 2)},
    "8 wide": {"dim": 8},
    "one query": {"lengths": (1, 256), "kv_lengths": SOME, "heads": (4, 2)},
}


def arrays_of(case, rng):
    """Query, key, value and cotangent; a mask that leaves some queries nothing."""
    (q_len, kv_len), (heads, kv_heads), dim = case["lengths"], case["heads"], case["dim"]
    shapes = {"query": (q_len, heads), "key": (kv_len, kv_heads), "value": (kv_len, kv_heads), "dout": (q_len, heads)}
    floats = {n: rng.normal(size=(4, *shape, dim)).astype(case["dtype"]) for n, shape in shapes.items()}
    others = {"kv_lengths": case["kv_lengths"]}
    if case["mask"]:
        others["mask"] = rng.random(case["mask"]) < 0.5
        others["mask"][:, :, ::51] = case["mask"][2] == 1
    return floats, {n: x for n, x in others.items() if x is not None}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_as_good_as_those_of_plain_attention(name):
    if reason := cudnn.missing():
        pytest.skip(reason)
    case = SHAPE | CASES[name]
    floats, others = arrays_of(case, np.random.default_rng(0))
    options = {n: case[n] for n in ("causal", "sliding_window") if n in case}
    dout = floats.pop("dout")

    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
    def results(floats, others, dout):
        attend = functools.partial(flash_attention, **others, **options, backend="cudnn", deterministic=FIXED_ORDER)
        out, pull = jax.vjp(lambda floats: attend(**floats), floats)
        return {"out": out} | pull(dout)[0]

    got = results(floats, others, dout)
    exact, plain = (attention(floats, dout=dout, plain=plain, **options, **others) for plain in (False, True))
    assert_as_good_as_plain(got, exact, plain, case["dtype"])


@pytest.mark.skipif(not FIXED_ORDER, reason="asks for XLA_FLAGS=--xla_gpu_deterministic_ops=true")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_of_a_fixed_order_are_the_same_bits_in_each_run(dim):
    query, key, value, dout = jax.random.normal(jax.random.key(0), (4, 4, 2048, 8, dim), jnp.bfloat16)
    attend = functools.partial(flash_attention, causal=True, backend="cudnn", deterministic=True)
    gradients = jax.jit(lambda *arrays: jax.vjp(attend, *arrays)[1](dout))
    first, *others = (gradients(query, key, value) for _ in range(10))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_what_hidden_keys_and_queries_that_see_nothing_hold_reaches_nothing():
    if reason := cudnn.missing():
        pytest.skip(reason)
    case = SHAPE | CASES["lengths, causal"]
    floats, others = arrays_of(case, np.random.default_rng(0))
    hidden = np.arange(256) >= SOME[:, None]
    for array in ("key", "value"):
        floats[array][hidden] = np.nan
    floats["query"][0] = floats["dout"][0] = np.nan
    dout = floats.pop("dout")
    attend = functools.partial(flash_attention, **others, causal=True, backend="cudnn", deterministic=FIXED_ORDER)
    out, pull = jax.vjp(lambda floats: attend(**floats), floats)
    got = {"out": out} | pull(jnp.asarray(dout))[0]
    for array, x in got.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), array
    assert all(not np.any(np.asarray(got[array], np.float32)[hidden]) for array in ("key", "value"))
