"""Checkpoints across a swap, both ways, in each framework's own format, and training that goes on from them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState
from nnx_models import X, model, step

import ejlayers

SGD = optax.sgd(0.1, momentum=0.9)  # and not Adam, which makes steps of rounding where a gradient is 0


def orbax_round_trip(tree, like, folder):
    """What Orbax gives back where arrays like those of another tree are asked for."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "run", jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def msgpack_round_trip(tree, like, folder):
    (folder / "run.msgpack").write_bytes(serialization.to_bytes(tree))
    return serialization.from_bytes(like, (folder / "run.msgpack").read_bytes())


class Linen(nn.Module):
    """As many kinds of layers as the model of NNX has."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return nn.Dense(8)(nn.RMSNorm()(x))


class Equinox(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, seed):
        keys = jax.random.split(jax.random.key(seed))
        self.attention = eqx.nn.MultiheadAttention(4, 16, dropout_p=0.1, inference=True, key=keys[0])
        self.norm, self.head = eqx.nn.LayerNorm(16), eqx.nn.Linear(16, 8, key=keys[1])

    def __call__(self, x):
        return jax.vmap(self.head)(jax.vmap(self.norm)(x + self.attention(x, x, x)))


class OfNnx:
    """How a state of a framework is made, takes a step, and becomes a checkpoint and back."""

    def new(self, seed, prepared):
        m = prepared(model(seed))
        return m, nnx.Optimizer(m, SGD, wrt=nnx.Param)

    def step(self, state):
        return state, step(*state, X)

    def arrays(self, state):
        return jax.tree.leaves(nnx.state(state))

    def moved(self, state, other, folder):
        nnx.update(other, orbax_round_trip(nnx.state(state), nnx.state(other), folder))
        return other


class OfLinen:
    def __init__(self, round_trip):
        self.round_trip = round_trip

    def new(self, seed, prepared):
        m = prepared(Linen())
        params = m.init(jax.random.key(seed), X)["params"]
        return TrainState.create(apply_fn=m.apply, params=params, tx=SGD)

    def step(self, state):
        loss, grads = _linen_gradients(state)
        return state.apply_gradients(grads=grads), loss

    def arrays(self, state):
        return jax.tree.leaves(state)

    def moved(self, state, other, folder):
        names = ("step", "params", "opt_state")
        saved, like = ({name: getattr(s, name) for name in names} for s in (state, other))
        return other.replace(**self.round_trip(saved, like, folder))


@jax.jit
def _linen_gradients(state):
    return jax.value_and_grad(lambda params: jnp.square(state.apply_fn({"params": params}, X)).mean())(state.params)


class OfEquinox:
    def new(self, seed, prepared):
        m = prepared(Equinox(seed))
        return m, SGD.init(eqx.filter(m, eqx.is_inexact_array))

    def step(self, state):
        m, opt_state = state
        loss, grads = _equinox_gradients(m)
        updates, opt_state = SGD.update(grads, opt_state)
        return (eqx.apply_updates(m, updates), opt_state), loss

    def arrays(self, state):
        return jax.tree.leaves(eqx.filter(state, eqx.is_array))

    def moved(self, state, other, folder):
        eqx.tree_serialise_leaves(folder / "run.eqx", state)
        return eqx.tree_deserialise_leaves(folder / "run.eqx", other)


@eqx.filter_jit
def _equinox_gradients(m):
    return eqx.filter_value_and_grad(lambda m: jnp.square(jax.vmap(m)(X)).mean())(m)


KINDS = {
    "NNX, Orbax": OfNnx(),
    "Linen, Orbax": OfLinen(orbax_round_trip),
    "Linen, msgpack": OfLinen(msgpack_round_trip),
    "Equinox, leaves": OfEquinox(),
}


def as_it_is(m):
    return m


def in_any_order(m):
    return ejlayers.swap(m, reproducible=False)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("before", "after"), [(as_it_is, ejlayers.swap), (ejlayers.swap, as_it_is), (ejlayers.swap, in_any_order)],
    ids=["into ours", "into stock", "into sums in any order"],
)  # fmt: skip
def test_a_checkpoint_restores_across_a_swap_and_the_next_step_is_the_same(name, before, after, tmp_path):
    kind = KINDS[name]
    state = kind.new(0, before)
    for _ in range(2):
        state, _loss = kind.step(state)
    other = kind.moved(state, kind.new(1, after), tmp_path)
    for x, y in zip(kind.arrays(state), kind.arrays(other), strict=True):
        np.testing.assert_array_equal(x, y)
    (state, loss), (other, other_loss) = kind.step(state), kind.step(other)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    for x, y in zip(kind.arrays(state), kind.arrays(other), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
