"""Ops and user kernels compute the right thing under every JAX transform, and labels tell what the program holds."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_ops import (
    ConfigError,
    ConfigSelectorChain,
    Kernel,
    Key,
    clear_invocations,
    device_fingerprint,
    find_labels_in_lowered,
    flash_attention,
    get_invocations,
    label,
    linear,
    set_default_selector,
)
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.meta import call_sites, count_labels, split_label

# Ops and their references


def attention(query, key, value, bias=None, mask=None, ids=None, lengths=None, causal=False):
    """Attention as it is defined, in plain JAX; a row that sees nothing gives 0."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    logits = logits if bias is None else logits + bias
    seen = jnp.ones(logits.shape, bool)
    if causal:
        seen &= jnp.tril(jnp.ones(logits.shape[-2:], bool))
    if mask is not None:
        seen &= mask
    if ids is not None:
        seen &= ((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0))[:, None]
    if lengths is not None:
        seen &= jnp.arange(key.shape[1]) < lengths[:, None, None, None]
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))) * seen
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / jnp.where(total == 0, 1.0, total), value)


OPS = {  # op, its reference, name of its kernel
    "attention": (flash_attention, attention, "flash_attention"),
    "ids": (
        lambda q, k, v, ids, n: flash_attention(q, k, v, q_segment_ids=ids, kv_segment_ids=ids, kv_lengths=n),
        lambda q, k, v, ids, n: attention(q, k, v, ids=ids, lengths=n),
        "flash_attention",
    ),
    "bias": (
        lambda q, k, v, bias: flash_attention(q, k, v, bias=bias, causal=True),
        lambda q, k, v, bias: attention(q, k, v, bias=bias, causal=True),
        "flash_attention",
    ),
    "mask": (
        lambda q, k, v, mask: flash_attention(q, k, v, mask=mask),
        lambda q, k, v, mask: attention(q, k, v, mask=mask),
        "flash_attention",
    ),
    "linear": (
        lambda x, w, b: linear(x, w, b, activation="silu"),
        lambda x, w, b: jax.nn.silu(x @ w + b),
        "linear",
    ),
}

# Arrays: Q2, K2, V2 have two axes more than a call, Q1 one more, Q0 none


def normal(seed, *shape):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape))


BATCH, LENGTH = 2, 4
Q2, K2, V2 = normal(0, 3, 2, BATCH, LENGTH, 2, 4), *normal(1, 2, 3, 2, BATCH, LENGTH, 1, 4)
Q1, K1, V1 = Q2[:, 0], K2[:, 0], V2[:, 0]
Q0, K0, V0 = QKV0 = Q1[0], K1[0], V1[0]
QKV1, QKV2 = (Q1, K1, V1), (Q2, K2, V2)
IDS = np.asarray(jax.random.randint(jax.random.key(3), (3, BATCH, LENGTH), -1, 2))
LENGTHS = np.array([[4, 2], [0, 3], [1, 4]])
X1, W, BIAS = normal(4, 3, 5, 4), normal(5, 4, 3), normal(6, 3)
WS, BIASES = normal(7, 3, 4, 3), normal(8, 3, 3)

FAST = {"xla_backend_optimization_level": 0}  # compiles in two thirds of the time; the passes on HLO are the same

# Transforms


def gradients(fn):
    """Of the sum of squares, with respect to every float argument."""

    def wrapped(*args):
        floats = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
        return jax.grad(lambda *args: (fn(*args) ** 2).sum(), argnums=floats)(*args)

    return wrapped


def stacked(fn, *, remat=True):
    """Three layers as a scan."""

    def layers(q, *rest):
        def layer(carry, _):
            return carry + fn(carry, *rest), None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, q, None, length=3)[0]

    return layers


def twelve_layers(fn):
    return lambda q, k, v: functools.reduce(lambda carry, _: carry + fn(carry, k, v), range(12), q)


def rematerialized(policy):
    return lambda fn: gradients(jax.checkpoint(fn, policy=policy))


def along_query(transform):
    """A transform of functions of one argument, applied at the query."""
    return lambda fn: lambda q, k, v: transform(lambda q: fn(q, k, v), q)


def directional(fn, x):
    return jax.jvp(fn, (x,), (jnp.cos(x),))


def linear_weights_in_a_scan(fn):
    def loss(x, weights, biases):
        return jnp.sum(jax.lax.scan(lambda c, wb: (fn(c, *wb) @ jnp.ones((3, 4)), None), x, (weights, biases))[0] ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))


