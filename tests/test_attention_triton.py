"""`flash_attention` on Triton: the numbers of the real kernels, interpreted on a CPU, and on a GPU as they are.

The interpreter checks every address, fills what was not written with NaN, and guards each array on both sides.
"""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    AttentionConfig,
    BwdParams,
    ConfigError,
    FwdParams,
    Key,
    UnsupportedError,
    device_fingerprint,
    flash_attention,
    overlay_cache,
)
from ejkernel_ops.config.selection import heuristic
from ejkernel_ops.kernels.attention.triton_spec import dot_precision
from ejkernel_ops.registry import find_call
from ejkernel_ops.triton_target import TARGETS
from ejkernel_ops.utils.meta import call_sites, split_label

from .attention_cases import EMPTY, HIDDEN, cotangents_of, inputs, judge, neutral, run, static
from .ops import runs
from .reference import assert_uniform, attention, case_name, is_low, mostly_once, pairwise, probe_arrays

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
ON_GPU = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else [pytest.mark.once]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
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


@pytest.mark.parametrize("case", mostly_once([*ALONE, *pairwise(FACTORS)]), ids=name_of)
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

    got, wanted = jax.jit(lambda: (results("triton"), results("xla")))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)


# In programs


def small(**options):
    """Attention on Triton with small tiles."""
    return functools.partial(flash_attention, config=SMALL, **EXACT, **options)


def plain(**options):
    """The same on XLA."""
    return functools.partial(flash_attention, backend="xla", **EXACT, **options)


def loss_of(attend):
    return lambda *arrays, **others: (attend(*arrays, **others) ** 2).sum()


def qkv(lengths=(17, 20), heads=(2, 1), batch=1, lead=()):
    floats, rng = inputs(lengths, heads, (16, 16), batch=int(np.prod(lead, initial=batch)))
    return [x.reshape(*lead, batch, *x.shape[1:]) for x in floats.values()], rng


