"""A small model of stock NNX layers, and what tests do with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH = 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x, is_causal=True)
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.tied = self.head

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = jax.random.normal(jax.random.key(0), (2, 9, WIDTH))


def model(seed=0):
    return Model(nnx.Rngs(seed))


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
    optimizer.update(model, grads)
    return loss


def adam(m):
    return nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param)


def states_equal(a, b):
    a, b = (nnx.to_flat_state(s) for s in (a, b))
    assert [path for path, _ in a] == [path for path, _ in b]
    for (_, x), (_, y) in zip(a, b):
        assert type(x) is type(y)
        assert np.array_equal(jax.random.key_data(x[...]) if "key" in str(x.dtype) else x[...],
                              jax.random.key_data(y[...]) if "key" in str(y.dtype) else y[...])  # fmt: skip
