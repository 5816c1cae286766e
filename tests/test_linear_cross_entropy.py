"""`linear_cross_entropy` on XLA: its numbers, and each rule of its documentation as a test."""

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
    Kernel,
    Key,
    LinearCrossEntropyConfig,
    UnsupportedError,
    autotune_lowered,
    device_fingerprint,
    find_labels_in_lowered,
    linear_cross_entropy,
)
from ejkernel_ops.kernels import LINEAR_CROSS_ENTROPY
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.meta import call_sites, split_label

from .reference import assert_as_good_as_plain, case_name, mostly_once, pairwise
from .reference import linear_cross_entropy as reference


def made(rows):
    """Gradients made in the forward."""
    return LinearCrossEntropyConfig(recompute=False, fwd=FwdParams(blocksize_m=rows))


def again(fwd, bwd):
    """Gradients from logits that are computed again, in chunks of rows by entries."""
    return LinearCrossEntropyConfig(
        recompute=True,
        fwd=FwdParams(blocksize_m=fwd[0], blocksize_n=fwd[1]),
        bwd=BwdParams(blocksize_m=bwd[0], blocksize_n=bwd[1]),
    )


AGAIN = again((5, 8), (4, 16))


@functools.partial(jax.jit, static_argnames="statics")
def run(arrays, labels, dout, statics):
    """Loss and the gradient of every array."""
    out, pull = jax.vjp(lambda arrays: linear_cross_entropy(labels=labels, **arrays, **dict(statics)), arrays)
    return {"out": out, **pull(dout)[0]}