def agree(transformed, *arrays):
    """Whether a program of either back end gives the same."""
    got, wanted = (jax.jit(transformed(make(causal=True)))(*arrays) for make in (small, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, wanted)


TRANSFORMS = {
    "vmap": (lambda f: jax.vmap(f), (2,)),
    "nested vmap": (lambda f: jax.vmap(jax.vmap(f)), (2, 2)),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(loss_of(f), (0, 1, 2))), (2,)),
    "grad of vmap": (lambda f: jax.grad(loss_of(jax.vmap(f)), (0, 1, 2)), (2,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_vmap_in_any_nesting(name):
    transform, lead = TRANSFORMS[name]
    agree(transform, *qkv(lead=lead)[0])


def test_vmap_with_operands_that_are_not_mapped():
    (query, key, value), rng = qkv(lead=(2,))
    mask = rng.random((2, 1, 1, 17, 20)) < 0.7

    def transform(attend):
        over_query = jax.vmap(attend, (0, None, None))
        over_mask = jax.vmap(lambda mask: attend(query[0], key[0], value[0], mask=mask))
        return lambda q, k, v, mask: (
            over_query(q, k, v),
            jax.grad(loss_of(over_query), (0, 1, 2))(q, k, v),
            over_mask(mask),
        )

    agree(transform, query, key[0], value[0], mask)


def test_scan_and_remat():
    (query, key, value), _ = qkv()

    def transform(attend):
        def layers(query, key, value):
            body = jax.checkpoint(lambda q, _: (attend(q, key, value), None))
            return (jax.lax.scan(body, query, None, length=2)[0] ** 2).sum()

        return jax.value_and_grad(layers, (0, 1, 2))

    agree(transform, query, key, value)


def lowered_for_cuda(fn, *arrays):
    """The program for a GPU, which need not be there."""
    return jax.jit(fn).trace(*arrays).lower(lowering_platforms=("cuda",))


def test_remat_that_saves_the_output_runs_the_forward_once():
    arrays = qkv()[0]
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention")
    for options, forwards in (({"policy": policy}, 1), ({}, 2)):
        loss = jax.checkpoint(lambda *x: jnp.sin(small()(*x)).sum(), **options)
        found = runs(lowered_for_cuda(jax.value_and_grad(loss), *arrays))
        assert found == {"flash_attention@v1": forwards, "flash_attention_bwd@v1": 1}


def test_the_program_for_a_gpu_has_the_kernels_and_says_what_they_run_with():
    lowered = lowered_for_cuda(jax.grad(loss_of(small()), (0, 1, 2)), *qkv()[0])
    assert lowered.as_text().count("triton_kernel_call") == 3  # forward, queries, keys and values
    sites = {split_label(site.label)[0]: site.config for site in call_sites(lowered)}
    assert "backend=triton" in sites["flash_attention@v1"]
    assert "bwd.num_stages_mn=2" in sites["flash_attention_bwd@v1"]


def test_a_program_can_be_exported_for_a_gpu():
    pytest.importorskip("flatbuffers")
    checks = [jax.export.DisabledSafetyCheck.custom_call(n) for n in TARGETS]
    arrays = qkv()[0]
    exported = jax.export.export(jax.jit(small()), platforms=["cuda"], disabled_checks=checks)(*arrays)
    again = jax.export.deserialize(exported.serialize())
    assert again.out_avals[0].shape == arrays[0].shape
    assert "triton_kernel_call" in again.mlir_module()


def test_only_the_gradients_that_are_asked_for_are_computed():
    arrays = qkv()[0]
    kernels = {(0,): 2, (1,): 3, (2,): 3, (0, 1, 2): 3}  # of one array: the queries' kernel sums for the others, too
    for wanted, count in kernels.items():
        lowered = lowered_for_cuda(jax.grad(loss_of(small()), wanted), *arrays)
        assert lowered.as_text().count("triton_kernel_call") == count
    gradients = jax.jit(lambda *x: [jax.grad(loss_of(small()), i)(*x) for i in range(3)])(*arrays)
    for got, want in zip(gradients, jax.jit(jax.grad(loss_of(plain()), (0, 1, 2)))(*arrays)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_shapes_are_known_without_running():
    (query, key, value), _ = qkv()
    out, lse = jax.eval_shape(small(return_lse=True), query, key, value)
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], jnp.float32)


def test_x64_changes_nothing_for_float32_and_refuses_float64():
    arrays = qkv()[0]
    before = small()(*arrays)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(small()(*arrays), before)
        with pytest.raises(UnsupportedError, match="float64"):
            small()(*(x.astype(np.float64) for x in arrays))


def test_debug_nans_finds_none_where_rows_are_empty():
    (query, key, value), _ = qkv()
    mask = np.ones((1, 1, 17, 20), bool)
    mask[:, :, 3] = False
    with jax.debug_nans(True):
        jax.jit(jax.grad(loss_of(small()), (0, 1, 2)))(query, key, value, mask=mask)


def test_forward_mode_and_second_order_name_the_back_end_that_has_them():
    query, key, value = qkv()[0]
    attend = small()
    with pytest.raises(UnsupportedError, match="backend='xla'"):
        jax.jit(lambda q: jax.jvp(lambda q: attend(q, key, value), (q,), (q,)))(query)
    with pytest.raises(UnsupportedError, match="backend='xla'"):
        jax.jit(lambda q: jax.grad(lambda q: jax.grad(lambda q: loss_of(attend)(q, key, value))(q).sum())(q))(query)


def test_equal_inputs_give_equal_bits_in_each_run_and_place_of_the_batch():
    floats, rng, others = neutral()
    floats, others = ({n: np.stack([x[0]] * 2) for n, x in a.items()} for a in (floats, others))
    cotangents = tuple(np.stack([x[0]] * 2) for x in cotangents_of(floats, rng))
    first, second = (run(floats, others, cotangents, static(**ALL_MASKS)) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)
        np.testing.assert_array_equal(x[0], x[1], err_msg=name)


@pytest.mark.parametrize("forward", ["triton", "xla"])
def test_each_direction_may_run_on_another_back_end(forward):
    arrays = qkv()[0]
    wanted = jax.jit(jax.grad(loss_of(plain(causal=True)), (0, 1, 2)))(*arrays)
    sides = {"flash_attention": forward, "flash_attention_bwd": "xla" if forward == "triton" else "triton"}
    step = jax.jit(jax.grad(loss_of(functools.partial(flash_attention, causal=True, **EXACT)), (0, 1, 2)))
    pinned = {}
    for site in call_sites(step.lower(*arrays)):
        op, call_key = split_label(site.label)
        key = Key(device_fingerprint(), op, call_key)
        pinned[key] = heuristic(find_call(key), sides[op.split("@")[0]])
    with overlay_cache(pinned):
        found = {split_label(s.label)[0].split("@")[0]: s.config for s in call_sites(step.lower(*arrays))}
        assert {op: f"backend={side}" in found[op] for op, side in sides.items()} == dict.fromkeys(sides, True)
        for got, want in zip(step(*arrays), wanted):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


# Programs of the public reports that the kernels must get right


def test_large_scores_and_zero_cotangents_give_no_nan():
    floats, rng, others = neutral()
    floats["bias"] = np.where(rng.random((2, 4, 6, 9)) < 0.5, np.float32(1e4), np.float32(-1e4))
    dout, dlse = cotangents_of(floats, rng)
    got = run(floats, others, (dout, dlse), static(**ALL_MASKS))
    exact = attention(floats, dout=dout, dlse=dlse, causal=True, **others)
    for name, x in got.items():
        np.testing.assert_allclose(x, exact[name], rtol=2e-3, atol=2e-3 * np.abs(exact[name]).max(), err_msg=name)
    zero = run(floats, others, jax.tree.map(np.zeros_like, (dout, dlse)), static(**ALL_MASKS))
    assert all(not np.any(zero[n]) for n in floats)


def test_a_float32_bias_beside_bfloat16_arrays_has_a_float32_gradient():
    floats, rng = inputs((17, 17), (2, 1), (16, 16), dtype=jnp.bfloat16)
    floats["bias"] = np.where(np.tri(17, dtype=bool), 0, np.finfo(np.float16).min).astype(np.float32)[None, None]
    got = judge(floats, rng, config=SMALL, repeats=8)
    assert got["bias"].dtype == np.float32


def test_sums_are_in_float32_over_many_keys():
    floats, rng = inputs((2, 1 << 12), (1, 1), (16, 16), dtype=jnp.bfloat16, batch=1)
    floats["query"] *= 0.1
    floats["value"] = (1 + 0.1 * floats["value"]).astype(jnp.bfloat16)
    judge(floats, rng, config=tiles((16, 128), (16, 128), (16, 128)), repeats=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": jnp.float64}, "float64"),
        ({"dims": (264, 8)}, "264"),
        ({"lengths": (0, 8)}, "empty"),
        ({"config": tiles((24, 16))}, "powers of two"),
        ({"config": tiles((16, 8))}, "16 to 256"),
    ],
    ids=str,
)
def test_what_triton_cannot_do_is_refused_with_the_reason(options, words):
    options = {"lengths": (8, 8), "dims": (8, 8), "dtype": jnp.float32, "config": SMALL} | options
    with jax.enable_x64(True):
        floats, _ = inputs(options["lengths"], (2, 1), options["dims"], options["dtype"])
        with pytest.raises((UnsupportedError, ConfigError), match=words):
            flash_attention(**floats, config=options["config"])


