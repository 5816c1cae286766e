"""`linear_cross_entropy` whose vocabulary is split over an axis of `jax.shard_map`: as one device has it."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej

from .ops import close, normal
from .test_sharded_ops import gradients, wanted_alone

LABELS = np.arange(16) * 5 % 24
MESH = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
HIDDEN, WEIGHT = (normal(0, 16, 8), P()), (normal(1, 8, 24), P(None, "model"))
BIAS, SHARES = (normal(2, 24), P("model")), (np.abs(normal(3, 16)), P())
FULL = {"label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 4.0}


def loss(hidden, weight, bias=None, token_weights=None, labels=LABELS, **options):
    return ej.linear_cross_entropy(hidden, weight, labels, bias=bias, token_weights=token_weights, **options)


CASES = {  # options, operands
    "a mean": ({}, [HIDDEN, WEIGHT]),
    "a sum with everything": ({"reduction": "sum", **FULL}, [HIDDEN, WEIGHT, BIAS, SHARES]),
    "losses of tokens": ({"reduction": "none", **FULL}, [HIDDEN, WEIGHT, BIAS, SHARES]),
    "gradients in the backward": (
        {"config": ej.LinearCrossEntropyConfig(recompute=True), **FULL}, [HIDDEN, WEIGHT, BIAS],
    ),
    "chunks of both": (
        {"config": ej.LinearCrossEntropyConfig(
            recompute=True,
            fwd=ej.FwdParams(blocksize_m=5, blocksize_n=4), bwd=ej.BwdParams(blocksize_m=7, blocksize_n=3),
        )}, [HIDDEN, WEIGHT],
    ),
    "ignored tokens": ({"labels": np.where(np.arange(16) % 3 == 0, -100, LABELS)}, [HIDDEN, WEIGHT, BIAS]),
}  # fmt: skip


def mapped(fn, operands, out, checked=True):
    named = functools.partial(fn, vocab_axis="model")
    specs = tuple(spec for _, spec in operands)
    return jax.shard_map(named, mesh=MESH, in_specs=specs, out_specs=out, check_vma=checked)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", CASES)
def test_a_split_vocabulary_gives_what_a_whole_one_does(case, checked):
    options, operands = CASES[case]
    arrays, fn = [x for x, _ in operands], functools.partial(loss, **options)
    close(jax.jit(gradients(mapped(fn, operands, P(), checked)))(*arrays), wanted_alone(fn, arrays))


def test_labels_out_of_the_whole_vocabulary_give_nan_and_those_of_another_device_do_not():
    labels = np.where(np.arange(16) == 3, 24, LABELS)
    fn = functools.partial(loss, labels=labels, reduction="none")
    found = jax.jit(mapped(fn, [HIDDEN, WEIGHT], P()))(HIDDEN[0], WEIGHT[0])
    assert np.isnan(found).tolist() == (np.arange(16) == 3).tolist()


def test_derivatives_forward_too():
    arrays = [HIDDEN[0], WEIGHT[0]]

    def forward_mode(fn):
        return jax.jit(lambda *x: jax.jvp(fn, x, x))(*arrays)

    close(forward_mode(mapped(loss, [HIDDEN, WEIGHT], P())), forward_mode(loss))


def test_an_axis_of_no_shard_map_is_refused():
    with pytest.raises(ej.ConfigError, match=r"vocab_axis names 'model', which is no mesh axis of a jax\.shard_map"):
        loss(HIDDEN[0], WEIGHT[0], vocab_axis="model")


def test_one_device_tunes_its_part_as_if_it_were_all():
    """The key of a part of a vocabulary is that of a call with so small a one."""
    operands = [HIDDEN, WEIGHT]
    ej.clear_invocations()
    lowered = jax.jit(jax.grad(mapped(loss, operands, P()), (0, 1))).lower(*[x for x, _ in operands])
    result = ej.autotune_lowered(ej.ConfigSelectorChain(), lowered)
    assert not result.skipped
    ej.clear_invocations()
    jax.jit(jax.grad(functools.partial(loss, labels=LABELS % 6), (0, 1))).lower(HIDDEN[0], WEIGHT[0][:, :6])
    alone = {(op, key) for op, calls in ej.get_invocations().items() for key in calls}
    assert {(entry.op_id_v, entry.call_key) for entry in result.entries} == alone
