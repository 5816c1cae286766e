"""`flash_attention` on Triton: the numbers of the real kernels, interpreted on a CPU, and on a GPU as they are.

The interpreter checks every address, fills what was not written with NaN, and guards each array on both sides.
"""

from __future__ import annotations

import zlib

import jax
import numpy as np
import pytest

from ejkernel_ops import AttentionConfig, BwdParams, FwdParams, flash_attention

from .attention_cases import EMPTY, HIDDEN, cotangents_of, inputs, jit, judge, neutral, run, static
from .reference import assert_uniform, case_name, is_low, pairwise, probe_arrays

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
ON_GPU = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not ON_GPU:
        monkeypatch.setenv("EJKERNEL_OPS_INTERPRET", "1")


def tiles(fwd=(16, 16), keys=(16, 16), queries=(16, 16)):
    """A config: rows of queries and of keys in the tiles of each kernel."""
    return AttentionConfig(
        backend="triton",
        fwd=FwdParams(q_blocksize=fwd[0], kv_blocksize=fwd[1], num_warps=4, num_stages=2),
        bwd=BwdParams(
            q_blocksize=keys[0], kv_blocksize=keys[1], num_warps=4, num_stages=2, blocksize_m=queries[0],
            blocksize_n=queries[1], num_warps_mn=4, num_stages_mn=2,
        ),
    )  # fmt: skip


SMALL = tiles()
WIDE = tiles((16, 32), (32, 16), (32, 16))
EXACT = {"precision": "highest"}  # a GPU rounds the operands of float32 products otherwise

FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "lengths": ((17, 40), (33, 18), (16, 48)),
    "heads": ((2, 1), (3, 3)),
    "dims": ((16, 8), (24, 40), (32, 32)),
    "causal": (False, True),
    "q_offset": (0, "end", -2, "array"),
    "sliding_window": (None, (0, 0), (9, 4)),
    "logits_soft_cap": (None, 1.5),
    "softmax_scale": (None, -0.7),
    "bias": (None, "full", "keys", "queries"),
    "mask": (None, "full", "keys"),
    "segments": (None, "any", "packed"),
    "kv_lengths": (None, "some"),
    "sinks": (None, "some"),
    "config": (SMALL, WIDE),
}
FEATURES = ("causal", "q_offset", "sliding_window", "logits_soft_cap", "softmax_scale", "bias", "mask", "segments",
            "kv_lengths", "sinks")  # fmt: skip
ALONE = [dict.fromkeys(FEATURES) | {"dtype": "float32", "lengths": (33, 40), "heads": (2, 1), "dims": (16, 16),
                                    "config": SMALL, "causal": False, "q_offset": 0} | one
         for one in ({}, {"causal": True}, {"causal": True, "q_offset": "end"}, {"sliding_window": (9, 4)},
                     {"logits_soft_cap": 1.5}, {"softmax_scale": 0.0}, {"bias": "full"}, {"mask": "full"},
                     {"segments": "packed"}, {"kv_lengths": "some"}, {"sinks": "some"})]  # fmt: skip


def segment_ids(kind, rng, length):
    ids = rng.integers(-1, 3, (2, length), dtype=np.int32)
    return np.sort(ids, axis=1) if kind == "packed" else ids


def arguments(case, rng):
    """Float arrays, other arrays and static options of a case."""
    (q_len, kv_len), heads = case["lengths"], case["heads"]
    floats, _ = inputs(case["lengths"], heads, case["dims"], case["dtype"], seed=rng.integers(1 << 30))
    full, dtype = (2, heads[0], q_len, kv_len), floats["query"].dtype
    shapes = {"full": full, "keys": (2, 1, 1, kv_len), "queries": (1, heads[0], q_len, 1)}
    if case["bias"]:
        floats["bias"] = rng.normal(size=shapes[case["bias"]]).astype(dtype)
    if case["sinks"]:
        floats["sinks"] = rng.normal(size=heads[0]).astype(dtype)
    options = {n: case[n] for n in ("causal", "q_offset", "sliding_window", "logits_soft_cap", "softmax_scale")}
    others = {}
    if case["mask"]:
        others["mask"] = rng.random(shapes[case["mask"]]) < 0.7
    if case["segments"]:
        others["q_segment_ids"] = segment_ids(case["segments"], rng, q_len)
        others["kv_segment_ids"] = segment_ids(case["segments"], rng, kv_len)
    if case["kv_lengths"]:
        others["kv_lengths"] = np.array([rng.integers(kv_len), kv_len], np.int32)
    if options["q_offset"] == "array":
        others["q_offset"] = rng.integers(-2, kv_len + 2, 2, dtype=np.int32)
        del options["q_offset"]
    return floats, others, options


