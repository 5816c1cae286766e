"""Ops with random options over random meshes and shardings, from a seed: as on one device, in both directions."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej

from .test_sharded_ops import close

MESHES = [(8,), (2, 4), (4, 2), (3, 2), *[(2, 2, 2)] * 4]
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def normal(rng, *shape):
    return np.random.default_rng(rng.randrange(1 << 30)).standard_normal(shape, np.float32)


def integers(rng, least, most, *shape):
    return np.random.default_rng(rng.randrange(1 << 30)).integers(least, most, shape, np.int32)


def some(rng, chances, **values):
    """Each of the values that chance takes, made when it is."""
    return {name: make() for name, make in values.items() if rng.random() < chances}


# Calls: a function of arrays, and the arrays, the first of which have examples in front


def attention(rng):
    batch, length, heads, group = (rng.choice(sizes) for sizes in ((2, 4, 8, 6), (4, 8, 6), (1, 2, 4, 3), (1, 2, 4)))
    q_shape, kv_shape = (batch, length, heads * group, 4), (batch, length, heads, 4)
    static = some(rng, 0.3, sliding_window=lambda: rng.choice([0, 2, (3, 1)]), logits_soft_cap=lambda: 3.0)
    if rng.random() < 0.15:
        static |= {"dropout_rate": 0.4, "dropout_rng": jax.random.key(rng.randrange(9))}
    arrays = some(
        rng, 0.25, kv_lengths=lambda: integers(rng, 0, length + 1, batch),
        q_segment_ids=lambda: np.sort(integers(rng, -1, 3, batch, length), 1),
        bias=lambda: normal(rng, *(rng.choice([1, n]) for n in (batch, heads * group, length, length))),
        sinks=lambda: normal(rng, heads * group),
    )  # fmt: skip
    causal = rng.random() < 0.6

    def call(query, key, value, *more):
        return ej.flash_attention(query, key, value, causal=causal, **static, **dict(zip(arrays, more)))

    return call, [normal(rng, *shape) for shape in (q_shape, kv_shape, kv_shape)] + list(arrays.values())


def products(rng):
    rows, inner, outer = rng.choice([(8,), (2, 8), (4, 6)]), rng.choice([4, 8, 6]), rng.choice([8, 12, 16])
    op, activation = rng.choice([ej.linear, ej.gated_linear, ej.mlp]), rng.choice(["silu", "gelu"])
    shapes = {ej.linear: [(inner, outer)], ej.gated_linear: [(inner, outer)] * 2}
    weights = shapes.get(op, [(inner, outer), (outer, inner)])
    flipped = rng.random() < 0.5
    biases = {ej.linear: ("bias",), ej.gated_linear: ("gate_bias", "up_bias"), ej.mlp: ("up_bias", "down_bias")}[op]
    sizes = [shape[1] for shape in weights]
    given = some(rng, 0.5, **{name: lambda n=n: normal(rng, n) for name, n in zip(biases, sizes)})

    def call(x, *arrays):
        weights, more = arrays[: len(sizes)], dict(zip(given, arrays[len(sizes) :]))
        return op(x, *weights, activation=activation, weight_layout="oi" if flipped else "io", **more)

    made = [normal(rng, *shape[:: -1 if flipped else 1]) for shape in weights]
    return call, [normal(rng, *rows, inner), *made, *given.values()]


def norm(rng):
    op, shape = rng.choice([ej.rms_norm, ej.layer_norm]), (*rng.choice([(8,), (2, 8), (4, 6)]), 8)
    given = some(rng, 0.6, scale=lambda: normal(rng, 8), residual=lambda: normal(rng, *shape))
    return lambda x, *more: op(x, **dict(zip(given, more)), epsilon=0.3), [normal(rng, *shape), *given.values()]


def rotary(rng):
    batch, length = rng.choice([2, 4, 8]), rng.choice([4, 8, 6])
    positions = integers(rng, 0, 50, *rng.choice([(length,), (batch, length)]))
    return ej.rotary_embedding, [normal(rng, batch, length, rng.choice([2, 4, 8]), 4), positions]


def cross_entropy(rng):
    rows, features, vocab = rng.choice([8, 12, 16]), rng.choice([4, 8]), rng.choice([8, 12, 24])
    static = some(rng, 0.3, z_loss=lambda: 0.01, label_smoothing=lambda: 0.1, logits_soft_cap=lambda: 3.0)
    if rng.random() < 0.3:
        static["config"] = ej.LinearCrossEntropyConfig(recompute=True)
    bias = [normal(rng, vocab)] if rng.random() < 0.5 else []
    reduction = rng.choice(["mean", "sum", "none"])

    def call(hidden, weight, labels, bias=None):
        return ej.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, **static)

    return call, [normal(rng, rows, features), normal(rng, features, vocab), integers(rng, 0, vocab, rows), *bias]


CALLS = {attention: 6, products: 5, norm: 1, rotary: 1, cross_entropy: 4}


# What is made of a call


def with_gradients(fn, arrays):
    floats = tuple(i for i, x in enumerate(arrays) if x.dtype == np.float32)

    def weighted(*args):
        out = fn(*args)
        return sum((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in jax.tree.leaves(out)), out

    return jax.value_and_grad(weighted, floats, has_aux=True)


def repeated(fn):
    """In a loop, whose steps are computed again for their gradients."""

    def run(first, *rest):
        return jax.lax.map(jax.checkpoint(lambda x: fn(x, *rest)), jnp.stack([first, 2 * first]))

    return run


def mapped(fn):
    """Over a new axis of the first array."""
    return lambda first, *rest: jax.vmap(lambda x: fn(x, *rest), 1)(jnp.stack([first, 2 * first], 1))


def spec(rng, shape, sizes):
    """A random split of an array that its shape allows, over mesh axes in any order."""
    left, found = rng.sample(list(sizes), len(sizes)), []
    for size in shape:
        own = []
        while left and rng.random() < 0.5 and size % math.prod(sizes[axis] for axis in [*own, left[-1]]) == 0:
            own.append(left.pop())
        found.append(tuple(own) or None)
    return P(*found)


def constrained(fn, shardings):
    return lambda *args: fn(*map(jax.lax.with_sharding_constraint, args, shardings))


def inside_shard_map(rng, fn, mesh, arrays):
    """Over its first mesh axis, along which all devices do the same: XLA shares each one's work out to the others."""
    sizes = dict(list(mesh.shape.items())[1:])
    inner = constrained(fn, [spec(rng, x.shape, sizes) for x in arrays])
    checked = rng.random() < 0.5
    return jax.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"}, check_vma=checked)


