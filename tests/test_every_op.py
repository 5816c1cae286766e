"""What holds for each op alike: shapes without running, exports, debugging modes, rematerialisation, doubles, keys."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    clear_invocations,
    find_labels_in_lowered,
    flash_attention,
    gated_linear,
    layer_norm,
    linear,
    linear_cross_entropy,
    mlp,
    rms_norm,
    rotary_embedding,
)
from ejkernel_ops.utils.meta import split_label

from .ops import normal, recorded, runs

HEADS, X, WEIGHT, VECTOR = normal(0, 2, 6, 2, 4), normal(1, 6, 4), normal(2, 4, 5), normal(3, 4)
IDS = np.arange(6) % 5
OPS = {
    "flash_attention": (functools.partial(flash_attention, causal=True), (HEADS, HEADS, HEADS)),
    "linear": (functools.partial(linear, activation="gelu"), (X, WEIGHT, normal(4, 5))),
    "gated_linear": (gated_linear, (X, WEIGHT, -WEIGHT)),
    "mlp": (functools.partial(mlp, activation="silu"), (X, WEIGHT, normal(5, 5, 4), -WEIGHT)),
    "rms_norm": (rms_norm, (X, VECTOR)),
    "layer_norm": (layer_norm, (X, VECTOR, VECTOR)),
    "rotary_embedding": (rotary_embedding, (HEADS, IDS)),
    "linear_cross_entropy": (linear_cross_entropy, (X, WEIGHT, IDS)),
}
each = pytest.mark.parametrize("name", OPS)


def gradients(fn, arrays):
    """Of the sum of squares, with respect to every float array."""
    floats = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    return jax.grad(lambda *arrays: (fn(*arrays) ** 2).sum(), floats)


@functools.cache
def step(name):
    fn = OPS[name][0]
    return jax.jit(lambda *arrays: (fn(*arrays), gradients(fn, arrays)(*arrays)))


@functools.cache
def wanted(name):
    return jax.tree.map(np.asarray, step(name)(*OPS[name][1]))


def close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@each
def test_both_directions_are_labelled_recorded_and_run_once(name):
    fn, arrays = OPS[name]
    clear_invocations()
    lowered = jax.jit(gradients(fn, arrays)).lower(*arrays)
    labels = find_labels_in_lowered(lowered)
    assert [split_label(text)[0] for text in labels] == [f"{name}@v1", f"{name}_bwd@v1"]
    assert recorded() == set(labels)
    assert set(runs(lowered).values()) == {1}


@each
def test_shapes_are_told_without_running(name):
    fn, arrays = OPS[name]
    out = jax.eval_shape(fn, *arrays)
    assert (out.shape, out.dtype) == (wanted(name)[0].shape, jnp.float32)


@each
def test_an_exported_step_computes_the_same(name):
    fn, arrays = OPS[name]
    on_xla = functools.partial(fn, backend="xla")  # JAX wants to be told before it exports another back end's calls
    exported = jax.export.export(jax.jit(lambda *arrays: (on_xla(*arrays), gradients(on_xla, arrays)(*arrays))))(
        *arrays
    )
    close(jax.export.deserialize(exported.serialize()).call(*arrays), wanted(name))


@each
def test_it_works_with_checks_for_nan_and_without_jit(name):
    fn, arrays = OPS[name]
    with jax.debug_nans(True):
        close(jax.jit(lambda *arrays: gradients(fn, arrays)(*arrays))(*arrays), wanted(name)[1])
    with jax.disable_jit():
        close(fn(*arrays), wanted(name)[0])


@each
def test_a_forward_whose_name_is_saved_runs_once_under_remat(name):
    fn, arrays = OPS[name]
    saved = jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(name))
    lowered = jax.jit(lambda *arrays: gradients(saved, arrays)(*arrays)).lower(*arrays)
    assert runs(lowered) == {f"{name}@v1": 1, f"{name}_bwd@v1": 1}
    close(lowered.compile()(*arrays), wanted(name)[1])


@each
def test_doubles_stay_doubles(name):
    fn, arrays = OPS[name]
    with jax.enable_x64(True):
        doubles = [x.astype(np.float64) if x.dtype == np.float32 else x for x in arrays]
        out, grads = jax.jit(lambda *arrays: (fn(*arrays), gradients(fn, arrays)(*arrays)))(*doubles)
        assert {x.dtype for x in (out, *grads)} == {np.dtype(np.float64)}
        close((out, grads), wanted(name), 1e-4)


@each
def test_the_key_tells_shapes_apart_and_not_values(name):
    fn, arrays = OPS[name]

    def labels(*arrays):
        return find_labels_in_lowered(jax.jit(fn).lower(*arrays))

    assert labels(*arrays) == labels(*(x * 0 for x in arrays))
    assert labels(*arrays) != labels(*(x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in arrays))
