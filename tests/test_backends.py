"""Which back end attention gets, which it may have, and what is said about those that it cannot have."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from ejkernel_ops import UnsupportedError, flash_attention
from ejkernel_ops.config.selection import heuristic
from ejkernel_ops.kernels import on_triton
from ejkernel_ops.kernels.attention import backends, cudnn
from ejkernel_ops.utils.meta import call_sites

from .test_compiled import invocations, like

pytest.importorskip("triton", reason="needs triton, which there is for Linux")


@pytest.fixture
def hopper(monkeypatch):
    """As if there were a Hopper GPU with all that is needed."""
    monkeypatch.setattr(cudnn, "_machine", lambda: ((9, 0), 91900))
    monkeypatch.setattr(backends, "unavailable", lambda: None)
    backends._warn.cache_clear()


CHOICES = [  # what is asked for, and which back ends forward and backward get
    ({}, ("cudnn", "triton")),
    ({"deterministic": False}, ("cudnn", "cudnn")),
    ({"causal": False, "dtype": jnp.float16}, ("cudnn", "triton")),
    ({"options": ("bias",)}, ("triton", "triton")),
    ({"options": ("mask",), "deterministic": False}, ("triton", "triton")),
    ({"options": ("q_segment_ids", "kv_segment_ids")}, ("triton", "triton")),
    ({"options": ("dropout_seed",), "deterministic": False}, ("triton", "triton")),
    ({"options": ("sinks",)}, ("triton", "triton")),
    ({"options": ("kv_lengths",)}, ("cudnn", "triton")),
    ({"logits_soft_cap": 30.0}, ("triton", "triton")),
    ({"sliding_window": (100, 0)}, ("cudnn", "triton")),
    ({"sliding_window": (100, 100), "causal": False}, ("triton", "triton")),
    ({"dim": 100}, ("triton", "triton")),
    ({"dim": 320}, ("xla", "xla")),
    ({"dtype": jnp.float32}, ("triton", "triton")),
    ({"dtype": jnp.float32, "precision": "highest"}, ("xla", "xla")),
    ({"dtype": jnp.float32, "precision": "F64_F64_F64"}, ("xla", "xla")),
    ({"dtype": jnp.float64}, ("xla", "xla")),
]


@pytest.mark.parametrize(("asked", "chosen"), CHOICES, ids=str)
def test_the_fastest_back_end_that_can_do_a_call_is_chosen(hopper, asked, chosen):
    with jax.enable_x64(True):
        calls = invocations(**({"dim": 64} | asked))
    for inv, backend in zip(calls, chosen):
        cfg = heuristic(inv)
        assert cfg.backend == backend
        assert inv.kernel.illegal(inv, cfg) is None


FIXED_ORDER = [({"dim": 64}, "triton"), ({"dim": 128}, "cudnn"), ({"dim": 256}, "cudnn"),
               ({"dim": 256, "sliding_window": (100, 0)}, "triton"), ({"dim": 256, "options": ("mask",)}, "triton"),
               ({"dim": 64, "deterministic": False}, "cudnn")]  # fmt: skip


@pytest.mark.parametrize(("asked", "chosen"), FIXED_ORDER, ids=str)
def test_where_cudnn_adds_in_a_fixed_order_it_gets_the_gradients_that_it_is_faster_at(
    hopper, monkeypatch, asked, chosen
):
    monkeypatch.setattr(cudnn, "_FIXED_ORDER", True)
    assert heuristic(invocations(**asked)[1]).backend == chosen


def test_candidates_are_those_of_all_back_ends_that_can_do_a_call(hopper):
    for deterministic, expected in ((True, {"triton", "xla"}), (False, {"triton", "xla", "cudnn"})):
        backward = invocations(deterministic=deterministic)[1]
        assert {cfg.backend for cfg in backward.kernel.candidate_cfgs(backward)} == expected


@pytest.mark.cpu
def test_on_a_cpu_it_is_xla():
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    text = jax.jit(lambda x: flash_attention(x, x, x)).lower(x).as_text()
    assert "custom_call" not in text.replace("@Sharding", "")


MISSING = {
    "triton": (backends, "unavailable", "triton is not installed: pip install 'triton==3.6.*'"),
    "cudnn": (cudnn, "_machine", "cuDNN is not found; install jax with its extra cuda13"),
}


def test_a_cudnn_that_is_too_old_is_told_with_the_fix(hopper, monkeypatch):
    monkeypatch.setattr(cudnn, "_machine", lambda: ((9, 0), 91002))
    forward = invocations()[0]
    with pytest.warns(UserWarning, match=r"cuDNN is 9\.10\.2, 9\.11 is needed: install a newer"):
        assert heuristic(forward).backend == "triton"


def test_gpus_without_tensor_cores_for_bfloat16_get_xla(hopper, monkeypatch):
    monkeypatch.setattr(cudnn, "_machine", lambda: ((7, 5), 91900))
    monkeypatch.setattr(on_triton, "_capability", lambda: (7, 5))
    for inv in invocations():
        assert heuristic(inv).backend == "xla"
        assert "8.0" in inv.kernel.why_not(inv, "triton")


@pytest.mark.parametrize("backend", MISSING)
def test_a_missing_back_end_is_told_once_with_the_fix_and_the_next_one_is_taken(hopper, monkeypatch, backend):
    module, name, reason = MISSING[backend]
    monkeypatch.setattr(module, name, lambda: reason)
    calls = [*invocations(), *invocations(causal=False)]
    with pytest.warns(UserWarning, match="attention would run on") as caught:
        chosen = {heuristic(inv).backend for inv in calls}
    assert backend not in chosen
    texts = [str(warning.message) for warning in caught]
    assert all(reason in text for text in texts)
    assert len(texts) == 1


def test_what_a_call_rules_out_is_no_reason_to_warn(hopper):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked, _ in CHOICES[:12]:
            for inv in invocations(dim=64, **asked):
                heuristic(inv)


def test_the_choice_says_which_back_ends_could_not_do_the_call_and_why(hopper):
    x = like(2, 64, 4, 64)
    step = jax.jit(jax.grad(lambda x: flash_attention(x, x, x, causal=True).astype(jnp.float32).sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = step.trace(x).lower(lowering_platforms=("cuda",))
    notes = {site.label.split("@")[0]: site.config for site in call_sites(lowered)}
    assert "deterministic=False" in notes["ejkernel_ops#flash_attention_bwd"]
    assert "backend=triton" in notes["ejkernel_ops#flash_attention_bwd"]
    assert "cudnn:" not in notes["ejkernel_ops#flash_attention"]
    assert "backend=cudnn" in notes["ejkernel_ops#flash_attention"]


def test_an_explicit_back_end_that_cannot_do_a_call_is_refused_with_the_reason(hopper):
    x = like(2, 64, 4, 64)
    with pytest.raises(UnsupportedError, match="soft cap"):
        jax.jit(lambda x: flash_attention(x, x, x, logits_soft_cap=5.0, backend="cudnn")).trace(x).lower(
            lowering_platforms=("cuda",)
        )