def test_on_a_cpu_triton_is_refused_unless_it_is_to_be_interpreted(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_INTERPRET", "0")
    floats, _ = inputs((5, 5))
    with pytest.raises(UnsupportedError, match="EJKERNEL_OPS_INTERPRET=1"):
        jax.jit(lambda floats: flash_attention(**floats, backend="triton")).lower(floats)


@pytest.mark.parametrize("forward", ["triton", "xla"])
@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -3e38, -1e9], ids=str)
def test_biases_of_great_size_are_no_minus_inf_and_make_no_nan(lowest, forward):
    floats, rng = inputs((17, 18), (2, 1), (16, 16), batch=1)
    floats["bias"] = np.where(np.arange(17)[:, None] < 5, lowest, np.where(np.tri(17, 18, dtype=bool), 0, lowest))
    floats["bias"] = floats["bias"].astype(np.float32)[None, None]
    cotangents = cotangents_of(floats, rng)
    with overlay_cache(pinned_sides(floats, forward, "triton")):
        got = run(floats, {}, cotangents, static(None, **EXACT))
    assert all(np.isfinite(x).all() for x in got.values())
    probs = np.full((5, 18), 1 / 18, np.float32)  # of rows in which all keys weigh alike
    uniform = np.einsum("qk,bkhd->bqhd", probs, np.repeat(floats["value"], 2, axis=2))
    if lowest < -1e30:  # to -1e9 the products still add a little
        np.testing.assert_allclose(got["out"][:, :5], uniform, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, float(jnp.finfo(jnp.bfloat16).min), -2.9e38], ids=str)
