"""Operands of attention as the XLA back end takes them: heads first, lengths padded to blocks, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import xla


def arrange(arrays: tuple, statics: xla.Statics, block_q: int, block_kv: int) -> xla.Operands:
    """The arrays with heads first, lengths padded to blocks, and keys that nobody may see zeroed."""
    query, key, value, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed = arrays
    kv_heads, pad_q, pad_kv = key.shape[2], (-query.shape[1]) % block_q, (-key.shape[1]) % block_kv
    unseen = _unseen_keys(query, key, mask, q_offset, kv_ids, kv_lengths, statics)
    if unseen is not None:  # what they hold, NaN included, must not reach a product
        key, value = (jnp.where(unseen[..., None], jnp.zeros_like(a), a) for a in (key, value))

    def ids(x, pad):
        return None if x is None else jnp.pad(x, ((0, 0), (0, pad)), constant_values=-1)

    return xla.Operands(
        query=queries(query, kv_heads, pad_q),
        key=keys(key, pad_kv),
        value=keys(value, pad_kv),
        bias=None if bias is None else tiles(bias, kv_heads, (query.shape[1], key.shape[1]), (pad_q, pad_kv)),
        mask=None if mask is None else tiles(mask, kv_heads, (query.shape[1], key.shape[1]), (pad_q, pad_kv)),
        q_offset=q_offset,
        q_segment_ids=ids(q_ids, pad_q),
        kv_segment_ids=ids(kv_ids, pad_kv),
        kv_lengths=kv_lengths,
        sinks=sinks,
        dropout_seed=seed,
    )


def _unseen_keys(
    query: jax.Array, key: jax.Array, mask: Any, q_offset: Any, kv_ids: Any, kv_lengths: Any, statics: xla.Statics
) -> jax.Array | None:
    """Keys that no query may see by one of the masks alone, broadcastable to `(batch, kv_len, kv_heads)`."""
    parts: list[Any] = []
    cols = np.arange(key.shape[1])[None, :, None]
    if mask is not None:
        parts.append(unseen_by_mask(mask, key.shape[2]))
    if kv_ids is not None:
        parts.append(kv_ids[:, :, None] < 0)
    if kv_lengths is not None:
        parts.append(cols >= kv_lengths[:, None, None])
    if statics.causal or statics.sliding_window is not None:
        left, right = statics.sliding_window or (None, 0)
        first: Any = statics.static_offset if q_offset is None else q_offset[:, None, None]
        if left is not None:
            parts.append(cols < first - left)
        parts.append(cols > first + query.shape[1] - 1 + right)
    parts = [part for part in parts if not isinstance(part, np.ndarray) or part.any()]
    return functools.reduce(jnp.logical_or, parts) if parts else None


def unseen_by_mask(mask: jax.Array, kv_heads: int) -> jax.Array:
    """Keys that a mask hides from every query, broadcastable to `(batch, kv_len, kv_heads)`."""
    kv_heads = kv_heads if mask.shape[1] > 1 else 1
    by_group = mask.reshape(mask.shape[0], kv_heads, mask.shape[1] // kv_heads, *mask.shape[2:])
    return ~by_group.any((2, 3)).swapaxes(1, 2)


def queries(x: jax.Array, kv_heads: int, pad: int, fill: float = 0.0) -> jax.Array:
    """`(b, q, h, d)` to `(b, k, g, q, d)`."""
    batch, length, heads, width = x.shape
    x = x.transpose(0, 2, 1, 3).reshape(batch, kv_heads, heads // kv_heads, length, width)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad), (0, 0)), constant_values=fill) if pad else x


def from_queries(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`(b, k, g, q, d)`, padded, to `(b, q, h, d)`."""
    batch, length, heads, width = shape
    return x[:, :, :, :length].reshape(batch, heads, length, width).transpose(0, 2, 1, 3)


def keys(x: jax.Array, pad: int) -> jax.Array:
    """`(b, s, k, d)` to `(b, k, s, d)`."""
    x = x.transpose(0, 2, 1, 3)
    return jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) if pad else x


def from_keys(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`(b, k, s, d)`, padded, to `(b, s, k, d)`."""
    return x[:, :, : shape[1]].transpose(0, 2, 1, 3)


def tiles(x: jax.Array, kv_heads: int, lengths: tuple[int, int], pads: tuple[int, int]) -> jax.Array:
    """`(b, h, q, s)`, axes of length 1 where it broadcasts, to `(b, k, g, q, s)`."""
    batch, heads, q_len, kv_len = x.shape
    x = x.reshape(batch, kv_heads, heads // kv_heads, q_len, kv_len) if heads > 1 else x[:, :, None]
    widths = [pad if n == length and n > 1 else 0 for n, length, pad in zip((q_len, kv_len), lengths, pads)]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, widths[0]), (0, widths[1]))) if any(widths) else x


def from_tiles(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`(b, k, g, q, s)`, padded, to `(b, h, q, s)`."""
    return x[:, :, :, : shape[2], : shape[3]].reshape(shape)
