"""Triton kernels on each device's own part: as one device has it on XLA. On a CPU they are interpreted."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej
from ejkernel_ops.utils.meta import call_sites

from .ops import close, normal
from .test_sharded_ops import BIAS, COLUMNS, HEADS, LABELS, MESHES, ROWS, SCALE, W, X, gradients, placed, qkv

pytest.importorskip("triton", reason="needs triton, which there is for Linux")
pytestmark = pytest.mark.once
RING = P(None, "model")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_INTERPRET", "1")


def attention(*x, **options):
    return ej.flash_attention(*x, causal=True, **options)


def dropped(*x, **options):
    return attention(*x, dropout_rate=0.4, dropout_rng=jax.random.key(7), **options)


def loss(hidden, weight, **options):
    return ej.linear_cross_entropy(hidden, weight, LABELS, **options)


CASES = {
    "attention": (attention, qkv(4)),
    "attention, fewer key heads than devices, dropout": (dropped, qkv(2, P("data"))),
    "ring attention": (attention, [(x, RING) for x, _ in qkv(4)]),
    "ring attention, dropout": (dropped, [(normal(i, 2, 16, 2, 4), RING) for i in range(3)]),
    "rms_norm": (ej.rms_norm, [(X, ROWS), (SCALE, P())]),
    "linear": (functools.partial(ej.linear, activation="silu"), [(X, ROWS), (W, COLUMNS), (BIAS, P("model"))]),
    "rotary": (lambda x, **options: ej.rotary_embedding(x, jnp.arange(8), **options), [(normal(0, 4, 8, 8, 4), HEADS)]),
    "cross-entropy": (loss, [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), P())]),
    "cross-entropy, split vocabulary": (loss, [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), COLUMNS)]),
    "cross-entropy, split vocabulary, twice": (
        lambda h, w, **options: loss(h, w, config=ej.LinearCrossEntropyConfig(recompute=True, **options)),
        [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), COLUMNS)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_triton_on_parts_gives_what_xla_does_on_the_whole(case):
    fn, operands = CASES[case]
    wanted = jax.jit(gradients(functools.partial(fn, backend="xla")))(*[x for x, _ in operands])
    with jax.set_mesh(mesh := MESHES["explicit"]):
        step, arrays = jax.jit(gradients(functools.partial(fn, backend="triton"))), placed(mesh, operands)
        found, sites = step(*arrays), call_sites(step.lower(*arrays))
    assert sites
    assert all("backend=triton" in site.config for site in sites)
    close(found, wanted, 1e-4)


def test_under_auto_axes_interpreted_kernels_take_whole_arrays():
    """Interpreting calls back to Python, which JAX cannot do in what XLA asks for."""
    fn, operands = CASES["rms_norm"]
    wanted = jax.jit(gradients(functools.partial(fn, backend="xla")))(*[x for x, _ in operands])
    with jax.set_mesh(mesh := MESHES["auto"]):
        found = jax.jit(gradients(functools.partial(fn, backend="triton")))(*placed(mesh, operands))
    assert jax.typeof(found[0]).shape == X.shape
    close(found, wanted, 1e-4)
