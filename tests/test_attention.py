"""`flash_attention` on XLA: its numbers, and each rule of its documentation as a test."""

from __future__ import annotations

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import AttentionConfig, ConfigError, FwdParams, UnsupportedError, flash_attention
from ejkernel_ops.kernels.attention.dropout import keep_bits, philox

from .attention_cases import (
    ALL_MASKS,
    EMPTY,
    HIDDEN,
    ODD,
    QKV,
    at,
    blocks,
    cotangents_of,
    inputs,
    judge,
    neutral,
    run,
    static,
)
from .reference import (
    assert_as_good_as_plain,
    assert_uniform,
    attention,
    case_name,
    mostly_once,
    pairwise,
    probe_arrays,
    visible,
)

# Numbers

FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "lengths": ((1, 65), (63, 2), (65, 65), (17, 113)),
    "heads": ((4, 2), (3, 1)),
    "dims": ((16, 8), (8, 24)),
    "causal": (True, False),
    "q_offset": (0, "end", -2, "array"),
    "sliding_window": (None, (0, 0), (5, 2)),
    "logits_soft_cap": (None, 1.5),
    "softmax_scale": (None, 0.7),
    "bias": (None, "full", "keys"),
    "mask": (None, "full"),
    "segments": (None, "ids"),
    "kv_lengths": (None, "some"),
    "sinks": (None, "some"),
    "blocks": (None, (5, 7, 7, 5), (64, 32, 16, 64)),
}


@pytest.mark.parametrize("case", mostly_once(pairwise(FACTORS)), ids=case_name)
def test_output_lse_and_gradients_err_no_more_than_plain_attention(case):
    case, (q_len, kv_len), heads = dict(case), case["lengths"], case["heads"]
    floats, rng = inputs(case["lengths"], heads, case["dims"], case["dtype"], seed=zlib.crc32(case_name(case).encode()))
    full, dtype = (2, heads[0], q_len, kv_len), floats["query"].dtype
    if case["bias"]:
        floats["bias"] = rng.normal(size=full if case["bias"] == "full" else (2, 1, 1, kv_len)).astype(dtype)
    if case["sinks"]:
        floats["sinks"] = rng.normal(size=heads[0]).astype(dtype)
    options = {n: case[n] for n in ("causal", "q_offset", "sliding_window", "logits_soft_cap", "softmax_scale")}
    others = {}
    if case["mask"]:
        others["mask"] = rng.random(full) < 0.7
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
    if case["dtype"] == "float32":  # the same program again, with bias and sinks that change nothing
        unbiased = {n: np.full_like(floats[n], x) for n, x in (("bias", 0), ("sinks", -np.inf)) if n in floats}
        probe = probe_arrays(floats) | unbiased
        out = run(probe, others, cotangents_of(floats, rng), static(config, **options))["out"]
        masks = {n: v for n, v in (options | others).items() if n not in ("logits_soft_cap", "softmax_scale")}
        assert_uniform(out, full, **masks)


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        floats, rng = inputs((7, 9), dtype=np.float64)
        floats |= {"bias": rng.normal(size=(4, 1, 9)), "sinks": rng.normal(size=4)}
        got = judge(floats, rng, causal=True, q_offset="end", sliding_window=(4, 0), logits_soft_cap=2.0)
    assert {g.dtype for g in got.values()} == {np.dtype(np.float64)}


def test_the_reference_has_the_gradients_of_finite_differences():
    floats, rng = inputs((5, 6), dtype=np.float64)
    floats |= {"bias": rng.normal(size=(2, 1, 5, 6)), "sinks": rng.normal(size=4)}
    options = dict(causal=True, q_offset=1, logits_soft_cap=1.5, keep=(rng.random((2, 4, 5, 6)) < 0.8) / 0.8)
    dout, dlse = cotangents_of(floats, rng)

    def loss(floats, scale=0.3):
        results = attention(floats, softmax_scale=scale, **options)
        return (results["out"] * dout).sum() + (results["lse"] * dlse).sum()

    gradients, h = attention(floats, dout=dout, dlse=dlse, softmax_scale=0.3, **options), 1e-5
    for name, x in floats.items():
        step = rng.normal(size=x.shape)
        slope = (loss(floats | {name: x + h * step}) - loss(floats | {name: x - h * step})) / (2 * h)
        np.testing.assert_allclose(slope, (gradients[name] * step).sum(), rtol=1e-7, err_msg=name)
    slope = (loss(floats, 0.3 + h) - loss(floats, 0.3 - h)) / (2 * h)
    np.testing.assert_allclose(slope, gradients["softmax_scale"], rtol=1e-7)


