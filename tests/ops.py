"""The ops, what they are compared with, and how: shared by the tests of transforms and of sharding."""

import collections
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import flash_attention, get_invocations, label, layer_norm, linear, rms_norm, rotary_embedding
from ejkernel_ops.utils.meta import call_sites, split_label


def attention(query, key, value, bias=None, mask=None, ids=None, lengths=None, causal=False):
    """Attention as it is defined, in plain JAX; a row that sees nothing gives 0."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    logits = logits if bias is None else logits + bias
    masks = [] if mask is None else [mask]
    if causal:
        masks.append(jnp.tril(jnp.ones(logits.shape[-2:], bool)))
    if ids is not None:
        masks.append(((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0))[:, None])
    if lengths is not None:
        masks.append(jnp.arange(key.shape[1]) < lengths[:, None, None, None])
    if not masks:
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    weights = functools.reduce(jnp.multiply, masks, weights)
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / jnp.where(total == 0, 1.0, total), value)


def norm(x, scale, bias=0, centred=False):
    """A norm over the last axis as it is defined, in plain JAX."""
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def rotary(x, positions):
    """Rotary embedding as models write it."""
    angles = positions[..., None, None] * 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = (jnp.concatenate([f(angles), f(angles)], -1) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


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
    "rms_norm": (rms_norm, norm, "rms_norm"),
    "layer_norm": (layer_norm, functools.partial(norm, centred=True), "layer_norm"),
    "residual": (
        lambda x, scale, residual: jnp.stack(layer_norm(x, scale, residual=residual)),
        lambda x, scale, residual: jnp.stack([norm(x + residual, scale, centred=True), x + residual]),
        "layer_norm",
    ),
    "rotary": (rotary_embedding, rotary, "rotary_embedding"),
}


def normal(seed, *shape):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape))


def gradients(fn):
    """Of the sum of squares, with respect to every float argument."""

    def wrapped(*args):
        floats = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
        return jax.grad(lambda *args: (fn(*args) ** 2).sum(), argnums=floats)(*args)

    return wrapped


def along_query(transform):
    """A transform of functions of one argument, applied at the query."""
    return lambda fn: lambda q, k, v: transform(lambda q: fn(q, k, v), q)


def directional(fn, x):
    return jax.jvp(fn, (x,), (jnp.cos(x),))


def close(found, wanted, tolerance=2e-5):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def jitted(fn, *arrays):
    return jax.jit(fn)(*arrays)


def recorded():
    return {label(op, key) for op, calls in get_invocations().items() for key in calls}


def runs(lowered):
    """How often each kernel runs."""
    return {split_label(site.label)[0]: site.executions for site in call_sites(lowered)}


def kernels_of(fn, *args):
    """How often each kernel runs in a function of arrays and Equinox models, all of its calls together."""
    counts = collections.Counter()
    for site in call_sites(eqx.filter_jit(fn).lower(*args)):
        counts[split_label(site.label)[0].split("@")[0]] += site.executions
    return dict(counts)