def test_a_query_that_sees_one_key_gives_it_all_whatever_its_bias(lowest):
    floats, rng = inputs((18, 18), (2, 1), (16, 16), batch=1)
    floats["bias"] = np.where(np.arange(18)[:, None] < 2, lowest, 0 * np.ones((18, 18))).astype(np.float32)[None, None]
    cotangents = cotangents_of(floats, rng)
    got, wanted = (
        run(floats, {}, cotangents, static(config, causal=True, **options, **EXACT))
        for config, options in ((SMALL, {}), (None, {"backend": "xla"}))
    )
    np.testing.assert_allclose(got["out"][:, 0], np.repeat(floats["value"], 2, axis=2)[:, 0], rtol=1e-6)
    for name in ("out", "query", "key", "value", "bias"):
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_greatest_bias_takes_all_the_weight():
    floats, rng = inputs((17, 18), (2, 1), (16, 16), batch=1)
    floats["bias"] = np.zeros((1, 1, 17, 18), np.float32)
    floats["bias"][..., 4] = np.finfo(np.float32).max
    got = run(floats, {}, cotangents_of(floats, rng), static(SMALL, **EXACT))
    np.testing.assert_allclose(got["out"], np.broadcast_to(floats["value"][:, 4:5], got["out"].shape), rtol=1e-6)
    assert all(np.isfinite(x).all() for x in got.values())