policies = jax.checkpoint_policies
second_order = {
    "grad(grad)": lambda f: jax.grad(lambda *a: sum(jnp.sum(g**2) for g in gradients(f)(*a)), argnums=(0, 1, 2)),
    "jvp(grad)": along_query(lambda f, q: directional(jax.grad(lambda q: jnp.sum(f(q) ** 2)), q)),
    "jvp(jvp)": along_query(lambda f, q: directional(lambda q: directional(f, q), q)),
    "grad of jvp": along_query(lambda f, q: jax.grad(lambda q: jnp.sum(directional(f, q)[1] ** 2))(q)),
}


def case(name, make, arrays, forward=1, backward=1, op="attention", dead=False, eager=True):
    """One row of the table.

    `forward` and `backward`: how many calls of either kernel the program has. `dead`: that XLA drops the forward,
    which only a transposed derivative would need. `eager`: whether to run it without `jit` too.
    """
    return pytest.param(op, make, arrays, forward, backward, dead, eager, id=f"{op}-{name}")


CASES = [
    case("jit", lambda f: f, QKV0, 1, 0),
    case("grad", gradients, QKV0),
    case("grad of 12 layers", lambda f: gradients(twelve_layers(f)), QKV0, 12, 12),
    case("vmap", jax.vmap, QKV1, 1, 0),
    case("vmap(vmap)", lambda f: jax.vmap(jax.vmap(f)), QKV2, 1, 0),
    case("vmap(grad)", lambda f: jax.vmap(gradients(f)), QKV1),
    case("vmap(jit(grad))", lambda f: jax.vmap(jax.jit(gradients(f))), QKV1),
    case("grad(vmap(vmap))", lambda f: gradients(jax.vmap(jax.vmap(f))), QKV2),
    case("vmap(grad(vmap))", lambda f: jax.vmap(gradients(jax.vmap(f))), QKV2),
    case("vmap(vmap(grad))", lambda f: jax.vmap(jax.vmap(gradients(f))), QKV2),
    case("vmap(grad), shared key", lambda f: jax.vmap(gradients(f), (0, None, None)), (Q1, K0, V0)),
    case("grad(vmap), shared key", lambda f: gradients(jax.vmap(f, (0, None, None))), (Q1, K0, V0)),
    case("grad(vmap), axes", lambda f: gradients(jax.vmap(f, (1, 2, -1), 3)), (
        np.moveaxis(Q1, 0, 1), np.moveaxis(K1, 0, 2), np.moveaxis(V1, 0, -1)
    )),
    case("scan", lambda f: stacked(f), QKV0, 1, 0),
    case("grad(scan)", lambda f: gradients(stacked(f, remat=False)), QKV0),
    case("grad(scan(remat))", lambda f: gradients(stacked(f)), QKV0, 2),
    case("vmap(grad(scan(remat)))", lambda f: jax.vmap(gradients(stacked(f))), QKV1, 2),
    case("grad(vmap(scan(remat)))", lambda f: gradients(jax.vmap(stacked(f))), QKV1, 2),
    case("grad(remat(vmap))", lambda f: gradients(jax.checkpoint(jax.vmap(f))), QKV1, 2),
    case("remat nothing saveable", rematerialized(policies.nothing_saveable), QKV0, 2),
    case("remat dots saveable", rematerialized(policies.dots_saveable), QKV0, 2),
    case("remat everything saveable", rematerialized(policies.everything_saveable), QKV0),
    case("remat by name", rematerialized(policies.save_only_these_names("flash_attention")), QKV0),
    case("remat other name", rematerialized(policies.save_only_these_names("linear")), QKV0, 2),
    case("cond", lambda f: gradients(lambda q, k, v: jax.lax.cond(q.sum() > 0, f, lambda q, k, v: q, q, k, v)), QKV0),
    case("jvp", along_query(directional), QKV0, 1, 0),
    case("jacrev", lambda f: jax.jacrev(f, (0, 1)), QKV0),
    case("jacfwd", lambda f: jax.jacfwd(f, (0, 1)), QKV0, 1, 0, dead=True),
    case("linearize", along_query(lambda f, q: jax.vmap(jax.linearize(f, q)[1])(jnp.stack([q, 2 * q]))), QKV0, 1, 0,
         dead=True),
    case("linear_transpose", along_query(lambda f, q: jax.linear_transpose(jax.linearize(f, q)[1], q)(f(q))), QKV0, 2),
    # Of a derivative's derivative there is only plain code, so no label of it.
    case("grad(grad)", second_order["grad(grad)"], QKV0),
    case("jvp(grad)", second_order["jvp(grad)"], QKV0, 1, 0),
    case("jvp(jvp)", second_order["jvp(jvp)"], QKV0, 1, 0, eager=False),
    case("grad of jvp", second_order["grad of jvp"], QKV0, 0, 0),
    case("grad", gradients, (*QKV0, IDS[0], LENGTHS[0]), op="ids"),
    case("vmap(grad)", lambda f: jax.vmap(gradients(f)), (*QKV1, IDS, LENGTHS), op="ids"),
    case("grad(vmap), shared ids", lambda f: gradients(jax.vmap(f, (0, 0, 0, None, 0))), (*QKV1, IDS[0], LENGTHS),
         op="ids"),
    case("vmap(grad(scan(remat)))", lambda f: jax.vmap(gradients(stacked(f))), (*QKV1, IDS, LENGTHS), 2, op="ids"),
    case("jvp", lambda f: lambda q, k, v, *ids: directional(lambda q: f(q, k, v, *ids), q), (*QKV0, IDS[0], LENGTHS[0]),
         1, 0, op="ids"),
    case("jacfwd", jax.jacfwd, (*QKV0, IDS[0], LENGTHS[0]), 1, 0, op="ids", dead=True),
    case("grad(grad)", lambda f: gradients(lambda *a: gradients(f)(*a)[0]), (*QKV0, IDS[0], LENGTHS[0]), op="ids",
         eager=False),
    case("grad", gradients, (X1[0], W, BIAS), op="linear"),
    case("vmap, shared weight", lambda f: jax.vmap(f, (0, None, None)), (X1, W, BIAS), 1, 0, op="linear"),
    case("grad(vmap), shared weight", lambda f: gradients(jax.vmap(f, (0, None, None))), (X1, W, BIAS), op="linear"),
    case("vmap(grad), shared weight", lambda f: jax.vmap(gradients(f), (0, None, None)), (X1, W, BIAS), op="linear"),
    case("vmap, own weights", jax.vmap, (X1, WS, BIASES), 1, 0, op="linear"),
    case("grad(vmap), own weights", lambda f: gradients(jax.vmap(f)), (X1, WS, BIASES), op="linear"),
    case("vmap(grad), own weights", lambda f: jax.vmap(gradients(f)), (X1, WS, BIASES), op="linear"),
    case("grad(vmap(vmap)), one weight shared",
         lambda f: gradients(jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, None))), (X1, WS, BIAS), op="linear"),
    case("grad of scan over weights", linear_weights_in_a_scan, (X1[0], WS, BIASES), op="linear"),
    case("grad(grad)", lambda f: gradients(lambda *a: gradients(f)(*a)[1]), (X1[0], W, BIAS), op="linear"),
]  # fmt: skip


