"""The Triton kernels compile for Hopper into what they are written for: looked at without a GPU.

A few here; `make kernels` looks at every candidate of more calls, for Ampere too.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel_ops import AttentionConfig, Invocation
from ejkernel_ops.execution.check import program
from ejkernel_ops.kernels import ATTENTION, ATTENTION_BWD
from ejkernel_ops.kernels.attention import tiles

from .compiled import compiled, launches

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
pytestmark = pytest.mark.once

HOPPER_SHARED = 232448
MOST_SPILLS = 16  # bytes of a thread, where no option needs registers


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def invocations(dim=128, length=2048, heads=8, kv_heads=8, v_dim=None, dtype=jnp.bfloat16, options=(), **statics):
    """The forward and the backward call of attention, on a GPU that need not be there."""
    query = like(2, length, heads, dim, dtype=dtype)
    key, value = (like(2, length, kv_heads, n, dtype=dtype) for n in (dim, v_dim or dim))
    ids = like(2, length, dtype=jnp.int32)
    given = {
        "bias": like(1, heads, length, length, dtype=dtype), "mask": like(1, 1, length, length, dtype=jnp.bool_),
        "q_offset": like(2, dtype=jnp.int32), "q_segment_ids": ids, "kv_segment_ids": ids,
        "kv_lengths": like(2, dtype=jnp.int32), "sinks": like(heads), "dropout_seed": like(2, 5, dtype=jnp.uint32),
    }  # fmt: skip
    arrays = (query, key, value, *(x if name in options else None for name, x in given.items()))
    plain = dict(
        causal=True, sliding_window=None, static_offset=0, softmax_scale=dim**-0.5, logits_soft_cap=None,
        dropout_rate=0.1 if "dropout_seed" in options else 0.0, precision=None, deterministic=True,
    )  # fmt: skip
    plain |= statics
    out, lse = like(2, length, heads, v_dim or dim, dtype=dtype), like(2, length, heads, dtype=jnp.float32)
    needs = (True, True, True, "bias" in options, *[False] * 5, "sinks" in options, False)
    return (
        Invocation(ATTENTION, arrays, plain, platform="cuda"),
        Invocation(ATTENTION_BWD, (*arrays, out, lse, out, None), plain, needs=needs, platform="cuda"),
    )


def kernels_of(inv, configs):
    """Each kernel of some configs once, with what its tile needs by the formula."""
    found, room = {}, tiles.Room.of(inv)
    for cfg in configs:
        if cfg.fwd:
            needs = {"flash_attention": room.forward(tiles.forward_tile(cfg.fwd))}
        else:
            needs = {
                "flash_attention_bwd_kv": room.keys(tiles.keys_tile(cfg.bwd)),
                "flash_attention_bwd_q": room.queries(tiles.queries_tile(cfg.bwd)),
            }
            if inv.needs[3]:
                needs["flash_attention_bwd_bias"] = room.bias_gradient(tiles.bias_tile(room))
        made = launches(program(inv, cfg), *inv.operands)
        assert set(needs) <= {launch.name for launch in made}
        found |= {launch: needs[launch.name] for launch in made if launch.name in needs}
    return found


def triton_configs(inv):
    return [cfg for cfg in inv.kernel.candidate_cfgs(inv) if cfg.backend == "triton"]


def assert_fit(inv, configs, most_spills=None, capability=90, only=""):
    """Compiles the kernels of some configs, and looks at shared memory, spills and tensor cores."""
    for launch, needed in kernels_of(inv, configs).items():
        if not launch.name.endswith(only):
            continue
        made = compiled(launch, capability)
        spec = dict(launch.constants)["spec"]
        text = f"{launch.name} {launch.num_warps} warps {launch.num_stages} stages {spec}: {made}, formula {needed}"
        assert made.shared <= min(HOPPER_SHARED, 1.05 * needed.shared), text
        # Some loops get fewer stages; in float32 operands stay in registers; of wide heads one gradient needs less.
        if most_spills is not None and not (spec.is_wide and launch.name.endswith("_kv")):
            assert made.shared >= 0.95 * needed.shared, text
        if most_spills is not None:
            assert made.spills <= most_spills, text
        if capability == 90 and inv.arguments["query"].dtype != jnp.float32:
            assert made.wgmma, text
            assert not made.mma, text


@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_is_chosen_without_tuning_fits_hopper_and_spills_nothing(dim, direction):
    inv = invocations(dim)[direction]
    assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)], MOST_SPILLS)


OPTIONS = [
    ("bias", "kv_lengths", "sinks"), ("mask", "q_offset"), ("q_segment_ids", "kv_segment_ids"), ("dropout_seed",),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_options_compile_with_tiles_that_are_not_square(options):
    odd = tiles.backward_config(tiles.Tile(32, 64, 4, 2), tiles.Tile(64, 32, 4, 2))
    forward, backward = invocations(64, options=options, sliding_window=(100, 0))
    assert_fit(forward, [tiles.forward_config(tiles.Tile(64, 32, 4, 2))])
    assert_fit(backward, [odd])


def test_other_types_and_dims_compile():
    for calls in (invocations(80, v_dim=48, dtype=jnp.float16), invocations(64, dtype=jnp.float32)):
        for inv in calls:
            assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)])


@pytest.mark.parametrize(("dim", "dtype"), [(256, jnp.bfloat16), (128, jnp.float32)])
def test_the_gradient_of_a_bias_fits_where_heads_are_wide(dim, dtype):
    inv = invocations(dim, length=256, dtype=dtype, options=("bias",))[1]
    assert_fit(inv, [inv.kernel.heuristic_cfg_triton(inv)], only="_bias")


@pytest.mark.parametrize("smaller", [101376, 49152])
def test_the_heuristic_fits_devices_with_less_shared_memory(monkeypatch, smaller):
    monkeypatch.setattr(tiles, "shared_memory", lambda platform: smaller)
    for dim in (64, 128, 256):
        for dtype in (jnp.bfloat16, jnp.float32):
            for inv in invocations(dim, dtype=dtype, options=("bias", "mask", "dropout_seed")):
                cfg = inv.kernel.heuristic_cfg_triton(inv)
                reason = inv.kernel.illegal(inv, cfg)
                assert reason == inv.kernel.why_not(inv, "triton")
                assert reason is None or (dim == 256 and dtype == jnp.float32), cfg


def test_a_tile_without_room_is_illegal_with_the_reason():
    forward, backward = invocations(128)
    for tile, words in (
        (tiles.Tile(128, 128, 8, 4), "shared memory"), (tiles.Tile(128, 128, 4, 2), "registers"),
        (tiles.Tile(48, 64, 4, 2), "powers of two"), (tiles.Tile(8, 64, 4, 2), "16 to 256"),
    ):  # fmt: skip
        assert words in ATTENTION.illegal(forward, tiles.forward_config(tile))
        assert words in ATTENTION_BWD.illegal(backward, tiles.backward_config(tile, tiles.Tile(64, 64, 4, 2)))
    whole = tiles.forward_config(tiles.Tile(64, 64, 4, 2))
    missing = dataclasses.replace(whole, fwd=dataclasses.replace(whole.fwd, num_warps=None))
    assert "num_warps" in ATTENTION.illegal(forward, missing)


def test_at_most_twenty_four_candidates_are_compiled():
    for dim in (16, 64, 96, 128, 256):
        for inv in invocations(dim):
            configs = list(inv.kernel.candidate_cfgs(inv))
            assert 4 <= len(configs) <= 24
            assert len(set(configs)) == len(configs)
            assert AttentionConfig(backend="xla") not in configs
            assert all(inv.kernel.illegal(inv, cfg) is None for cfg in configs)


@pytest.mark.kernels
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_candidate_fits_hopper_and_spills_nothing(dim, causal, direction):
    inv = invocations(dim, causal=causal)[direction]
    assert_fit(inv, triton_configs(inv), MOST_SPILLS)


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [64, 128])
def test_every_candidate_fits_hopper_with_grouped_heads(dim):
    for inv in invocations(dim, kv_heads=2):
        assert_fit(inv, triton_configs(inv))


@pytest.mark.kernels
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_every_candidate_fits_hopper_with_options(options):
    for inv in invocations(128, options=options, logits_soft_cap=30.0):
        assert_fit(inv, triton_configs(inv))


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_chosen_on_ampere_fits_it(monkeypatch, dim):
    monkeypatch.setattr(tiles, "shared_memory", lambda platform: 166912)
    for inv in invocations(dim):
        assert_fit(inv, triton_configs(inv)[:3], capability=80)