def pinned_sides(floats, forward, backward):
    """An overlay that has each direction of a call of `run` on one back end."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), floats)
    out = jax.eval_shape(lambda x: flash_attention(**x, return_lse=True, backend="xla"), shapes)
    sides = {"flash_attention": forward, "flash_attention_bwd": backward}
    pinned = {}
    for site in call_sites(run.lower(shapes, {}, out, static(None, **EXACT))):
        op, call_key = split_label(site.label)
        key = Key(device_fingerprint(), op, call_key)
        pinned[key] = heuristic(find_call(key), sides[op.split("@")[0]])
    return pinned


def test_offsets_of_any_size_hide_or_show_all_keys():
    query, key, value = qkv((5, 20))[0]
    far = [2**31 - 1, 2**30, 2**31 - 20, -(2**31), -(2**30)]

    def attend(offset, **options):
        return flash_attention(query, key, value, causal=True, q_offset=offset, **options, **EXACT)

    everything = flash_attention(query, key, value, **EXACT)
    for options in ({"config": SMALL}, {"backend": "xla"}):
        every = jax.jit(lambda offsets, o=options: [attend(offset, **o) for offset in offsets])
        outs = every(np.asarray(far, np.int32))
        for n, out in zip(far, outs):
            np.testing.assert_allclose(out, everything if n > 0 else np.zeros_like(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "way"),
    [(None, "tf32"), ("high", "tf32x3"), (("highest", "default"), "ieee"), ("F64_F64_F64", None)],
    ids=str,
)
def test_precisions_are_honoured_or_refused(precision, way):
    assert dot_precision(precision) == way
    floats, _ = inputs((5, 5))
    call = functools.partial(flash_attention, **floats, precision=precision, config=SMALL)
    if way is None:
        with pytest.raises(UnsupportedError, match="F64_F64_F64"):
            jax.jit(call).lower()
    else:
        jax.jit(call).lower()


Q_AT, K_AT = np.arange(50)[:, None], np.arange(70)
DENSE = {  # masks that leave tiles of 16 empty, or show them as a whole
    "causal": K_AT <= Q_AT + 20, "window": (K_AT <= Q_AT + 20) & (K_AT > Q_AT - 9),
    "padded right": K_AT + 0 * Q_AT < 37, "padded left": K_AT + 0 * Q_AT >= 37,
    "a gap": (K_AT < 20) | (K_AT + 0 * Q_AT >= 50),
    "a query sees nothing": (K_AT >= 0) & (Q_AT != 21),
}  # fmt: skip


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("name", DENSE)
def test_tiles_that_a_mask_hides_or_shows_as_a_whole(name, config):
    floats, rng = inputs((50, 70), (2, 1), (16, 16))
    mask = DENSE[name][None, None]
    hidden = ~DENSE[name].any(0)
    for array in ("key", "value"):
        floats[array][:, hidden] = np.nan
    got = run(floats, {"mask": mask}, cotangents_of(floats, rng), static(config, **EXACT))
    assert all(np.isfinite(x).all() for n, x in got.items() if n != "lse")
    assert all(np.all(got[n][:, hidden] == 0) for n in ("key", "value"))
    for array in ("key", "value"):
        floats[array][:, hidden] = 0
    judge(floats, rng, {"mask": mask}, config, repeats=1, **EXACT)


def test_what_queries_that_see_nothing_hold_reaches_nothing_over_many_blocks():
    floats, rng = inputs((90, 70), (2, 1), (16, 16))
    mask = np.broadcast_to(np.arange(90)[:, None] != 37, (90, 70)).copy()
    mask[80:] = False
    dead = ~mask.any(1)
    dout, dlse = cotangents_of(floats, rng)
    options = static(SMALL, **EXACT)
    wanted = run(floats, {"mask": mask[None, None]}, (dout * ~dead[:, None, None], dlse * ~dead[:, None]), options)
    floats["query"][:, dead] = dout[:, dead] = dlse[:, dead] = np.nan
    got = run(floats, {"mask": mask[None, None]}, (dout, dlse), options)
    for name, x in wanted.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


def test_all_that_hides_keys_at_once_in_tiles_of_more_rows():
    floats, rng = inputs((150, 300), (2, 1), (16, 16))
    others = {
        "mask": rng.random((2, 2, 150, 300)) < 0.9,
        "q_segment_ids": np.sort(rng.integers(-1, 3, (2, 150)), 1).astype(np.int32),
        "kv_segment_ids": np.sort(rng.integers(-1, 3, (2, 300)), 1).astype(np.int32),
        "kv_lengths": np.array([211, 300], np.int32),
    }
    options = {"causal": True, "q_offset": 150, "sliding_window": (170, 0)}
    judge(floats, rng, others, tiles((64, 128), (32, 64), (128, 32)), repeats=1, **options, **EXACT)


def test_a_mask_of_each_head_with_a_bias_of_all_examples():
    floats, rng = inputs((50, 70), (4, 2), (16, 16), batch=3)
    floats["bias"] = rng.normal(size=(1, 4, 50, 70)).astype(np.float32)
    mask = np.stack(list(DENSE.values())[:4])[None]
    judge(floats, rng, {"mask": mask}, SMALL, repeats=1, causal=True, q_offset=20, **EXACT)
