"""Checkpoints across a swap, both ways, and training that goes on from them: NNX with Orbax."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from nnx_models import X, model, step

import ejlayers


def momentum(m):  # and not Adam, which makes steps of rounding where a gradient is 0, as that of a key's bias
    return nnx.Optimizer(m, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def swapped(seed):
    return ejlayers.swap(model(seed))


@pytest.mark.parametrize(("saved", "restored"), [(model, swapped), (swapped, model)], ids=["into ours", "into stock"])
def test_orbax_restores_across_a_swap_and_the_next_step_is_the_same(saved, restored, tmp_path):
    source = saved(0)
    optimizer = momentum(source)
    for _ in range(2):
        step(source, optimizer, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", nnx.state((source, optimizer)))
    target = restored(1)
    both = (target, momentum(target))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(both))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(both, checkpointer.restore(tmp_path / "run", abstract))
    same = jax.tree.map(np.array_equal, nnx.state((source, optimizer)), nnx.state(both))
    assert jax.tree.all(same)
    np.testing.assert_allclose(step(*both, X), step(source, optimizer, X), rtol=1e-5)
    a, b = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (source, target))
    for x, y in zip(a, b):
        np.testing.assert_allclose(x, y, atol=2e-5)