AXES = list(itertools.product((False, True), repeat=4))


def short(shape):
    """A shape without its leading ones."""
    return tuple(shape[next((i for i, n in enumerate(shape) if n > 1), len(shape)) :])


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "".join("bhqk"[i] if a else "1" for i, a in enumerate(axes)))
def test_bias_and_mask_broadcast_over_any_axes_and_the_gradient_of_bias_is_summed(axes):
    floats, rng = inputs((6, 7))
    full = (2, 4, 6, 7)
    shape = [n if a else 1 for n, a in zip(full, axes)]
    floats["bias"] = rng.normal(size=shape if axes[0] or axes[2] else short(shape)).astype(np.float32)
    mask = rng.random(short([1 if a else n for n, a in zip(full, axes)])) < 0.6  # the other axes: all 16 of both meet
    config = ODD if axes[0] and axes[1] else None  # blocks meet the query and key axes, whole and broadcast
    got = judge(floats, rng, {"mask": mask}, config, constants=QKV)
    assert got["bias"].shape == floats["bias"].shape


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_query_head_h_uses_key_head_h_over_group_at_odd_head_dim(kv_heads):
    floats, rng = inputs((4, 5), heads=(6, kv_heads), dims=(7, 7))  # flax#5177
    judge(floats, rng, config=None)


def test_softmax_is_in_float32_for_bfloat16_inputs_also_where_logits_are_large():
    floats, _ = inputs((512, 512), (4, 4), (64, 64), jnp.bfloat16, batch=1)  # flax#4008
    attend = jax.jit(lambda floats, scale: flash_attention(**floats, softmax_scale=scale), static_argnums=1)
    for scale, most in ((0.125, 2e-4), (0.125 * 30, np.inf)):
        exact, plain = (attention(floats, softmax_scale=scale, plain=p)["out"] for p in (False, True))
        error = np.abs(np.asarray(attend(floats, scale), np.float64) - exact).mean()
        assert error <= min(most, 1.5 * np.abs(plain - exact).mean())


def test_sums_are_in_float32_over_sixteen_thousand_keys():
    """A sum that is kept in bfloat16 stops growing: nothing shorter shows it."""
    floats, rng = inputs((2, 1 << 14), (1, 1), dtype=jnp.bfloat16, batch=1)
    floats["query"] *= 0.1
    floats["value"] = (1 + 0.1 * floats["value"]).astype(jnp.bfloat16)
    dout, dlse = cotangents_of(floats, rng)
    got = run(floats, {}, (dout, dlse), static(blocks(2, 64, 2, 64)))
    exact, plain = (attention(floats, dout=dout, dlse=dlse, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, jnp.bfloat16)


def test_numpy_arrays_and_lists_are_taken_as_jax_takes_them():
    query = np.zeros((1, 2, 1, 8))  # float64, as NumPy makes it, is float32 to JAX
    out = jax.eval_shape(lambda: flash_attention(query, query.astype(np.float32), query.tolist(), mask=[[True, False]]))
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.F32_F32_F32])
def test_precision_reaches_the_products(precision):
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.float32)
    text = jax.jit(lambda x: flash_attention(x, x, x, precision=precision)).lower(x).as_text()
    assert "HIGHEST" in text or "accumulation_type = f32" in text


# What each query sees


def test_causal_alignment_is_top_left_by_default_and_bottom_right_with_end():
    lengths = list(itertools.product((1, 2, 5, 6, 7), (1, 2, 5, 6, 8)))
    offsets = [0 if n % 3 == 0 else "end" for n in range(25)]
    queries = [np.zeros((1, q_len, 1, 8), np.float32) for q_len, _ in lengths]
    keys = [np.eye(kv_len, 8, dtype=np.float32)[None, :, None] for _, kv_len in lengths]

    @jax.jit
    def attend(queries, keys):
        return [flash_attention(q, k, k, causal=True, q_offset=o) for q, k, o in zip(queries, keys, offsets)]

    for (q_len, kv_len), offset, out in zip(lengths, offsets, attend(queries, keys)):
        seen = np.tril(np.ones((q_len, kv_len)), kv_len - q_len if offset == "end" else 0)
        expected = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
        np.testing.assert_allclose(out[0, :, 0, :kv_len], expected, rtol=1e-6, err_msg=f"{q_len} {kv_len} {offset}")


