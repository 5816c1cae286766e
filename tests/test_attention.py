"""`flash_attention` on XLA: its numbers, and each rule of its documentation as a test."""

from __future__ import annotations

import functools
import itertools
import random
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import AttentionConfig, BwdParams, ConfigError, FwdParams, UnsupportedError, flash_attention
from ejkernel_ops.kernels.attention.dropout import keep_bits, philox

from .reference import assert_as_good_as_plain, assert_uniform, attention, probe_arrays, visible

QUICK = {"xla_backend_optimization_level": 0}  # halves compile time, which is most of the time of these tests
jit = functools.partial(jax.jit, compiler_options=QUICK)


@functools.partial(jit, static_argnames="statics")
def run(floats, others, cotangents, statics):
    """Output, log-sum-exp and the gradient of every float array."""

    def attend(floats):
        return flash_attention(**floats, **others, **dict(statics), return_lse=True)

    (out, lse), pull = jax.vjp(attend, floats)
    return {"out": out, "lse": lse, **pull(cotangents)[0]}


def blocks(fwd_q, fwd_kv, bwd_q, bwd_kv):
    fwd, bwd = (FwdParams(q_blocksize=fwd_q, kv_blocksize=fwd_kv), BwdParams(q_blocksize=bwd_q, kv_blocksize=bwd_kv))
    return AttentionConfig(backend="xla", fwd=fwd, bwd=bwd)


ODD = blocks(4, 5, 5, 4)


