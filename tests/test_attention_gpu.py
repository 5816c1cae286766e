"""Attention on a real GPU: labels in the compiled program, tuning of a step, and every back end against the others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
from ejkernel_ops import ConfigSelectorChain, autotune_lowered, flash_attention
from ejkernel_ops.kernels.attention import cudnn
from ejkernel_ops.utils.meta import call_sites, split_label

from .reference import assert_as_good_as_plain, attention

pytestmark = pytest.mark.gpu


@pytest.fixture
def triton():
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton")


def arrays(batch, length, heads, kv_heads, dim, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def results(query, key, value, dout, **options):
    """Output and gradients."""
    out, pull = jax.vjp(functools.partial(flash_attention, **options), query, key, value)
    return dict(zip(("out", "query", "key", "value"), (out, *pull(dout))))


@pytest.mark.parametrize("backend", ["triton", "cudnn", None])
@pytest.mark.parametrize(("dim", "kv_heads", "causal"), [(64, 4, True), (128, 2, False), (256, 4, True)])
def test_numbers_are_as_good_as_those_of_plain_attention(triton, backend, dim, kv_heads, causal):
    if backend == "cudnn" and (reason := cudnn.missing()):
        pytest.skip(reason)
    given = arrays(2, 300 if backend != "cudnn" else 320, 4, kv_heads, dim)
    options = {"causal": causal, "deterministic": backend != "cudnn"}
    got = jax.jit(functools.partial(results, backend=backend, **options))(*given)
    named = dict(zip(("query", "key", "value"), map(np.asarray, given)))
    exact, plain = (attention(named, dout=np.asarray(given[3]), causal=causal, plain=plain) for plain in (False, True))
    assert_as_good_as_plain(got, exact, plain, jnp.bfloat16)


def test_labels_and_configs_are_in_the_compiled_program(triton):
    given = arrays(2, 256, 4, 4, 64)
    compiled = jax.jit(functools.partial(results, backend="triton", causal=True)).lower(*given).compile()
    text = compiled.as_text()
    assert text.count("triton_kernel_call") >= 3
    found = ek.find_labels_in_lowered(compiled)
    assert {split_label(label)[0] for label in found} == {"flash_attention@v1", "flash_attention_bwd@v1"}


def test_tuning_a_step_chooses_for_each_direction_and_the_step_runs_with_it(triton):
    given = arrays(2, 1024, 8, 8, 64)
    step = jax.jit(functools.partial(results, causal=True))
    selector = ConfigSelectorChain()
    result = autotune_lowered(selector, step.lower(*given))
    assert {entry.op_id_v for entry in result.entries} == {"flash_attention@v1", "flash_attention_bwd@v1"}
    for entry in result.entries:
        assert entry.cfg.backend in ("triton", "cudnn")
        assert {trial.status for trial in entry.trials} <= {"timed", "not_tried", "out_of_shared_memory"}, entry.trials
    before = step(*given)
    with result:
        chosen = {split_label(site.label)[0]: site.config for site in call_sites(step.lower(*given))}
        after = step(*given)
    for entry in result.entries:
        assert f"backend={entry.cfg.backend}" in chosen[entry.op_id_v]
        assert "overlay" in chosen[entry.op_id_v]
    for name, x in after.items():
        np.testing.assert_allclose(x.astype(np.float32), before[name].astype(np.float32), rtol=0.05, atol=0.05)


def test_gradients_are_the_same_bits_in_each_run(triton):
    given = arrays(2, 4096, 8, 8, 128)
    step = jax.jit(functools.partial(results, causal=True))
    first = step(*given)
    for _ in range(10):
        for name, x in step(*given).items():
            np.testing.assert_array_equal(x, first[name], err_msg=name)


def test_what_one_back_end_computes_forward_another_differentiates(triton):
    if reason := cudnn.missing():
        pytest.skip(reason)
    given = arrays(2, 512, 4, 4, 64)
    wanted = jax.jit(functools.partial(results, backend="xla", causal=True))(*given)
    for forward, backward in (("cudnn", "triton"), ("triton", "cudnn"), ("xla", "triton"), ("xla", "cudnn")):
        pinned = _pinned(given, {"flash_attention": forward, "flash_attention_bwd": backward})
        with ek.overlay_cache(pinned):
            got = jax.jit(functools.partial(results, causal=True, deterministic=False))(*given)
        for name, x in got.items():
            np.testing.assert_allclose(
                x.astype(np.float32), wanted[name].astype(np.float32), rtol=0.05, atol=0.05, err_msg=f"{forward} {name}"
            )


def _pinned(given, sides):
    """The heuristic config of one back end for each direction."""
    step = jax.jit(functools.partial(results, causal=True, deterministic=False))
    pinned = {}
    for site in call_sites(step.lower(*given)):
        op, call_key = split_label(site.label)
        key = ek.Key(ek.device_fingerprint(), op, call_key)
        inv = ek.registry.find_call(key)
        side = sides[op.split("@")[0]]
        pinned[key] = getattr(inv.kernel, f"heuristic_cfg_{side}")(inv)
    return pinned