def test_window_is_inclusive_on_both_sides():
    floats, _ = inputs((8, 8), (1, 1), (4, 4), batch=1)

    @jax.jit
    def attend(floats):
        return [flash_attention(**floats, sliding_window=w, config=blocks(3, 3, 3, 3)) for w in ((0, 0), 0, (1, 0))]

    itself, same, _ = attend(floats)  # jax#32300
    np.testing.assert_array_equal(itself, floats["value"])
    np.testing.assert_array_equal(same, floats["value"])
    two = attend(probe_arrays(floats))[2]
    np.testing.assert_allclose(two[0, :, 0, 0], np.maximum(np.arange(8) - 0.5, 0), rtol=1e-6)


def test_window_is_honoured_beside_any_set_of_other_options():
    floats, rng = inputs((6, 6), (2, 1), (4, 4), batch=1)  # jax#32300
    arrays = {"mask": rng.random((1, 1, 1, 6)) < 0.7, "bias": rng.normal(size=(1, 1, 6, 6)).astype(np.float32)}
    choices = {"causal": True, "logits_soft_cap": 2.0, **arrays}
    sets = [c for n in range(5) for c in itertools.combinations(choices, n)]

    @jax.jit
    def attend(floats, arrays):
        given = choices | arrays
        return [flash_attention(**floats, sliding_window=(2, 1), **{n: given[n] for n in names}) for names in sets]

    for names, out in zip(sets, attend(floats, arrays)):
        options = {n: choices[n] for n in names}
        exact = attention(floats | {"bias": options.pop("bias", None)}, sliding_window=(2, 1), **options)["out"]
        np.testing.assert_allclose(out, exact, atol=1e-6, err_msg=str(names))


@pytest.mark.parametrize("hides", EMPTY)
def test_a_row_with_nothing_to_see_gives_0_and_lse_minus_inf_and_no_gradient(hides):
    given, rows = EMPTY[hides]
    floats, rng, others = neutral(**given)
    got = judge(floats, rng, others, **ALL_MASKS)
    assert not np.any(got["out"][rows])  # not the mean of the values, as jax.nn gives
    assert np.all(got["lse"][rows] == -np.inf)
    assert not np.any(got["query"][rows])
    assert not np.any(np.moveaxis(got["bias"], 1, 2)[rows])


@pytest.mark.parametrize("hides", ["mask of a row", "mask of a head", "q_segment_ids"])
def test_nan_that_reaches_a_row_with_nothing_to_see_makes_no_gradient(hides):
    given, rows = EMPTY[hides]
    floats, rng, others = neutral(**given)
    cotangents = cotangents_of(floats, rng)
    clean = run(floats, others, cotangents, static(**ALL_MASKS))
    for x in (*cotangents, floats["query"]):  # as the derivative of a norm or a logarithm of its zeros would
        x[rows] = np.nan
    for name, x in run(floats, others, cotangents, static(**ALL_MASKS)).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_debug_nans_finds_none_where_rows_are_empty():
    floats, rng, others = neutral(**EMPTY["mask of a row"][0])
    floats["bias"][:, 0] = -np.inf
    with jax.debug_nans(True):
        got = run(floats, others, cotangents_of(floats, rng), static(**ALL_MASKS))
        floats["value"][0, 0, 0, 0] = np.nan
        with pytest.raises(FloatingPointError):  # it does look
            run(floats, others, cotangents_of(floats, rng), static(**ALL_MASKS))
    assert all(not np.isnan(x).any() for x in got.values())


