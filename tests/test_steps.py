"""Train steps of every kind: plain, jitted, and with some of their arguments bound."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ejkernel_ops as ek
import ejlayers

X = jnp.ones((8, 4))


def nnx_model():
    return ejlayers.swap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def eqx_model():
    return ejlayers.swap(eqx.nn.Linear(4, 4, key=jax.random.key(0)))


def nnx_step(model, x, mode="sum"):
    loss, grads = nnx.value_and_grad(lambda model: getattr(jnp, mode)(model(x)))(model)
    model.kernel[...] -= 0.1 * grads["kernel"][...]
    return loss


def eqx_step(model, x, mode="sum"):
    return eqx.filter_value_and_grad(lambda model: getattr(jnp, mode)(jax.vmap(model)(x)))(model)


def jax_step(weight, x, mode="sum"):
    return jax.value_and_grad(lambda weight: getattr(jnp, mode)(ek.linear(x, weight)))(weight)


class Trainer(nnx.Module):
    def __init__(self):
        self.model = nnx_model()

    @nnx.jit
    def step(self, x):
        return nnx_step(self.model, x)


NNX_JIT = nnx.jit(nnx_step, static_argnames="mode")
EQX_JIT = eqx.filter_jit(eqx_step)
JAX_JIT = jax.jit(jax_step, static_argnames="mode")
NESTED = jax.tree_util.Partial  # which stays a partial of its own inside of another one
STEPS = {
    "nnx, keyword": lambda: (functools.partial(NNX_JIT, mode="mean"), nnx_model(), X),
    "nnx, model": lambda: (functools.partial(NNX_JIT, nnx_model()), X),
    "nnx, nested": lambda: (functools.partial(NESTED(NNX_JIT, nnx_model()), mode="mean"), X),
    "nnx, method": lambda: (Trainer().step, X),
    "nnx, plain": lambda: (functools.partial(nnx_step, mode="mean"), nnx_model(), X),
    "equinox, keyword": lambda: (functools.partial(EQX_JIT, mode="mean"), eqx_model(), X),
    "equinox, model": lambda: (functools.partial(EQX_JIT, eqx_model()), X),
    "equinox, its own": lambda: (eqx.Partial(EQX_JIT, eqx_model(), mode="mean"), X),
    "equinox, nested": lambda: (functools.partial(NESTED(EQX_JIT, eqx_model()), mode="mean"), X),
    "equinox, plain": lambda: (functools.partial(eqx_step, mode="mean"), eqx_model(), X),
    "jax, keyword": lambda: (functools.partial(JAX_JIT, mode="mean"), jnp.ones((4, 4)), X),
    "jax, array": lambda: (functools.partial(JAX_JIT, jnp.ones((4, 4)), mode="mean"), X),
    "jax, plain": lambda: (functools.partial(jax_step, jnp.ones((4, 4)), mode="mean"), X),
    "jax, inside": lambda: (jax.jit(functools.partial(jax_step, mode="mean")), jnp.ones((4, 4)), X),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_may_have_arguments_bound(name):
    step, *args = STEPS[name]()
    rows = ejlayers.explain(step, *args).rows
    assert sorted(row.op for row in rows) == ["linear@v1", "linear_bwd@v1"]
    assert {bool(row.path) for row in rows} == {not name.startswith("jax")}
    selector = ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))
    result = ejlayers.tune(step, *args, selector=selector)
    assert [entry.count for entry in result.entries] == [1, 1]
    assert result.step_ms is not None


def test_what_is_bound_to_a_step_is_not_changed_by_tuning():
    model = nnx_model()
    before = np.asarray(model.kernel[...])
    step = functools.partial(NNX_JIT, model)
    ejlayers.tune(step, X, selector=ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1)))
    np.testing.assert_array_equal(model.kernel[...], before)
    step(X)
    assert not np.array_equal(model.kernel[...], before)