def inputs(rows=(7,), features=10, vocab=37, bias=True, weighted=True, layout="io", dtype=np.float32, seed=0):
    """Random arrays, labels of which some are ignored, and a random generator."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    arrays = {
        "hidden": rng.normal(size=(*rows, features)).astype(dtype),
        "weight": rng.normal(size=(features, vocab)).astype(dtype),
        **({"bias": rng.normal(size=vocab).astype(dtype)} if bias else {}),
        **({"token_weights": rng.uniform(0.1, 2, size=rows).astype(np.float32)} if weighted else {}),
    }
    labels = np.where(rng.random(rows) < 0.3, -100, rng.integers(0, vocab, rows)).astype(np.int32)
    return arrays | ({"weight": arrays["weight"].T} if layout == "oi" else {}), labels, rng


FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "rows": ((), (1,), (2, 3), (23,)),
    "vocab": (37, 64, 1),
    "reduction": ("mean", "sum", "none"),
    "bias": (False, True),
    "weighted": (False, True),
    "layout": ("io", "oi"),
    "logits_soft_cap": (None, 3.0),
    "z_loss": (0.0, 0.1),
    "label_smoothing": (0.0, 0.2),
    "logits_dtype": (None, "float32"),
    "chunks": (None, "made", "again"),
}


def judge(case, config):
    """Checks loss and gradients of a case of the table against the reference."""
    seed = zlib.crc32(case_name(case).encode())
    given = (case["rows"], 10, case["vocab"], *(case[n] for n in ("bias", "weighted", "layout", "dtype")))
    options = {n: case[n] for n in ("reduction", "logits_soft_cap", "z_loss", "label_smoothing", "logits_dtype")}
    options["weight_layout"] = case["layout"]
    results = []
    for repeat in range(4):  # errors of a few numbers compare badly
        arrays, labels, rng = inputs(*given, seed + repeat)
        dout = rng.normal(size=case["rows"] if case["reduction"] == "none" else ()).astype(np.float32)
        got = run(arrays, labels, dout, (("config", config), *sorted(options.items())))
        results.append((got, *(reference(arrays, labels, dout=dout, **options, plain=p) for p in (False, True))))
    stacked = [{n: np.stack([r[n] for r in column]) for n in got} for column in zip(*results)]
    assert_as_good_as_plain(*stacked, np.promote_types(arrays["hidden"].dtype, arrays["weight"].dtype))
    assert got["out"].dtype == np.float32
    assert all(got[n].dtype == a.dtype and got[n].shape == a.shape for n, a in arrays.items())


@pytest.mark.parametrize("case", mostly_once(pairwise(FACTORS)), ids=case_name)
def test_loss_and_gradients_err_no_more_than_a_plain_computation(case):
    config = {None: None, "made": made(4), "again": AGAIN}[case["chunks"]]
    if case["reduction"] == "none" and config is not None and not config.recompute:
        config = AGAIN
    judge(case, config)


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        arrays, labels, _ = inputs(dtype=np.float64)
        for config in (made(3), AGAIN):
            got = run(arrays, labels, np.float64(1.7), (("config", config), ("z_loss", 0.1)))
            exact, plain = (reference(arrays, labels, dout=1.7, z_loss=0.1, plain=p) for p in (False, True))
            assert_as_good_as_plain(got, exact, plain, np.float64)
        assert got["out"].dtype == np.float64


def test_mixed_types_give_gradients_of_their_own():
    arrays, labels, _ = inputs()
    arrays["hidden"] = arrays["hidden"].astype(jnp.bfloat16)
    got = run(arrays, labels, np.float32(1), ())
    exact, plain = (reference(arrays, labels, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, jnp.bfloat16)
    assert (got["hidden"].dtype, got["weight"].dtype) == (jnp.bfloat16, np.float32)


@pytest.mark.parametrize("config", [made(3), AGAIN], ids=["made", "again"])
def test_a_wide_weight_may_be_multiplied_in_bfloat16_and_its_gradient_is_not_rounded_to_it(config):
    arrays, labels, _ = inputs((23,))
    got = run(arrays, labels, np.float32(1), (("config", config), ("dtype", jnp.bfloat16)))
    low = {n: x.astype(jnp.bfloat16 if n in ("hidden", "weight") else x.dtype) for n, x in arrays.items()}
    exact, plain = (reference(low, labels, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, jnp.bfloat16)
    assert all(got[n].dtype == np.float32 for n in arrays)
    assert np.any(got["weight"] != got["weight"].astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("config", [made(3), AGAIN], ids=["made", "again"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_weight_of_float64_may_be_multiplied_in_less(dtype, config):
    with jax.enable_x64(True):
        arrays, labels, _ = inputs((23,), dtype=np.float64)
        got = run(arrays, labels, np.float32(1), (("config", config), ("dtype", dtype)))
        low = {n: x.astype(dtype if n in ("hidden", "weight") else np.float32) for n, x in arrays.items()}
        exact, plain = (reference(low, labels, plain=p) for p in (False, True))
        assert_as_good_as_plain(got, exact, plain, dtype)
        assert all(got[n].dtype == np.float64 for n in ("hidden", "weight", "bias"))


@pytest.mark.parametrize("name", ["dtype", "logits_dtype"])
def test_types_of_products_are_floats(name):
    arrays, labels, _ = inputs()
    with pytest.raises(TypeError, match=f"{name} is .*int32.*expected a float type"):
        linear_cross_entropy(labels=labels, **arrays, **{name: np.int32})


# What rows count


@pytest.mark.parametrize("config", [None, AGAIN], ids=["made", "again"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_that_are_all_ignored_give_no_loss_and_no_gradient(reduction, config):
    arrays, labels, _ = inputs()
    arrays["hidden"] = np.full_like(arrays["hidden"], np.nan)
    dout = np.ones(labels.shape if reduction == "none" else (), np.float32)
    got = run(arrays, np.full_like(labels, -100), dout, (("config", config), ("reduction", reduction)))
    assert all(not np.any(x) for x in got.values())


@pytest.mark.parametrize("config", [made(3), AGAIN], ids=["made", "again"])
def test_what_ignored_rows_hold_reaches_nothing(config):
    arrays, labels, _ = inputs((23,))
    hidden = np.where((labels == -100)[:, None], np.nan, arrays["hidden"])
    one, other = (
        run(arrays | {"hidden": h}, labels, np.float32(1), (("config", config),)) for h in (hidden, arrays["hidden"])
    )
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


def test_an_ignored_label_may_be_one_of_the_vocabulary():
    arrays, labels, _ = inputs((23,))
    labels = np.where(labels == -100, 0, labels)
    got = run(arrays, labels, np.float32(1), (("ignore_index", 0),))
    exact, plain = (reference(arrays, labels, ignore_index=0, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, np.float32)


def test_weights_that_sum_to_nothing_give_no_mean():
    arrays, labels, _ = inputs((4,))
    arrays["token_weights"] = np.zeros(4, np.float32)
    assert linear_cross_entropy(labels=labels, **arrays) == 0


def test_labels_out_of_range_are_an_error_where_they_are_known_and_nan_where_they_are_not():
    arrays, _, _ = inputs((3,), weighted=False)
    for wrong in (37, -1):
        labels = np.array([1, wrong, -100], np.int32)
        with pytest.raises(ValueError, match=rf"labels has 1 values out of range, such as {wrong}; expected 0 to 36"):
            linear_cross_entropy(labels=labels, **arrays)
        got = run(arrays, labels, np.ones(3, np.float32), (("reduction", "none"),))
        np.testing.assert_array_equal(np.isnan(got["out"]), [False, True, False])
        np.testing.assert_array_equal(np.isnan(got["hidden"]).any(1), [False, True, False])


def test_a_shift_of_all_logits_changes_nothing():
    """Logits of small integers, so that the shifted ones are as exact."""
    rng = np.random.default_rng(0)
    arrays = {"hidden": rng.integers(-2, 3, (8, 4)), "weight": rng.integers(-2, 3, (4, 16)), "bias": np.zeros(16)}
    arrays, labels = {n: a.astype(np.float32) for n, a in arrays.items()}, rng.integers(0, 16, 8)
    for config in (made(4), AGAIN):
        near, far = (
            run(arrays | {"bias": arrays["bias"] + shift}, labels, np.float32(1), (("config", config),))
            for shift in (0, 1e4)
        )
        for name in near:
            np.testing.assert_allclose(far[name], near[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_entries_that_a_bias_of_minus_infinity_hides_have_no_part():
    arrays, labels, _ = inputs((6,), weighted=False)
    labels = np.abs(labels) % 20
    hidden = arrays | {"bias": np.where(np.arange(37) < 20, arrays["bias"], -np.inf).astype(np.float32)}
    short = arrays | {"weight": arrays["weight"][:, :20], "bias": arrays["bias"][:20]}
    for config in (made(4), AGAIN):
        one, other = (run(a, labels, np.float32(1), (("config", config),)) for a in (hidden, short))
        np.testing.assert_allclose(one["out"], other["out"], rtol=1e-6)
        np.testing.assert_allclose(one["hidden"], other["hidden"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(one["weight"][:, :20], other["weight"], rtol=1e-5, atol=1e-7)
        assert not np.any(one["weight"][:, 20:])


def test_no_rows_give_no_loss():
    arrays, labels, _ = inputs((0,))
    got = run(arrays, labels, np.float32(1), ())
    assert got["out"] == 0
    assert got["hidden"].shape == (0, 10)
    assert not np.any(got["weight"])


BYTES = np.array([155, 156, 157, 65])


@pytest.mark.parametrize(("kind", "ignore_index"), [
    ("uint8", -100), ("uint8", 156), ("uint8", 300), ("int16", -100), ("uint16", 157), ("int32", 2**31),
    ("uint32", -(2**40)), ("uint32", 156),
])  # fmt: skip
def test_labels_of_every_type_are_those_numbers(kind, ignore_index):
    hidden, weight = np.random.default_rng(0).normal(size=(4, 8)), np.random.default_rng(1).normal(size=(8, 256))
    logits = hidden @ weight
    want = np.log(np.exp(logits).sum(-1)) - logits[np.arange(4), BYTES]
    fn = functools.partial(linear_cross_entropy, reduction="none", ignore_index=ignore_index)
    for run in (fn, jax.jit(fn)):
        got = run(jnp.float32(hidden), jnp.float32(weight), jnp.asarray(BYTES, kind))
        np.testing.assert_allclose(got, np.where(ignore_index == BYTES, 0, want), rtol=1e-4)


@pytest.mark.parametrize(("label", "kind", "ignore_index"), [
    (2**32 - 100, "uint32", -100), (-56, "int8", 200), (-100, "int8", 156), (65436, "uint16", -100),
])  # fmt: skip
def test_numbers_of_the_same_bits_as_the_ignored_one_are_out_of_range(label, kind, ignore_index):
    hidden, weight, labels = jnp.ones((2, 4)), jnp.ones((4, 9)), np.array([label, 1], kind)
    fn = functools.partial(linear_cross_entropy, reduction="none", ignore_index=ignore_index)
    assert np.isnan(jax.jit(fn)(hidden, weight, labels)).tolist() == [True, False]
    with pytest.raises(ValueError, match=f"labels has 1 values out of range, such as {label}"):
        fn(hidden, weight, labels)


def test_what_a_config_leaves_open_fits_to_what_it_says():
    arrays, labels, _ = inputs(vocab=37)
    want = run(arrays, labels, np.float32(1), ())
    for config in (LinearCrossEntropyConfig(fwd=FwdParams(blocksize_n=8)),
                   LinearCrossEntropyConfig(fwd=FwdParams(blocksize_m=2))):  # fmt: skip
        got = run(arrays, labels, np.float32(1), (("config", config),))
        for name, x in want.items():
            np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-6)


def test_numbers_may_be_scalars_of_jax():
    arrays, labels, _ = inputs()
    both = [{"z_loss": 0.5, "logits_soft_cap": 2.0, "label_smoothing": 0.25}]
    both.append({name: jnp.float32(x) for name, x in both[0].items()})
    first, second = (linear_cross_entropy(labels=labels, **arrays, **options) for options in both)
    assert first == second


# Programs


SIZE = {"hidden": (4096, 256), "weight": (256, 32000)}
LOGITS = 1 << 27 if jax.default_backend() == "gpu" else 1 << 23  # that a chunk holds


@functools.cache
def compiled(config):
    def loss(arrays, labels):
        return linear_cross_entropy(labels=labels, **arrays, config=config)

    arrays = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in SIZE.items()}
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)
    return jax.jit(jax.value_and_grad(loss)).lower(arrays, labels).compile()


@pytest.mark.cpu  # GPUs hold more logits at once
@pytest.mark.parametrize("config", [None, LinearCrossEntropyConfig(recompute=True)], ids=["made", "again"])
def test_memory_is_that_of_a_chunk(config):
    """All logits would be 500 MiB; of gradients that are not made in the forward nothing is held."""
    assert compiled(config).memory_analysis().temp_size_in_bytes < 100 << 20
    assert "4096,32000" not in compiled(config).as_text()


def test_an_evaluation_makes_no_gradients_and_has_a_key_of_its_own():
    arrays, labels, _ = inputs()

    def labels_of(fn):
        return find_labels_in_lowered(jax.jit(fn).lower(arrays))

    def loss(arrays):
        return linear_cross_entropy(labels=labels, **arrays)

    (evaluated,), differentiated = labels_of(loss), labels_of(jax.grad(loss))
    assert [split_label(text)[0] for text in differentiated] == [
        "linear_cross_entropy@v1",
        "linear_cross_entropy_bwd@v1",
    ]
    assert evaluated != differentiated[0]
    assert jax.jit(loss).lower(arrays).as_text().count("dot_general") == 1


def test_the_weight_of_either_layout_is_not_copied():
    arrays, labels, _ = inputs(features=8, vocab=8)
    lowered = jax.jit(functools.partial(linear_cross_entropy, weight_layout="oi")).lower(
        arrays["hidden"], arrays["weight"], labels
    )
    assert "transpose" not in lowered.as_text()


def test_a_weight_that_is_not_trained_costs_no_gradient():
    """Of the sum that the forward would make nothing is left in the program."""

    def temporary(argnums):
        def loss(hidden, weight, labels):
            return linear_cross_entropy(hidden, weight, labels, config=made(16))

        shapes = ((64, 64), jnp.float32), ((64, 4096), jnp.float32), ((64,), jnp.int32)
        lowered = jax.jit(jax.grad(loss, argnums)).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))
        return lowered.compile().cost_analysis()["flops"]

    assert temporary(0) < 0.8 * temporary((0, 1))


# Transforms


def plain(hidden, weight, labels, bias=None):
    """The mean loss in plain JAX."""
    logits = hidden @ weight + (0 if bias is None else bias)
    picked = jnp.take_along_axis(logits, jnp.where(labels < 0, 0, labels)[..., None], -1)[..., 0]
    losses = jnp.where(labels < 0, 0, jax.nn.logsumexp(logits, -1) - picked)
    return losses.sum() / jnp.maximum((labels >= 0).sum(), 1)


def scanned(fn):
    """The loss of three steps, each rematerialised."""

    def steps(hidden, weight, labels):
        def step(total, part):
            return total + jax.checkpoint(fn)(hidden * part, weight, labels), None

        return jax.lax.scan(step, 0.0, jnp.arange(1.0, 4.0))[0]

    return steps


def gradients(fn):
    return jax.grad(fn, argnums=(0, 1))


TRANSFORMS = {
    "grad": gradients,
    "grad(vmap)": lambda f: gradients(lambda h, w, y: jax.vmap(f, (0, None, 0))(h, w, y).sum()),
    "vmap(grad)": lambda f: jax.vmap(gradients(f), (0, None, 0)),
    "grad(scan(remat))": lambda f: gradients(scanned(f)),
    "value_and_grad in a scan": lambda f: (
        lambda h, w, y: jax.lax.scan(
            lambda c, i: (c, jax.value_and_grad(f, (0, 1))(h * i, w, y)), 0, jnp.arange(1.0, 3.0)
        )[1]
    ),
    "grad(grad)": lambda f: gradients(lambda h, w, y: (jax.grad(f)(h, w, y) ** 2).sum()),
    "jvp": lambda f: lambda h, w, y: jax.jvp(lambda h, w: f(h, w, y), (h, w), (jnp.cos(h), jnp.sin(w))),
    "jvp(grad)": lambda f: lambda h, w, y: jax.jvp(lambda h: jax.grad(f)(h, w, y), (h,), (jnp.cos(h),)),
}


@pytest.mark.parametrize("config", [made(2), again((2, 8), (2, 8))], ids=["made", "again"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_it_are_those_of_the_plain_loss(name, config):
    arrays, labels, _ = inputs((2, 3), 4, 11, bias=False, weighted=False)
    make = TRANSFORMS[name]
    ours = functools.partial(linear_cross_entropy, config=config)
    given = arrays["hidden"], arrays["weight"], labels
    got, want = (jax.jit(make(fn))(*given) for fn in (ours, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_of_losses_is_one_kernel_and_one_gradient_of_the_weight(reduction):
    arrays, labels, _ = inputs((4, 3), 5, 11)

    def loss(hidden, labels, token_weights, weight):
        options = {"bias": arrays["bias"], "token_weights": token_weights, "reduction": reduction}
        return linear_cross_entropy(hidden, weight, labels, **options).sum()

    def batch(hidden, weight):
        return jax.vmap(loss, (0, 0, 0, None))(hidden, labels, arrays["token_weights"], weight).sum()

    def one_by_one(hidden, weight):
        return sum(loss(*given, weight) for given in zip(hidden, labels, arrays["token_weights"]))

    given = arrays["hidden"], arrays["weight"]
    got, want = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(*given) for fn in (batch, one_by_one))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    sites = call_sites(jax.jit(jax.grad(batch, argnums=(0, 1))).lower(*given))
    assert sorted((split_label(site.label)[0], site.executions) for site in sites) == [
        ("linear_cross_entropy@v1", 1), ("linear_cross_entropy_bwd@v1", 1),
    ]  # fmt: skip


def test_a_gradient_outside_of_jit_is_that_inside():
    arrays, labels, _ = inputs((5,))
    for config in (made(2), AGAIN):
        loss = functools.partial(linear_cross_entropy, labels=labels, config=config)
        eager = jax.grad(lambda arrays, loss=loss: loss(**arrays))(arrays)
        inside = run(arrays, labels, np.float32(1), (("config", config),))
        for name, x in eager.items():
            np.testing.assert_allclose(x, inside[name], rtol=1e-5, atol=1e-6, err_msg=name)


# Tuning


def lowered_step(rows=64, vocab=1500):
    shapes = ((rows, 8), jnp.float32), ((8, vocab), jnp.float32), ((rows,), jnp.int32)
    return jax.jit(jax.grad(linear_cross_entropy, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))


def test_a_step_is_tuned_in_both_directions_and_the_forward_with_its_gradients():
    result = autotune_lowered(ConfigSelectorChain(tuner=Autotuner(num_iters=1)), lowered_step(), strict=True)
    entries = {e.op_id_v.split("@")[0]: e for e in result.entries}
    assert sorted(entries) == ["linear_cross_entropy", "linear_cross_entropy_bwd"]
    tried = {(t.cfg.recompute, t.status) for t in entries["linear_cross_entropy"].trials}
    assert tried == {(False, "timed"), (True, "timed")}


def test_candidates_are_legal_and_hold_no_more_logits_than_a_chunk_may():
    lowered = lowered_step(20000, 9000)
    for text in find_labels_in_lowered(lowered):
        inv = find_call(Key(device_fingerprint(), *split_label(text)))
        configs = inv.kernel.candidate_cfgs(inv)
        tiles = [cfg.fwd or cfg.bwd for cfg in configs]
        assert len(configs) >= 2
        assert all(inv.kernel.illegal(inv, cfg) is None for cfg in configs)
        assert max(tile.blocksize_m * tile.blocksize_n for tile in tiles) <= LOGITS


class Scaled(Kernel):
    """Twice a number; its gradient is what the forward has left for it."""

    name = "scaled_with_gradient"
    tune_with_backward = True

    def run(self, x, *, cfg):
        return 2 * x

    def fwd_with_residuals(self, x, *, cfg):
        return 2 * x, jnp.full_like(x, 2 if cfg == "right" else 3)

    def vjp(self, residuals, out, cotangent, x, *, cfg):
        return (residuals * cotangent,)

    def heuristic_cfg(self, inv):
        return "right"

    def candidate_cfgs(self, inv):
        return ["right", "wrong"]


def test_a_forward_that_leaves_wrong_gradients_is_found():
    scaled = Scaled()
    lowered = jax.jit(jax.grad(lambda x: scaled(x).sum())).lower(jnp.ones(8))
    (text,) = (t for t in find_labels_in_lowered(lowered) if "_bwd" not in t)
    tuned = Autotuner(num_iters=1).tune(find_call(Key(device_fingerprint(), *split_label(text))))
    assert {t.cfg: t.status for t in tuned.trials} == {"right": "timed", "wrong": "wrong"}


# Arguments


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


BAD = [  # argument, value, type of the error, what its message must say besides the argument's name
    ("hidden", ones(), ValueError, ["()", "(..., in)"]),
    ("hidden", ones(4, 5), ValueError, ["5 features", "takes 3", "'io'", "weight_layout='oi'"]),
    ("hidden", ones(4, 3, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("weight", ones(3), ValueError, ["(3,)", "two axes"]),
    ("weight", ones(3, 0), ValueError, ["(3, 0)", "vocabulary"]),
    ("labels", ones(5, dtype=jnp.int32), ValueError, ["(5,)", "(4,)"]),
    ("labels", ones(4), TypeError, ["float32", "ints"]),
    ("bias", ones(3), ValueError, ["(3,)", "(5,)"]),
    ("bias", ones(5, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("token_weights", ones(5), ValueError, ["(5,)", "(4,)"]),
    ("token_weights", ones(4, dtype=jnp.bool_), TypeError, ["bool", "float"]),
    ("logits_soft_cap", 0.0, ValueError, ["0.0", "above 0"]),
    ("logits_soft_cap", "30", TypeError, ["'30'", "number"]),
    ("z_loss", -1.0, ValueError, ["-1.0", "at least 0"]),
    ("z_loss", float("nan"), ValueError, ["nan", "at least 0"]),
    ("label_smoothing", 1.5, ValueError, ["1.5", "[0, 1]"]),
    ("ignore_index", 0.0, TypeError, ["0.0", "int"]),
    ("reduction", "avg", ValueError, ["'avg'", "'mean'", "'none'"]),
    ("weight_layout", "vi", ValueError, ["'vi'", "'io'", "'oi'"]),
    ("precision", 3, ValueError, ["3", "highest"]),
    ("vocab_axis", "model", ConfigError, ["'model'", "jax.shard_map"]),
    ("config", {"blocksize_m": 4}, ConfigError, ["blocksize_m", "LinearCrossEntropyConfig"]),
    ("config", LinearCrossEntropyConfig(backend="xla", fwd=FwdParams(num_warps=4)), ConfigError, ["num_warps=4"]),
    ("backend", "cudnn", UnsupportedError, ["'cudnn'", "xla"]),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), BAD, ids=[f"{n}-{e.__name__}-{i}" for i, (n, _, e, _) in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name_with_what_came_and_what_was_expected(name, value, error, words):
    arrays, options = {"hidden": ones(4, 3), "weight": ones(3, 5), "labels": ones(4, dtype=jnp.int32)}, {}
    (arrays if isinstance(value, jax.ShapeDtypeStruct) else options)[name] = value
    with pytest.raises(error) as caught:
        jax.jit(lambda arrays: linear_cross_entropy(**arrays, **options)).lower(arrays)
    assert all(word in str(caught.value) for word in [name, *words]), str(caught.value)


def test_gradients_in_the_forward_need_a_reduction_and_the_whole_vocabulary():
    arrays, labels, _ = inputs()
    with pytest.raises(ConfigError, match="gradients wait for the cotangents"):
        jax.grad(lambda a: linear_cross_entropy(labels=labels, **a, reduction="none", config=made(4)).sum())(arrays)
    small = LinearCrossEntropyConfig(recompute=False, fwd=FwdParams(blocksize_n=8))
    with pytest.raises(ConfigError, match="blocksize_n=37"):
        jax.grad(lambda a: linear_cross_entropy(labels=labels, **a, config=small))(arrays)
    with pytest.raises(ConfigError, match="recompute is 1"):
        LinearCrossEntropyConfig(recompute=1)


def test_the_kernel_is_known_by_its_name():
    assert LINEAR_CROSS_ENTROPY.op_id_v == "linear_cross_entropy@v1"