@pytest.mark.parametrize("hides", HIDDEN)
def test_nan_in_hidden_keys_and_values_reaches_neither_output_nor_gradients(hides):
    keys, given = HIDDEN[hides]
    floats, rng, others = neutral(**given)
    cotangents = cotangents_of(floats, rng)
    clean = run(floats, others, cotangents, static(**ALL_MASKS))
    floats["key"][keys], floats["value"][keys] = np.nan, np.nan
    for name, x in run(floats, others, cotangents, static(**ALL_MASKS)).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_nan_in_keys_outside_the_window_of_all_queries_reaches_nothing():
    floats, rng = inputs((3, 9))
    cotangents, statics = cotangents_of(floats, rng), static(causal=True, q_offset=3, sliding_window=(1, 0))
    clean = run(floats, {}, cotangents, statics)
    for name in ("key", "value"):
        floats[name][:, [0, 1, 6, 7, 8]] = np.nan
    for name, x in run(floats, {}, cotangents, statics).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_negative_segment_ids_do_not_see_each_other_and_one_array_of_ids_is_enough():
    zeros, ids = np.zeros((1, 4, 1, 4), np.float32), np.array([[0, 0, -1, -1]], np.int32)  # maxtext#4908
    value = np.eye(4, dtype=np.float32)[None, :, None]
    names = ("q_segment_ids", "kv_segment_ids")
    attend = jax.jit(
        lambda ids: [flash_attention(zeros, zeros, value, **dict.fromkeys(n, ids)) for n in (names, names[1:])]
    )
    for out in attend(ids):
        np.testing.assert_array_equal(out[0, :, 0], [[0.5, 0.5, 0, 0]] * 2 + [[0] * 4] * 2)