def inputs(lengths, heads=(4, 2), dims=(8, 8), dtype=np.float32, batch=2, seed=0):
    """Random query, key and value, and a random generator for the rest."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (batch, lengths[0], heads[0], dims[0]),
        "key": (batch, lengths[1], heads[1], dims[0]),
        "value": (batch, lengths[1], heads[1], dims[1]),
    }
    return {n: rng.normal(size=s).astype(jnp.dtype(dtype)) for n, s in shapes.items()}, rng


def cotangents_of(floats, rng):
    """Random cotangents of output and log-sum-exp."""
    query, value = floats["query"], floats["value"]
    dout = rng.normal(size=(*query.shape[:3], value.shape[3])).astype(query.dtype)
    return dout, rng.normal(size=query.shape[:3]).astype(np.promote_types(np.float32, query.dtype))


def judge(floats, rng, others=None, config=ODD, **options):
    """Runs attention and all its gradients, checks them against the reference, returns them."""
    others = others or {}
    dout, dlse = cotangents_of(floats, rng)
    got = run(floats, others, (dout, dlse), (("config", config), *sorted(options.items())))
    exact, plain = (attention(floats, dout=dout, dlse=dlse, **options, **others, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, floats["query"].dtype)
    return got


# Numbers

FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "lengths": ((1, 1), (1, 65), (2, 63), (65, 65), (63, 17), (113, 2)),
    "heads": ((4, 4), (4, 2), (3, 1)),
    "dims": ((8, 8), (16, 8), (8, 24)),
    "causal": (True, False),
    "q_offset": (0, "end", 3, -2, "array"),
    "sliding_window": (None, (0, 0), (5, 2), 9),
    "logits_soft_cap": (None, 1.5),
    "softmax_scale": (None, 0.7),
    "bias": (None, "full", "keys"),
    "mask": (None, "full"),
    "segments": (None, "ids"),
    "kv_lengths": (None, "some"),
    "sinks": (None, "some"),
    "blocks": (None, (16, 16, 16, 16), (5, 7, 7, 5), (64, 32, 32, 64)),
}


def pairwise(factors):
    """Cases in which every two levels of any two factors meet: greedy, the same in each run."""
    rng, names = random.Random(0), list(factors)

    def pairs(case):
        return set(itertools.combinations(case.items(), 2))

    todo = set().union(*(
        {((a, x), (b, y)) for x in range(len(factors[a])) for y in range(len(factors[b]))}
        for a, b in itertools.combinations(names, 2)
    ))  # fmt: skip
    while todo:
        wanted = sorted(todo)
        trials = []
        for _ in range(40):
            case = {n: rng.randrange(len(factors[n])) for n in names} | dict(rng.choice(wanted))
            trials.append({n: case[n] for n in names})
        best = max(trials, key=lambda case: len(pairs(case) & todo))
        todo -= pairs(best)
        yield {n: factors[n][i] for n, i in best.items()}


def case_name(case):
    short = [f"{n[:6]}={v}" if n in ("q_offset", "blocks", "sliding_window") else str(v) for n, v in case.items() if v]
    return "-".join(s.replace(" ", "") for s in short)


@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=case_name)
def test_output_lse_and_gradients_err_no_more_than_plain_attention(case):
    case = dict(case)
    q_len, kv_len = case["lengths"]
    heads = case["heads"]
    floats, rng = inputs(case["lengths"], heads, case["dims"], case["dtype"], seed=zlib.crc32(case_name(case).encode()))
    if case["bias"]:
        shape = (2, heads[0], q_len, kv_len) if case["bias"] == "full" else (kv_len,)
        floats["bias"] = rng.normal(size=shape).astype(floats["query"].dtype)
    if case["sinks"]:
        floats["sinks"] = rng.normal(size=heads[0]).astype(floats["query"].dtype)
    options = {n: case[n] for n in ("causal", "q_offset", "sliding_window", "logits_soft_cap", "softmax_scale")}
    others = {}
    if case["mask"]:
        others["mask"] = rng.random((2, heads[0], q_len, kv_len)) < 0.7
    if case["segments"]:
        others["q_segment_ids"] = rng.integers(-1, 2, (2, q_len), dtype=np.int32)
        others["kv_segment_ids"] = rng.integers(-1, 2, (2, kv_len), dtype=np.int32)
    if case["kv_lengths"]:
        others["kv_lengths"] = np.array([rng.integers(kv_len + 1), kv_len], np.int32)
    if options["q_offset"] == "array":
        others["q_offset"] = rng.integers(-2, kv_len + 2, 2, dtype=np.int32)
        del options["q_offset"]
    config = blocks(*case["blocks"]) if case["blocks"] else None
    judge(floats, rng, others, config, **options)
    if case["dtype"] == "float32":  # the same program, with neutral bias and sinks
        probe = probe_arrays(floats) | {n: np.full_like(floats[n], x) for n, x in NEUTRAL.items() if n in floats}
        statics = (("config", config), *sorted(options.items()))
        out = run(probe, others, cotangents_of(floats, rng), statics)["out"]
        masks = {n: v for n, v in (options | others).items() if n not in ("logits_soft_cap", "softmax_scale")}
        assert_uniform(out, (2, heads[0], q_len, kv_len), **masks)


NEUTRAL = {"bias": 0.0, "sinks": -np.inf}


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        floats, rng = inputs((7, 9), dtype=np.float64)
        floats |= {"bias": rng.normal(size=(4, 1, 9)), "sinks": rng.normal(size=4)}
        got = judge(floats, rng, causal=True, q_offset="end", sliding_window=(4, 0), logits_soft_cap=2.0)
    assert {g.dtype for g in got.values()} == {np.dtype(np.float64)}


def test_the_reference_gradients_are_those_of_finite_differences():
    floats, rng = inputs((5, 6), dtype=np.float64)
    floats |= {"bias": rng.normal(size=(2, 1, 5, 6)), "sinks": rng.normal(size=4)}
    options = dict(causal=True, q_offset=1, logits_soft_cap=1.5, keep=(rng.random((2, 4, 5, 6)) < 0.8) / 0.8)
    dout, dlse = cotangents_of(floats, rng)

    def loss(floats, scale):
        results = attention(floats, softmax_scale=scale, **options)
        return (results["out"] * dout).sum() + (results["lse"] * dlse).sum()

    gradients = attention(floats, dout=dout, dlse=dlse, softmax_scale=0.3, **options)
    for name, x in floats.items():
        step = rng.normal(size=x.shape)
        up, down = (loss(floats | {name: x + h * step}, 0.3) for h in (1e-5, -1e-5))
        np.testing.assert_allclose((up - down) / 2e-5, (gradients[name] * step).sum(), rtol=1e-7, err_msg=name)
    np.testing.assert_allclose(
        (loss(floats, 0.3 + 1e-5) - loss(floats, 0.3 - 1e-5)) / 2e-5, gradients["softmax_scale"], rtol=1e-7
    )


AXES = list(itertools.product((False, True), repeat=4))


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "".join("bhqk"[i] if a else "1" for i, a in enumerate(axes)))
def test_bias_and_mask_broadcast_over_any_axes_and_the_gradient_of_bias_is_summed(axes):
    floats, rng = inputs((6, 7))
    full = (2, 4, 6, 7)
    floats["bias"] = rng.normal(size=[n if a else 1 for n, a in zip(full, axes)]).astype(np.float32)
    mask = rng.random([1 if a else n for n, a in zip(full, axes)]) < 0.6  # the other axes: all 16 of both are met
    got = judge(floats, rng, {"mask": mask})
    assert got["bias"].shape == floats["bias"].shape


def test_bias_and_mask_may_have_fewer_axes():
    floats, rng = inputs((6, 7))
    for shape in ((6, 7), (7,), (), (4, 1, 1)):
        bias, mask = rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.8
        four = (1,) * (4 - len(shape)) + shape
        given, full = (
            run(floats | {"bias": b}, {"mask": m}, cotangents_of(floats, np.random.default_rng(0)), ())
            for b, m in ((bias, mask), (bias.reshape(four), mask.reshape(four)))
        )
        assert given["bias"].shape == shape
        for name in given:
            np.testing.assert_array_equal(given[name], full[name].reshape(given[name].shape))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_query_head_h_uses_key_head_h_over_group_at_odd_head_dim(kv_heads):
    floats, rng = inputs((4, 5), heads=(6, kv_heads), dims=(7, 7))  # flax#5177
    judge(floats, rng, config=None)


def test_softmax_is_in_float32_for_bfloat16_inputs_also_where_logits_are_large():
    floats, _ = inputs((512, 512), (4, 4), (64, 64), jnp.bfloat16, batch=1)  # flax#4008
    attend = jit(lambda floats, scale: flash_attention(**floats, softmax_scale=scale), static_argnums=1)
    for scale, most in ((0.125, 2e-4), (0.125 * 30, 2e-3)):
        exact = attention(floats, softmax_scale=scale)["out"]
        plain = attention(floats, softmax_scale=scale, plain=True)["out"]
        error = np.abs(np.asarray(attend(floats, scale), np.float64) - exact).mean()
        assert error <= most
        assert error <= 1.1 * np.abs(plain - exact).mean()


# What each query sees


def test_causal_alignment_is_top_left_by_default_and_bottom_right_with_end():
    lengths = list(itertools.product((1, 2, 5, 6, 7), (1, 2, 5, 6, 8)))

    @jit
    def attend(examples):
        options = [dict(), dict(q_offset="end")]
        return [[flash_attention(**x, causal=True, config=blocks(2, 3, 2, 3), **o) for o in options] for x in examples]

    def example(q_len, kv_len):
        return {
            "query": np.zeros((1, q_len, 1, 8), np.float32),
            "key": np.ones((1, kv_len, 1, 8), np.float32),
            "value": np.eye(kv_len, 8, dtype=np.float32)[None, :, None],
        }

    outs = attend([example(*pair) for pair in lengths])
    for (q_len, kv_len), (default, end) in zip(lengths, outs):
        for out, offset in ((default, 0), (end, kv_len - q_len)):
            seen = np.tril(np.ones((q_len, kv_len)), offset)
            expected = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
            np.testing.assert_allclose(out[0, :, 0, :kv_len], expected, rtol=1e-6, err_msg=f"{q_len} {kv_len} {offset}")


def test_window_is_inclusive_on_both_sides():
    floats, _ = inputs((8, 8), (1, 1), (4, 4), batch=1)
    attend = jit(
        lambda x: [flash_attention(**x, sliding_window=w, config=blocks(3, 3, 3, 3)) for w in ((0, 0), 0, (1, 0))]
    )
    itself, same, two = attend(floats)  # jax#32300
    np.testing.assert_array_equal(itself, floats["value"])
    np.testing.assert_array_equal(same, floats["value"])
    probe = attend(probe_arrays(floats))[2]
    np.testing.assert_allclose(probe[0, :, 0, 0], np.maximum(np.arange(8) - 0.5, 0), rtol=1e-6)
    assert np.abs(two - floats["value"])[:, 1:].max() > 0.1


def test_window_is_honoured_beside_any_set_of_other_options():
    floats, rng = inputs((6, 6), (2, 1), (4, 4), batch=1)  # jax#32300
    choices = {
        "causal": True,
        "logits_soft_cap": 2.0,
        "mask": rng.random((1, 1, 1, 6)) < 0.7,
        "bias": rng.normal(size=(1, 1, 6, 6)).astype(np.float32),
    }
    sets = [c for n in range(5) for c in itertools.combinations(choices, n)]
    attend = jit(
        lambda floats, arrays: [
            flash_attention(**floats, sliding_window=(2, 1), **{n: arrays.get(n, choices[n]) for n in names})
            for names in sets
        ]
    )
    outs = attend(floats, {n: choices[n] for n in ("mask", "bias")})
    for names, out in zip(sets, outs):
        options = {n: choices[n] for n in names}
        exact = attention(floats | {"bias": options.pop("bias", None)}, sliding_window=(2, 1), **options)["out"]
        np.testing.assert_allclose(out, exact, atol=1e-6, err_msg=str(names))


NEGATIVE = np.full((2, 6), -1, np.int32)


def neutral(**given):
    """Arguments of one program that has every mask there is, in which only those given hide something."""
    kv_len = 9
    others = {
        "mask": np.ones((2, 4, 6, kv_len), bool),
        "q_segment_ids": np.zeros((2, 6), np.int32),
        "kv_segment_ids": np.zeros((2, kv_len), np.int32),
        "kv_lengths": np.full(2, kv_len, np.int32),
        "q_offset": np.full(2, kv_len, np.int32),
    }
    floats, rng = inputs((6, kv_len))
    floats["bias"] = rng.normal(size=(2, 4, 6, kv_len)).astype(np.float32)
    for name, value in given.items():
        (floats if name in floats else others)[name] = value
    return floats, rng, others


def at(shape, index, value, rest, dtype):
    """An array that has one value at an index and another elsewhere."""
    array = np.full(shape, rest, dtype)
    array[index] = value
    return array


EMPTY = {  # what leaves nothing to see, and for which rows
    "mask of all": (dict(mask=np.zeros((2, 4, 6, 9), bool)), np.s_[:]),
    "mask of a row": (dict(mask=at((2, 4, 6, 9), np.s_[:, :, 3], False, True, bool)), np.s_[:, 3]),
    "mask of a head": (dict(mask=at((2, 4, 6, 9), np.s_[:, 1], False, True, bool)), np.s_[:, :, 1]),
    "kv_lengths": (dict(kv_lengths=np.array([0, 9], np.int32)), np.s_[:1]),
    "q_segment_ids": (dict(q_segment_ids=at((2, 6), np.s_[:, 4:], -1, 0, np.int32)), np.s_[:, 4:]),
    "kv_segment_ids": (dict(kv_segment_ids=at((2, 9), np.s_[1], -2, 0, np.int32)), np.s_[1:]),
    "both ids negative": (dict(q_segment_ids=NEGATIVE, kv_segment_ids=np.full((2, 9), -1, np.int32)), np.s_[:]),
    "q_offset": (dict(q_offset=np.array([-3, 9], np.int32)), np.s_[:1, :3]),
    "bias of -inf": (dict(bias=at((2, 4, 6, 9), np.s_[:, :, 2], -np.inf, 0, np.float32)), np.s_[:, 2]),
}
ALL_MASKS = dict(causal=True, config=ODD)


@pytest.mark.parametrize("hides", EMPTY)
def test_a_row_with_nothing_to_see_gives_0_and_lse_minus_inf_and_no_gradient(hides):
    given, rows = EMPTY[hides]
    floats, rng, others = neutral(**given)
    got = judge(floats, rng, others, **ALL_MASKS)
    assert not np.any(got["out"][rows])  # not the mean of the values, as jax.nn gives
    assert np.all(got["lse"][rows] == -np.inf)
    assert not np.any(got["query"][rows])
    assert np.isfinite(got["lse"]).any() or hides in ("mask of all", "both ids negative")


@pytest.mark.parametrize("hides", ["mask of a row", "q_segment_ids", "bias of -inf"])
def test_what_reaches_a_row_with_nothing_to_see_from_outside_makes_no_gradient(hides):
    """A norm or a logarithm of a row of zeros has a cotangent of NaN: padding must not spoil a whole model."""
    given, rows = EMPTY[hides]
    floats, rng, others = neutral(**given)
    dout, dlse = cotangents_of(floats, rng)
    statics = tuple(ALL_MASKS.items())[::-1]
    clean = run(floats, others, (dout, dlse), statics)
    dout, dlse, floats["query"] = dout.copy(), dlse.copy(), floats["query"].copy()
    dout[rows], dlse[rows], floats["query"][rows] = np.nan, np.nan, np.nan
    for name, x in run(floats, others, (dout, dlse), statics).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_debug_nans_finds_none_where_rows_are_empty():
    floats, rng, others = neutral(**EMPTY["mask of a row"][0])
    floats["bias"][:, 0] = -np.inf
    with jax.debug_nans(True):
        got = run(floats, others, cotangents_of(floats, rng), (("config", ODD),))
    assert all(not np.isnan(x).any() for x in got.values())


HIDDEN = {  # which keys, and what hides them
    "kv_lengths": (np.s_[:, 7:], dict(kv_lengths=np.array([7, 7], np.int32))),
    "kv_segment_ids": (np.s_[0, 2:5], dict(kv_segment_ids=at((2, 9), np.s_[0, 2:5], -1, 0, np.int32))),
    "mask": (np.s_[:, 3], dict(mask=at((2, 4, 6, 9), np.s_[..., 3], False, True, bool))),
    "mask of a key head": (np.s_[:, 3, 1], dict(mask=at((2, 4, 6, 9), np.s_[:, 2:, :, 3], False, True, bool))),
    "causal": (np.s_[0, 6:], dict(q_offset=np.array([0, 9], np.int32))),
}


@pytest.mark.parametrize("hides", HIDDEN)
def test_nan_in_hidden_keys_and_values_reaches_neither_output_nor_gradients(hides):
    keys, given = HIDDEN[hides]
    floats, rng, others = neutral(**given)
    cotangents = cotangents_of(floats, rng)
    statics = tuple(ALL_MASKS.items())[::-1]
    clean = run(floats, others, cotangents, statics)
    for name in ("key", "value"):
        floats[name] = floats[name].copy()
        floats[name][keys] = np.nan
    for name, x in run(floats, others, cotangents, statics).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_nan_in_keys_beyond_a_static_causal_window_reaches_nothing():
    floats, rng = inputs((3, 9))
    options = dict(causal=True, q_offset=3, sliding_window=(1, 0))
    cotangents = cotangents_of(floats, rng)
    statics = (("config", ODD), *sorted(options.items()))
    clean = run(floats, {}, cotangents, statics)
    for name in ("key", "value"):
        floats[name][:, [0, 1, 6, 7, 8]] = np.nan
    for name, x in run(floats, {}, cotangents, statics).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_negative_segment_ids_do_not_see_each_other():
    zeros = np.zeros((1, 4, 1, 4), np.float32)  # maxtext#4908
    ids = np.array([[0, 0, -1, -1]], np.int32)
    attend = jit(lambda value, ids: flash_attention(zeros, zeros, value, q_segment_ids=ids))
    out = attend(np.eye(4, dtype=np.float32)[None, :, None], ids)
    np.testing.assert_array_equal(out[0, :, 0], [[0.5, 0.5, 0, 0]] * 2 + [[0] * 4] * 2)


def test_packed_sequences_equal_separate_ones():
    floats, rng = inputs((9, 9), batch=1)
    ids = np.repeat(np.arange(3, dtype=np.int32), (3, 5, 1))[None]
    dout, dlse = cotangents_of(floats, rng)
    packed = run(
        floats, {"q_segment_ids": ids, "kv_segment_ids": ids}, (dout, dlse), (("causal", True), ("config", ODD))
    )
    separate = jit(
        lambda parts: [
            jax.vjp(lambda x: flash_attention(**x, causal=True, return_lse=True), part)[1](cotangents)[0]
            for part, cotangents in parts
        ]
    )
    slices = [np.s_[:, 0:3], np.s_[:, 3:8], np.s_[:, 8:9]]
    parts = [({n: x[s] for n, x in floats.items()}, (dout[s], dlse[s])) for s in slices]
    for s, (part, (d, dl)), gradients in zip(slices, parts, separate(parts)):
        exact = attention(part, dout=d, dlse=dl, causal=True)
        for name in ("out", "lse", "query", "key", "value"):
            np.testing.assert_allclose(packed[name][s], exact[name], atol=2e-6, err_msg=name)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(packed[name][s], gradient, atol=2e-6, err_msg=name)


def test_all_masks_intersect():
    others = dict(  # maxtext#878
        mask=at((2, 4, 6, 9), np.s_[..., 4:6], False, True, bool),
        q_segment_ids=at((2, 6), np.s_[:, 3:], 1, 0, np.int32),
        kv_segment_ids=at((2, 9), np.s_[:, 2:], 1, 0, np.int32),
        kv_lengths=np.array([8, 3], np.int32),
        q_offset=np.array([1, 2], np.int32),
    )
    floats, rng, others = neutral(**others)
    got = judge(floats, rng, others, **ALL_MASKS)
    hidden = ~visible((2, 4, 6, 9), causal=True, **others).any((1, 2))
    for name in ("key", "value"):
        floats[name] = np.where(hidden[:, :, None, None], np.float32(1e4), floats[name])
    moved = run(floats, others, cotangents_of(floats, rng), (("causal", True), ("config", ODD)))
    np.testing.assert_array_equal(moved["out"], got["out"])
    assert hidden.any()


def test_one_set_of_segment_ids_is_enough_where_lengths_are_equal():
    floats, _ = inputs((5, 5), batch=1)
    ids = np.array([[0, 0, 1, 1, -1]], np.int32)
    names = ("q_segment_ids", "kv_segment_ids")
    both = jit(lambda x, ids: [flash_attention(**x, **dict.fromkeys(g, ids)) for g in (names, names[:1], names[1:])])
    first, *rest = both(floats, ids)
    for out in rest:
        np.testing.assert_array_equal(out, first)


# Sinks, large scores, zero cotangents, traced scalars


def test_a_row_with_only_a_sink_gives_0_and_lse_of_the_sink():
    floats, rng = inputs((4, 5))
    floats["sinks"] = rng.normal(size=4).astype(np.float32)
    mask = at((1, 1, 4, 5), np.s_[:, :, 1:3], False, True, bool)
    got = judge(floats, rng, {"mask": mask})
    assert not np.any(got["out"][:, 1:3])
    np.testing.assert_array_equal(got["lse"][:, 1:3], np.broadcast_to(floats["sinks"], (2, 2, 4)))


def test_scores_of_ten_thousand_are_finite_and_right():
    floats, rng, others = neutral()
    floats["bias"] = np.where(rng.random((2, 4, 6, 9)) < 0.5, np.float32(1e4), np.float32(-1e4))
    got = judge(floats, rng, others, **ALL_MASKS)
    assert all(np.isfinite(x).all() for x in got.values())


def test_kv_len_0_gives_0_and_q_len_0_gives_an_empty_output():
    for lengths in ((3, 0), (0, 3)):
        floats, rng = inputs(lengths)
        got = run(floats, {}, cotangents_of(floats, rng), (("causal", True),))
        assert got["out"].shape == (2, lengths[0], 4, 8)
        assert not np.any(got["out"])
        assert np.all(got["lse"] == -np.inf)
        assert all(not np.any(got[n]) and got[n].shape == floats[n].shape for n in floats)


@pytest.mark.parametrize("bias", ["normal", "finfo.min"])
def test_float32_bias_beside_bfloat16_arrays_gives_right_gradients(bias):
    floats, rng = inputs((17, 17), dtype=jnp.bfloat16)  # jax#32242
    floats["bias"] = rng.normal(size=(1, 4, 17, 17)).astype(np.float32)
    if bias == "finfo.min":
        floats["bias"] = np.where(np.tri(17, dtype=bool), 0, np.finfo(np.float16).min).astype(np.float32)[None, None]
        floats["bias"] = np.broadcast_to(floats["bias"], (1, 4, 17, 17))
    got = judge(floats, rng)
    assert got["bias"].dtype == np.float32
    zero = run(floats, {}, jax.tree.map(np.zeros_like, cotangents_of(floats, rng)), (("config", ODD),))
    assert all(not np.any(zero[n]) for n in floats)  # exactly 0: jax-flash-attn2#1


def test_zero_cotangents_give_zero_gradients_also_where_rows_are_empty():
    floats, rng, others = neutral(**EMPTY["q_offset"][0])
    zero = jax.tree.map(np.zeros_like, cotangents_of(floats, rng))
    got = run(floats, others, zero, (("causal", True), ("config", ODD)))
    assert all(not np.any(got[n]) for n in floats)


@pytest.mark.parametrize("cotangent", ["out", "lse"])
def test_gradients_of_one_output_alone_are_those_of_the_reference(cotangent):
    floats, rng = inputs((5, 6))
    dout, dlse = cotangents_of(floats, rng)
    index, given = (0, dict(dout=dout)) if cotangent == "out" else (1, dict(dout=np.zeros_like(dout), dlse=dlse))
    gradient = jit(
        jax.grad(lambda x: (flash_attention(**x, return_lse=True, config=ODD)[index] * (dout, dlse)[index]).sum())
    )
    got = gradient(floats)
    exact, plain = (attention(floats, **given, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, np.float32)


def test_a_traced_softmax_scale_has_the_right_gradient():
    floats, rng = inputs((5, 6))
    dout, dlse = cotangents_of(floats, rng)

    @jit
    def gradient(scale):
        _, pull = jax.vjp(lambda s: flash_attention(**floats, softmax_scale=s, logits_soft_cap=2.0, return_lse=True), scale)
        return pull((dout, dlse))[0]

    exact = attention(floats, dout=dout, dlse=dlse, softmax_scale=0.6, logits_soft_cap=2.0)["softmax_scale"]
    np.testing.assert_allclose(gradient(jnp.float32(0.6)), exact, rtol=1e-5)


def test_equal_inputs_give_equal_bits_in_each_run_and_place_of_the_batch():
    floats, rng, others = neutral()
    floats, others = ({n: np.stack([x[0]] * 2) for n, x in a.items()} for a in (floats, others))
    dout, dlse = (np.stack([x[0]] * 2) for x in cotangents_of(floats, rng))
    first, second = (run(floats, others, (dout, dlse), (("causal", True), ("config", ODD))) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name])
        np.testing.assert_array_equal(x[0], x[1])


# In programs


def test_integer_arrays_pass_through_grad_inside_jit_scan_and_remat():
    floats, _, others = neutral(kv_lengths=np.array([5, 8], np.int32))  # kvax#3

    def loss(query, others):
        return flash_attention(query, floats["key"], floats["value"], causal=True, **others).sum()

    plain, ints = jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(floats["query"], others)
    assert all(x.dtype == jax.dtypes.float0 for x in jax.tree.leaves(ints))

    def layers(query):
        body = jax.checkpoint(lambda total, _: (total + loss(query, others), None))
        return jax.lax.scan(body, 0.0, None, length=2)[0]

    np.testing.assert_allclose(jit(jax.grad(layers))(floats["query"]), 2 * plain, rtol=1e-5, atol=1e-6)


def test_forward_mode_and_second_order_are_right():
    with jax.enable_x64(True):  # so that finite differences are a sharp reference
        floats, rng = inputs((5, 6), dtype=np.float64, batch=1)
        floats |= {"bias": rng.normal(size=(1, 1, 5, 6)), "sinks": rng.normal(size=4)}
        cotangents = cotangents_of(floats, rng)
        steps = {n: rng.normal(size=x.shape) for n, x in floats.items()}
        ids = at((1, 6), np.s_[:, 4:], 1, 0, np.int32)
        options = dict(logits_soft_cap=2.0, sliding_window=(3, 2), q_segment_ids=ids[:, :5], kv_segment_ids=ids)

        def gradient(floats):
            attend = functools.partial(flash_attention, return_lse=True, config=blocks(3, 4, 3, 4), **options)
            outs, pull = jax.vjp(lambda x: attend(**x), floats)
            return outs, pull(cotangents)[0]

        (out, lse), second = jit(lambda x, t: jax.jvp(gradient, (x,), (t,))[1])(floats, steps)

    def exact(h):
        moved = {n: x + h * steps[n] for n, x in floats.items()}
        return attention(moved, dout=cotangents[0], dlse=cotangents[1], **options)

    up, down = exact(1e-5), exact(-1e-5)
    for name, got in {"out": out, "lse": lse, **second}.items():
        np.testing.assert_allclose(got, (up[name] - down[name]) / 2e-5, rtol=1e-6, atol=1e-8, err_msg=name)


def test_memory_of_the_gradient_is_linear_in_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        gradient = jax.grad(lambda q, k, v: flash_attention(q, k, v, causal=True, config=blocks(64, 64, 64, 64)).sum())
        return jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1024) / temporary(512) < 3  # 4 if a matrix of scores were kept


# Dropout

RATE = 0.3


def dropped(lengths=(13, 18), **given):
    """Output, log-sum-exp and gradients with dropout, of one shape."""
    floats, rng = inputs(lengths)
    return floats, cotangents_of(floats, rng)


@functools.partial(jit, static_argnames="config")
def run_dropped(floats, cotangents, rng, config):
    def attend(floats):
        return flash_attention(**floats, dropout_rate=RATE, dropout_rng=rng, return_lse=True, config=config)

    (out, lse), pull = jax.vjp(attend, floats)
    return {"out": out, "lse": lse, **pull(cotangents)[0]}


def test_philox_gives_the_published_words():
    counters = ["00000000 00000000 00000000 00000000", "ffffffff ffffffff ffffffff ffffffff"]
    counters += ["243f6a88 85a308d3 13198a2e 03707344"]
    keys = ["00000000 00000000", "ffffffff ffffffff", "a4093822 299f31d0"]
    expected = ["6627e8d5 e169c58d bc57ac4c 9b00dbd8", "408f276d 41c83b0e a20bc7c6 6d5451fd"]
    expected += ["d16cfe09 94fdcceb 5001e420 24126ea1"]
    words = [np.array([[int(w, 16) for w in line.split()] for line in x], np.uint32).T for x in (counters, keys, expected)]
    got = jit(philox)(tuple(words[0]), tuple(words[1]))
    np.testing.assert_array_equal(np.stack(got), words[2])  # Random123's kat_vectors, philox4x32-10
