"""The maths of the layers, free of any framework."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel_ops import AttentionConfig, LinearConfig, flash_attention
from ejkernel_ops.core.snapshot import entered

CONFIGS = (AttentionConfig, LinearConfig)


def at_path(path: str | None) -> contextlib.AbstractContextManager:
    """Context in which calls carry the dotted path of their module; without a path it does nothing."""
    if path is None:
        return contextlib.nullcontext()
    return entered(lambda snapshot: dataclasses.replace(snapshot, path=path))


def attend(
    query: Float[Array, "*batch q_len num_heads head_dim"],
    key: Float[Array, "*batch kv_len num_kv_heads head_dim"],
    value: Float[Array, "*batch kv_len num_kv_heads v_dim"],
    *,
    bias: Any = None,
    mask: Any = None,
    **options: Any,
) -> Float[Array, "*batch q_len num_heads v_dim"]:
    """`flash_attention` with any number of batch axes.

    Args:
        query: `(..., q_len, num_heads, head_dim)`.
        key: `(..., kv_len, num_kv_heads, head_dim)`.
        value: `(..., kv_len, num_kv_heads, v_dim)`.
        bias: broadcastable to `(..., num_heads, q_len, kv_len)`.
        mask: likewise; what is not 0 may be seen.
        **options: those of `flash_attention`.

    Returns:
        `(..., q_len, num_heads, v_dim)`.

    Raises:
        ValueError: batch axes that differ.

    Example:
        >>> x = jnp.ones((2, 3, 5, 4, 8))
        >>> attend(x, x, x).shape
        (2, 3, 5, 4, 8)
    """
    batch = query.shape[:-3]
    if key.shape[:-3] != batch or value.shape[:-3] != batch:
        raise ValueError(f"query {query.shape}, key {key.shape} and value {value.shape} differ in their batch axes")
    mask = mask if mask is None or mask.dtype == jnp.bool_ else mask != 0
    bias, mask = (None if x is None else _one_batch_axis(x, batch) for x in (bias, mask))
    query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    out = flash_attention(query, key, value, bias=bias, mask=mask, **options)
    return out.reshape(*batch, *out.shape[1:])


def _one_batch_axis(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """A bias or mask with its batch axes joined, still 1 where all of them broadcast."""
    lead = x.shape[:-3]
    if math.prod(lead) == 1:
        return x.reshape(1, *x.shape[-3:]) if x.ndim >= 3 else x
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(math.prod(batch), *x.shape[-3:])