def name_of(case):
    return case_name({n: v for n, v in case.items() if n != "config"} | {"wide": case["config"] is WIDE})


@pytest.mark.parametrize("case", [*ALONE, *pairwise(FACTORS)], ids=name_of)
def test_output_lse_and_gradients_err_no_more_than_plain_attention(case):
    rng = np.random.default_rng(zlib.crc32(name_of(case).encode()))
    floats, others, options = arguments(case, rng)
    low = is_low(floats["query"].dtype)
    judge(floats, rng, others, case["config"], repeats=4 if low else 1, **options, **({} if low else EXACT))


@pytest.mark.parametrize("case", ALONE[:1] + ALONE[2:4] + ALONE[7:10], ids=name_of)
def test_no_key_is_lost_or_leaked(case):
    rng = np.random.default_rng(1)
    floats, others, options = arguments(case, rng)
    probe = probe_arrays(floats)
    out = run(probe, others, cotangents_of(probe, rng), static(case["config"], **options, **EXACT))["out"]
    masks = {n: v for n, v in (options | others).items() if n not in ("logits_soft_cap", "softmax_scale")}
    assert_uniform(out, (2, 2, *case["lengths"]), **masks)


BIASES = [(b, h, q, k) for b in (1, 2) for h in (1, 2) for q in (1, 18) for k in (1, 20)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_the_gradient_of_a_bias_is_summed_over_the_axes_that_it_broadcasts(shape):
    floats, rng = inputs((18, 20), (2, 1), (16, 16))
    floats["bias"] = rng.normal(size=shape).astype(np.float32)
    constants = ("query", "key", "value")
    repeats = 8 if np.prod(shape) < 20 else 1  # errors of a few numbers compare badly
    got = judge(floats, rng, None, SMALL, constants, repeats, causal=True, q_offset=2, **EXACT)
    assert got["bias"].shape == shape


ALL_MASKS = dict(causal=True, config=SMALL, **EXACT)


@pytest.mark.parametrize("hides", EMPTY)
def test_a_row_with_nothing_to_see_gives_0_and_lse_minus_inf_and_no_gradient(hides):
    given, rows = EMPTY[hides]
    floats, rng, others = neutral(**given)
    got = judge(floats, rng, others, SMALL, repeats=1, causal=True, **EXACT)
    assert not np.any(got["out"][rows])
    assert np.all(got["lse"][rows] == -np.inf)
    assert not np.any(got["query"][rows])
    assert not np.any(np.moveaxis(got["bias"], 1, 2)[rows])


def test_nan_that_reaches_a_row_with_nothing_to_see_makes_no_gradient():
    for given, rows in (EMPTY[name] for name in ("mask of a head", "q_segment_ids")):
        floats, rng, others = neutral(**given)
        cotangents = cotangents_of(floats, rng)
        clean = run(floats, others, cotangents, static(**ALL_MASKS))
        for x in (*cotangents, floats["query"]):
            x[rows] = np.nan
        for name, x in run(floats, others, cotangents, static(**ALL_MASKS)).items():
            np.testing.assert_array_equal(x, clean[name], err_msg=name)


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
    floats, rng = inputs((3, 40))
    cotangents = cotangents_of(floats, rng)
    statics = static(SMALL, causal=True, q_offset=23, sliding_window=(1, 0))
    clean = run(floats, {}, cotangents, statics)
    for name in ("key", "value"):
        floats[name][:, [0, 20, 21, 26, 39]] = np.nan
    for name, x in run(floats, {}, cotangents, statics).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_dropout_keeps_the_probabilities_that_xla_keeps_in_both_directions():
    floats, rng = inputs((17, 40), (2, 1), (16, 16))
    cotangents = cotangents_of(floats, rng)

    def results(backend):
        def attend(floats):
            return flash_attention(
                **floats, dropout_rate=0.3, dropout_rng=jax.random.key(1), return_lse=True, backend=backend,
                precision="highest",
            )  # fmt: skip

        outs, pull = jax.vjp(attend, floats)
        return (*outs, pull(cotangents)[0])

    got, wanted = jit(lambda: (results("triton"), results("xla")))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)