def test_packed_sequences_equal_separate_ones():
    floats, rng = inputs((9, 9), batch=1)
    ids = np.repeat(np.arange(3, dtype=np.int32), (3, 5, 1))[None]
    dout, dlse = cotangents_of(floats, rng)
    packed = run(floats, {"q_segment_ids": ids}, (dout, dlse), static(causal=True))
    for s in (np.s_[:, 0:3], np.s_[:, 3:8], np.s_[:, 8:9]):
        separate = attention({n: x[s] for n, x in floats.items()}, dout=dout[s], dlse=dlse[s], causal=True)
        for name, x in packed.items():
            np.testing.assert_allclose(x[s], separate[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_all_masks_intersect():
    floats, rng, others = neutral(  # maxtext#878
        mask=at((2, 4, 6, 9), np.s_[..., 4:6], False, True, bool),
        q_segment_ids=at((2, 6), np.s_[:, 3:], 1, 0, np.int32),
        kv_segment_ids=at((2, 9), np.s_[:, 2:], 1, 0, np.int32),
        kv_lengths=np.array([8, 3], np.int32),
        q_offset=np.array([1, 2], np.int32),
    )
    got = judge(floats, rng, others, **ALL_MASKS)
    hidden = ~visible((2, 4, 6, 9), causal=True, **others).any((1, 2))
    assert hidden.sum() == 10
    for name in ("key", "value"):
        floats[name] = np.where(hidden[:, :, None, None], np.float32(1e4), floats[name])
    moved = run(floats, others, cotangents_of(floats, rng), static(**ALL_MASKS))
    np.testing.assert_array_equal(moved["out"], got["out"])


# Sinks, large scores, zero cotangents, traced scalars


def test_a_row_with_only_a_sink_gives_0_and_lse_of_the_sink():
    floats, rng = inputs((4, 5))
    floats["sinks"] = rng.normal(size=4).astype(np.float32)
    got = judge(floats, rng, {"mask": at((1, 1, 4, 5), np.s_[:, :, 1:3], False, True, bool)})
    assert not np.any(got["out"][:, 1:3])
    np.testing.assert_array_equal(got["lse"][:, 1:3], np.broadcast_to(floats["sinks"], (2, 2, 4)))


def test_scores_of_ten_thousand_give_finite_and_right_results():
    floats, rng, others = neutral()
    floats["bias"] = np.where(rng.random((2, 4, 6, 9)) < 0.5, np.float32(1e4), np.float32(-1e4))
    dout, dlse = cotangents_of(floats, rng)
    got = run(floats, others, (dout, dlse), static(**ALL_MASKS))
    exact = attention(floats, dout=dout, dlse=dlse, causal=True, **others)
    for name, x in got.items():  # a score of 1e4 is rounded by 5e-4
        np.testing.assert_allclose(x, exact[name], rtol=2e-3, atol=2e-3 * np.abs(exact[name]).max(), err_msg=name)


def test_kv_len_0_gives_0_and_q_len_or_batch_0_an_empty_output():
    for batch, lengths in ((2, (3, 0)), (2, (0, 3)), (0, (6, 9))):
        floats, rng = inputs(lengths, batch=batch)
        got = run(floats, {}, cotangents_of(floats, rng), static(causal=True))
        assert got["out"].shape == (batch, lengths[0], 4, 8)
        assert np.all(got["lse"] == -np.inf)
        assert all(not np.any(got[n]) for n in ("out", *floats))
        assert all(got[n].shape == floats[n].shape for n in floats)


def test_a_float32_bias_beside_bfloat16_arrays_gives_right_gradients_and_zero_for_zero():
    floats, rng = inputs((17, 17), dtype=jnp.bfloat16)  # jax#32242
    full = (1, 4, 17, 17)
    masking = np.where(np.tri(17, dtype=bool), 0, np.finfo(np.float16).min)  # a mask, as people write it
    for bias in (rng.normal(size=full), np.broadcast_to(masking, full)):
        floats["bias"] = bias.astype(np.float32)
        got = judge(floats, rng, repeats=16)
        assert got["bias"].dtype == np.float32
        zero = run(floats, {}, jax.tree.map(np.zeros_like, cotangents_of(floats, rng)), static())
        assert all(not np.any(zero[n]) for n in floats)  # jax-flash-attn2#1


def test_zero_cotangents_give_zero_gradients_also_where_rows_are_empty():
    floats, rng, others = neutral(**EMPTY["q_offset"][0])
    zero = jax.tree.map(np.zeros_like, cotangents_of(floats, rng))
    got = run(floats, others, zero, static(**ALL_MASKS))
    assert all(not np.any(got[n]) for n in floats)


@pytest.mark.parametrize("output", ["out", "lse"])
def test_the_gradient_of_one_output_alone_is_that_of_the_reference(output):
    floats, rng = inputs((5, 6))
    dout, dlse = cotangents_of(floats, rng)
    index, given = (0, dict(dout=dout)) if output == "out" else (1, dict(dout=np.zeros_like(dout), dlse=dlse))

    def loss(floats):
        return (flash_attention(**floats, return_lse=True)[index] * (dout, dlse)[index]).sum()

    exact, plain = (attention(floats, **given, plain=p) for p in (False, True))
    assert_as_good_as_plain(jax.jit(jax.grad(loss))(floats), exact, plain, np.float32)


def test_the_gradient_of_one_array_alone_is_that_among_all():
    floats, rng = inputs((5, 6))
    floats |= {"bias": rng.normal(size=(5, 6)).astype(np.float32), "sinks": rng.normal(size=4).astype(np.float32)}
    cotangents = cotangents_of(floats, rng)

    def alone(floats, name):
        return jax.vjp(lambda x: flash_attention(**(floats | {name: x}), return_lse=True), floats[name])[1](cotangents)[
            0
        ]

    together = run(floats, {}, cotangents, static(None))
    for name, x in jax.jit(lambda floats: {n: alone(floats, n) for n in floats})(floats).items():
        np.testing.assert_allclose(x, together[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_traced_softmax_scale_is_not_rounded_and_has_the_right_gradient(dtype):
    floats, rng = inputs((33, 34), dtype=dtype)
    dout, dlse = cotangents_of(floats, rng)

    @jax.jit
    def results(floats, scale):
        attend = functools.partial(flash_attention, logits_soft_cap=2.0, return_lse=True)
        outs, pull = jax.vjp(lambda s: attend(**floats, softmax_scale=s), scale)
        return (*outs, *pull((dout, dlse)))

    scale = 0.6023  # 0.6016 in bfloat16
    out, _, gradient = results(floats, jnp.float32(scale))
    options = dict(dout=dout, dlse=dlse, softmax_scale=scale, logits_soft_cap=2.0)
    exact, plain = (attention(floats, **options, plain=p) for p in (False, True))
    assert_as_good_as_plain({"out": out}, exact, plain, floats["query"].dtype)
    np.testing.assert_allclose(gradient, exact["softmax_scale"], rtol=1e-5 if dtype == "float32" else 2e-2)


def test_equal_inputs_give_equal_bits_in_each_run_and_place_of_the_batch():
    floats, rng, others = neutral()
    floats, others = ({n: np.stack([x[0]] * 2) for n, x in a.items()} for a in (floats, others))
    cotangents = [np.stack([x[0]] * 2) for x in cotangents_of(floats, rng)]
    first, second = (run(floats, others, tuple(cotangents), static(**ALL_MASKS)) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)
        np.testing.assert_array_equal(x[0], x[1], err_msg=name)


# In programs


def test_integer_arrays_pass_through_grad_inside_jit_scan_and_remat():
    floats, _, others = neutral(kv_lengths=np.array([5, 8], np.int32))  # kvax#3

    def loss(query, others):
        return flash_attention(query, floats["key"], floats["value"], causal=True, **others).sum()

    plain, ints = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(floats["query"], others)
    assert all(x.dtype == jax.dtypes.float0 for x in jax.tree.leaves(ints))

    def layers(query):
        body = jax.checkpoint(lambda total, _: (total + loss(query, others), None))
        return jax.lax.scan(body, 0.0, None, length=2)[0]

    np.testing.assert_allclose(jax.jit(jax.grad(layers))(floats["query"]), 2 * plain, rtol=1e-5, atol=1e-6)


def test_forward_mode_over_reverse_mode_is_right():
    with jax.enable_x64(True):  # so that finite differences of the reference are sharp
        floats, rng = inputs((5, 6), dtype=np.float64, batch=1)
        floats |= {"bias": rng.normal(size=(1, 1, 5, 6)), "sinks": rng.normal(size=4)}
        dout, dlse = cotangents_of(floats, rng)
        steps = {n: rng.normal(size=x.shape) for n, x in floats.items()}
        ids = at((1, 6), np.s_[:, 4:], 1, 0, np.int32)
        options = dict(logits_soft_cap=2.0, sliding_window=(3, 2), q_segment_ids=ids[:, :5], kv_segment_ids=ids)
        attend = functools.partial(flash_attention, return_lse=True, config=blocks(3, 4, 3, 4), **options)

        def results(floats):
            (out, lse), pull = jax.vjp(lambda x: attend(**x), floats)
            return {"out": out, "lse": lse, **pull((dout, dlse))[0]}

        got = jax.jit(lambda x, t: jax.jvp(results, (x,), (t,))[1])(floats, steps)
    up, down = (
        attention({n: x + h * steps[n] for n, x in floats.items()}, dout=dout, dlse=dlse, **options)
        for h in (1e-5, -1e-5)
    )
    for name, x in got.items():
        np.testing.assert_allclose(x, (up[name] - down[name]) / 2e-5, rtol=1e-6, atol=1e-8, err_msg=name)


def test_memory_of_the_gradient_is_linear_in_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        gradient = jax.grad(lambda x: flash_attention(x, x, x, causal=True, config=blocks(64, 64, 64, 64)).sum())
        return jax.jit(gradient).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1024) / temporary(512) < 3  # 4 if a matrix of scores were kept


# Dropout

RATE = 0.3


@functools.partial(jax.jit, static_argnames="config")
def run_dropped(floats, cotangents, rng, config):
    def attend(floats):
        return flash_attention(**floats, dropout_rate=RATE, dropout_rng=rng, return_lse=True, config=config)

    (out, lse), pull = jax.vjp(attend, floats)
    return {"out": out, "lse": lse, **pull(cotangents)[0]}


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def kept(rng, batch, heads, q_len, kv_len):
    """Which probabilities are kept, `(batch, heads, q_len, kv_len)`, for the key that the op was given."""
    seed = jnp.pad(jax.random.bits(rng, (batch, 2), jnp.uint32), ((0, 0), (0, 3)))
    return keep_bits(seed, jnp.arange(heads)[None], jnp.arange(q_len), 0, kv_len, RATE)[:, 0]


def test_philox_gives_the_published_words():
    counters = ("00000000 " * 4, "ffffffff " * 4, "243f6a88 85a308d3 13198a2e 03707344")
    keys = ("00000000 " * 2, "ffffffff " * 2, "a4093822 299f31d0")
    expected = (
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    )
    words = [
        np.array([[int(w, 16) for w in line.split()] for line in x], np.uint32).T for x in (counters, keys, expected)
    ]
    got = jax.jit(philox)(tuple(words[0]), tuple(words[1]))  # words of Random123's kat_vectors, philox4x32-10
    np.testing.assert_array_equal(np.stack(got), words[2])


def test_dropout_keeps_its_rate_and_draws_independently_along_every_axis():
    keep = np.asarray(kept(jax.random.key(0), 2, 4, 64, 64))

    def agrees(bits, rate):
        assert abs(bits.mean() - rate) <= 3 * np.sqrt(rate * (1 - rate) / bits.size)

    agrees(keep, 1 - RATE)
    for axis, by in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (3, 4)):
        first, second = (np.take(keep, range(n, keep.shape[axis] - by + n), axis) for n in (0, by))
        agrees(first == second, RATE**2 + (1 - RATE) ** 2)


DROPPED = blocks(5, 7, 4, 6)  # another place of each key among its block's, in each direction


def dropped(seed=1):
    floats, rng = inputs((13, 18))
    cotangents = cotangents_of(floats, rng)
    return floats, cotangents, run_dropped(floats, cotangents, jax.random.key(seed), DROPPED)


def test_dropout_gives_output_and_gradients_of_the_kept_probabilities():
    floats, (dout, dlse), got = dropped()
    keep = np.asarray(kept(jax.random.key(1), 2, 4, 13, 18)) / (1 - RATE)
    exact, plain = (attention(floats, dout=dout, dlse=dlse, keep=keep, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, np.float32)


def test_dropout_is_the_same_for_one_key_and_any_block_sizes_and_another_for_another_key():
    floats, cotangents, got = dropped()
    for name, x in dropped()[2].items():
        np.testing.assert_array_equal(x, got[name])
    for name, x in run_dropped(floats, cotangents, jax.random.key(1), None).items():
        np.testing.assert_allclose(x, got[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert np.abs(dropped(seed=2)[2]["out"] - got["out"]).max() > 0.1


def test_vmap_drops_as_separate_calls_with_the_same_keys():
    floats, _ = inputs((5, 9), batch=3)

    def one(floats, rng):
        return flash_attention(**{n: x[None] for n, x in floats.items()}, dropout_rate=RATE, dropout_rng=rng)

    rngs = jax.random.split(jax.random.key(0), 3)
    together, separate = jax.jit(jax.vmap(one))(floats, rngs), jax.jit(one)
    for i in range(3):
        alone = separate({n: x[i] for n, x in floats.items()}, rngs[i])
        np.testing.assert_allclose(together[i], alone, rtol=1e-6, atol=1e-6)


def test_a_rematerialised_forward_drops_as_the_first_one():
    floats, (dout, _), _ = dropped()

    def loss(floats):
        attend = functools.partial(flash_attention, dropout_rate=RATE, dropout_rng=jax.random.key(1), config=DROPPED)
        return (jax.checkpoint(lambda x: jnp.sin(attend(**x)))(floats) * dout).sum()

    keep = np.asarray(kept(jax.random.key(1), 2, 4, 13, 18)) / (1 - RATE)
    out = attention(floats, keep=keep)["out"]
    exact = attention(floats, keep=keep, dout=np.cos(out) * dout)
    for name, x in jax.jit(jax.grad(loss))(floats).items():
        np.testing.assert_allclose(x, exact[name], rtol=1e-5, atol=1e-5, err_msg=name)


# Errors


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


INT, KEY = jnp.int32, jax.eval_shape(lambda: jax.random.key(0))
BAD = [  # argument, value, type of the error, what its message must say besides the argument's name
    ("query", ones(2, 6, 8), ValueError, ["(2, 6, 8)", "(batch, length, heads, head_dim)"]),
    ("query", ones(2, 6, 4, 8, dtype=INT), TypeError, ["int32", "float"]),
    ("query", ones(2, 6, 4, 8, dtype=jnp.bfloat16), TypeError, ["bfloat16", "float32", "cast"]),
    ("query", ones(2, 6, 5, 8), ValueError, ["5 heads", "key has 2", "multiple"]),
    ("query", ones(2, 6, 4, 16), ValueError, ["16", "key 8"]),
    ("query", ones(2, 6, 4, 0), ValueError, ["head_dim 0", "key 8"]),
    ("query", ones(3, 6, 4, 8), ValueError, ["(3, 6, 4, 8)", "key (2, 7, 2, 8)", "one batch"]),
    ("value", ones(2, 5, 2, 8), ValueError, ["(2, 5, 2, 8)", "key (2, 7, 2, 8)", "one length"]),
    ("key", None, TypeError, ["NoneType", "array"]),
    ("mask", ones(6, 7), TypeError, ["float32", "expected bool", "bias="]),
    ("mask", ones(2, 7, dtype=bool), ValueError, ["(2, 7)", "(2, 4, 6, 7)", "(batch, 1, 1, kv_len)"]),
    ("bias", ones(6, 7, dtype=INT), TypeError, ["int32", "float", "mask="]),
    ("bias", ones(1, 2, 6, 7), ValueError, ["(1, 2, 6, 7)", "(2, 4, 6, 7)", "each query head"]),
    ("bias", ones(1, 1, 1, 6, 7), ValueError, ["(1, 1, 1, 6, 7)", "(2, 4, 6, 7)"]),
    ("q_offset", "start", ValueError, ["'start'", "'end'"]),
    ("q_offset", 1.5, TypeError, ["float32", "int"]),
    ("q_offset", ones(3, dtype=INT), ValueError, ["(3,)", "(2,)"]),
    ("q_offset", None, TypeError, ["NoneType", "array"]),
    ("sliding_window", -1, ValueError, ["-1", "not negative"]),
    ("sliding_window", (1, 2, 3), TypeError, ["(1, 2, 3)", "pair of ints"]),
    ("sliding_window", (1.5, 2), TypeError, ["(1.5, 2)", "pair of ints"]),
    ("softmax_scale", ones(2), ValueError, ["(2,)", "scalar"]),
    ("softmax_scale", "big", TypeError, ["'big'", "number"]),
    ("softmax_scale", float("nan"), ValueError, ["nan", "finite"]),
    ("softmax_scale", ones(dtype=INT), TypeError, ["int32", "float"]),
    ("logits_soft_cap", 0, ValueError, ["0", "positive"]),
    ("logits_soft_cap", float("inf"), ValueError, ["inf", "finite"]),  # inf * tanh(0) would be NaN
    ("logits_soft_cap", ones(), TypeError, ["known when the program is traced"]),
    ("q_segment_ids", ones(2, 6), ValueError, ["kv_segment_ids", "pass both"]),
    ("kv_lengths", ones(2), TypeError, ["float32", "int"]),
    ("kv_lengths", ones(2, 1, dtype=INT), ValueError, ["(2, 1)", "(2,)"]),
    ("sinks", ones(2), ValueError, ["(2,)", "4 query heads"]),
    ("sinks", ones(4, dtype=INT), TypeError, ["int32", "float"]),
    ("dropout_rate", 1.0, ValueError, ["1.0", "less than 1"]),
    ("dropout_rate", "a little", TypeError, ["'a little'", "number"]),
    ("dropout_rate", 0.1, ValueError, ["0.1", "dropout_rng is None", "PRNG key"]),
    ("dropout_rng", 3, TypeError, ["3", "PRNG key"]),
    ("dropout_rng", ones(2, dtype=KEY.dtype), ValueError, ["(2,)", "one key"]),
    ("context_axis", "seq", ValueError, ["'seq'", "jax.shard_map"]),
    ("precision", "exact", ValueError, ["'exact'", "highest"]),
    ("config", 128, ConfigError, ["128", "AttentionConfig"]),
    ("backend", "gpu", ConfigError, ["'gpu'", "triton, pallas, cudnn, xla"]),
    ("backend", "pallas", UnsupportedError, ["'pallas'", "xla"]),
    (
        "config",
        AttentionConfig(backend="xla", fwd=FwdParams(num_warps=4)),
        ConfigError,
        ["num_warps=4", "kv_blocksize"],
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), BAD, ids=[f"{n}-{e.__name__}-{i}" for i, (n, _, e, _) in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name_with_what_came_and_what_was_expected(name, value, error, words):
    arrays = {"query": ones(2, 6, 4, 8), "key": ones(2, 7, 2, 8), "value": ones(2, 7, 2, 8)}
    options = {"causal": True} if name == "q_offset" else {"dropout_rate": 0.1} if name == "dropout_rng" else {}
    (arrays if hasattr(value, "shape") or name in arrays else options)[name] = value
    with pytest.raises(error) as caught:
        jax.jit(lambda arrays: flash_attention(**arrays, **options)).lower(arrays)
    assert all(word in str(caught.value) for word in [name, *words]), str(caught.value)