def mesh_of(rng, kind):
    shape, names = rng.choice(MESHES), ("a", "b", "c")
    kinds = {"explicit": [EXPLICIT] * 3, "mixed": [AUTO, EXPLICIT, AUTO]}.get(kind, [AUTO] * 3)
    count = len(shape)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names[:count], axis_types=tuple(kinds[:count]), devices=devices)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(40))
def test_devices_do_together_what_one_does(seed):
    rng = random.Random(seed)
    fn, arrays = rng.choices(list(CALLS), list(CALLS.values()))[0](rng)
    kind = rng.choice(["auto", "explicit", "mixed", "constrained", "shard_map"])
    if kind in ("auto", "constrained"):  # with Explicit axes JAX itself refuses some splits of what is stacked
        fn = rng.choice([lambda fn: fn, lambda fn: fn, repeated, mapped])(fn)
    mesh = mesh_of(rng, kind)
    shardings = [NamedSharding(mesh, spec(rng, x.shape, mesh.shape)) for x in arrays]
    step = with_gradients(fn, arrays)
    with jax.set_mesh(jax.make_mesh((1,), ("alone",), axis_types=(AUTO,))):
        wanted = jax.jit(step)(*arrays)
    with jax.set_mesh(mesh):
        if kind == "shard_map":
            found = jax.jit(with_gradients(inside_shard_map(rng, fn, mesh, arrays), arrays))(*arrays)
        elif kind == "constrained":
            found = jax.jit(constrained(step, shardings))(*arrays)
        else:
            try:
                found = jax.jit(step)(*map(jax.device_put, arrays, shardings))
            except ej.ConfigError as error:
                if "each device needs it whole" in str(error) or "cannot be split so" in str(error):
                    return  # a type says what cannot be
                raise
    close(found, wanted)
