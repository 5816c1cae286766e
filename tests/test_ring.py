"""Attention over a length that four devices split: as one device has it, in both directions, and without gathering."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej
from ejkernel_ops.utils.meta import call_sites

from .ops import close, normal
from .test_sharded_ops import gathered, gradients, wanted_alone

LENGTH, KINDS = 16, {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
IDS = np.repeat([[0, 0, 1, 2, 2, 2, 3, 4]] * 2, 2, 1)
IDS[1, -3:] = -1
SPLIT = P(None, "ring")


def attention(query, key, value, bias=None, sinks=None, **options):
    return ej.flash_attention(query, key, value, bias=bias, sinks=sinks, **options)


def with_options(**options):
    return functools.partial(attention, **options)


def qkv(kv_heads=2):
    return [(normal(i, 2, LENGTH, heads, 4), SPLIT) for i, heads in enumerate((4, kv_heads, kv_heads))]


BIAS, SINKS = normal(3, 1, 4, LENGTH, LENGTH), (normal(4, 4), P())
NO_BIAS = (None, P())
CASES = {  # the call, its operands after query, key and value
    "causal": (with_options(causal=True), []),
    "all": (with_options(), []),
    "a causal window": (with_options(causal=True, sliding_window=3), []),
    "a window on both sides": (with_options(sliding_window=(5, 2)), []),
    "packed": (with_options(causal=True, q_segment_ids=IDS, kv_segment_ids=IDS), []),
    "packed, not causal": (with_options(q_segment_ids=IDS, kv_segment_ids=IDS), []),
    "lengths": (with_options(causal=True, kv_lengths=np.array([13, 5])), []),
    "an offset of each example": (with_options(causal=True, q_offset=np.array([2, -3])), []),
    "sinks": (lambda q, k, v, s: attention(q, k, v, sinks=s, causal=True), [SINKS]),
    "a bias of split queries": (with_options(causal=True), [(BIAS, P(None, None, "ring"))]),
    "a bias of keys": (with_options(causal=True), [(normal(5, 2, 1, 1, LENGTH), P())]),
    "a bias and sinks": (with_options(), [(BIAS[0, :, :, :1], P()), SINKS]),
    "a soft cap": (with_options(causal=True, logits_soft_cap=2.0), []),
    "dropout": (with_options(causal=True, dropout_rate=0.4, dropout_rng=jax.random.key(7)), []),
    "the log-sum-exp": (lambda *x: attention(*x, causal=True, return_lse=True)[1], []),
}


def mesh_of(kind):
    return jax.make_mesh((4,), ("ring",), axis_types=(kind,))


@functools.cache
def wanted_of(case):
    fn, more = CASES[case]
    return wanted_alone(fn, [x for x, _ in qkv() + more])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_length_gives_what_a_whole_one_does(case, kind):
    fn, more = CASES[case]
    with jax.set_mesh(mesh := mesh_of(KINDS[kind])):
        operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in qkv() + more]
        compiled = jax.jit(gradients(fn)).lower(*operands).compile()
        found = compiled(*operands)
    close(found, wanted_of(case))
    assert all(np.prod(shape) <= np.prod(operands[1].shape) for shape in gathered(compiled))


@pytest.mark.parametrize("axes", [("first", "second"), ("second", "first")])
@pytest.mark.parametrize("case", ["causal", "lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_mesh_axes_split_a_length_in_any_order(axes, case, kind):
    fn, _ = CASES[case]
    with jax.set_mesh(mesh := jax.make_mesh((2, 4), ("first", "second"), axis_types=(KINDS[kind],) * 2)):
        operands = [jax.device_put(x, NamedSharding(mesh, P(None, axes))) for x, _ in qkv()]
        close(jax.jit(gradients(fn))(*operands), wanted_of(case))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", ["causal", "a window on both sides", "sinks", "a bias of keys"])
def test_inside_shard_map_the_axis_is_named(case, checked):
    fn, more = CASES[case]
    operands = qkv() + more
    if case == "sinks":

        def named(q, k, v, s):
            return attention(q, k, v, sinks=s, causal=True, context_axis="ring")
    else:
        named = functools.partial(fn, context_axis="ring")
    mapped = jax.shard_map(
        named, mesh=mesh_of(AxisType.Auto), in_specs=tuple(spec for _, spec in operands), out_specs=SPLIT,
        check_vma=checked,
    )  # fmt: skip
    close(jax.jit(gradients(mapped))(*[x for x, _ in operands]), wanted_of(case))


def calls_of(lowered):
    """How many calls of attention a device makes, loops counted."""
    return sum(site.executions for site in call_sites(lowered))


def test_a_causal_ring_masks_nothing_but_its_own_part():
    """Each other part costs a device two of its four pairs of chunks, whichever device it is."""
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = [jax.device_put(x, NamedSharding(mesh_of(AxisType.Explicit), spec)) for x, spec in qkv()]
        ej.clear_invocations()
        lowered = jax.jit(with_options(causal=True)).lower(*operands)
    calls = [(args, kwargs) for found in ej.get_invocations().values() for _, args, kwargs in found.values()]
    shapes = {(args[0].shape[1], args[1].shape[1], kwargs["causal"]) for args, kwargs in calls}
    assert shapes == {(4, 4, True), (4, 2, False), (2, 4, False)}
    assert calls_of(lowered) == 1 + 2 * 3  # either of two ways to do each other part


def test_a_causal_window_meets_only_the_parts_that_it_reaches():
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = [jax.device_put(x, NamedSharding(mesh_of(AxisType.Explicit), spec)) for x, spec in qkv()]
        counts = [
            calls_of(jax.jit(with_options(causal=True, sliding_window=w)).lower(*operands)) for w in (0, 1, 4, 5, 15)
        ]
    assert counts == [1, 2, 2, 3, 4]


def test_an_axis_of_no_shard_map_is_refused():
    query = normal(0, 1, 4, 1, 4)
    with pytest.raises(ej.ConfigError, match=r"context_axis names 'ring', which is no mesh axis of a jax\.shard_map"):
        ej.flash_attention(query, query, query, context_axis="ring")


def test_queries_that_are_split_meet_keys_that_are_not():
    """Of another length: each device has all keys, and its queries start later."""
    arrays = [normal(0, 1, 8, 2, 4), normal(1, 1, 12, 2, 4), normal(2, 1, 12, 2, 4)]
    fn = with_options(causal=True, q_offset="end")
    with jax.set_mesh(mesh := mesh_of(AxisType.Auto)):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, (SPLIT, P(), P()))]
        compiled = jax.jit(gradients(fn)).lower(*placed).compile()
        found = compiled(*placed)
    close(found, wanted_alone(fn, arrays))
    assert not gathered(compiled)