def close(found, wanted, tolerance=2e-5):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def recorded():
    return {label(op, key) for op, calls in get_invocations().items() for key in calls}


def kernel_counts(lowered, kernel):
    counts = {split_label(text)[0].split("@")[0]: n for text, n in count_labels(lowered).items()}
    return counts.get(kernel, 0), counts.get(f"{kernel}_bwd", 0)


@pytest.fixture(scope="module", autouse=True)
def own_selector():
    """One selector for all tests of this file, as none of them stores anything: eager calls stay compiled."""
    before = set_default_selector(ConfigSelectorChain())
    yield
    set_default_selector(before)


@pytest.mark.parametrize(("op", "make", "arrays", "forward", "backward", "dead", "eager"), CASES)
def test_transform_is_right_and_labels_are_those_of_the_program(op, make, arrays, forward, backward, dead, eager):
    fn, reference, kernel = OPS[op]
    clear_invocations()
    lowered = jax.jit(make(fn)).lower(*arrays)
    labels = set(find_labels_in_lowered(lowered))
    assert kernel_counts(lowered, kernel) == (forward, backward)
    assert recorded() == labels  # nothing that is not in the program, and all that is
    compiled = lowered.compile(FAST)
    assert set(find_labels_in_lowered(compiled)) == (set() if dead else labels)
    wanted = jax.jit(make(reference), compiler_options=FAST)(*arrays)
    close(compiled(*arrays), wanted)
    if eager:
        close(make(fn)(*arrays), wanted)
