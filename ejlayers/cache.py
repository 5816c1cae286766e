"""Keys and values of earlier tokens, kept for decoding: written, checked and attended to; free of any framework."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Float, Int

from .functional import attend


def attend_cached(
    query: Float[Array, "*batch q_len num_heads head_dim"],
    key: Float[Array, "*batch q_len num_kv_heads head_dim"],
    value: Float[Array, "*batch q_len num_kv_heads v_dim"],
    cached_key: Float[Array, "*batch size num_kv_heads head_dim"],
    cached_value: Float[Array, "*batch size num_kv_heads v_dim"],
    index: Int[Array, ""],
    *,
    dtype: Any = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """Causal attention of the next tokens, one or more, to themselves and to all that a cache holds.

    Args:
        query: of the next tokens.
        key: of the same tokens.
        value: of the same tokens.
        cached_key: the cache, of tokens `[0, index)` so far.
        cached_value: the cache of values.
        index: how many tokens the cache holds.
        dtype: type to compute in; default the common one of queries and cache.
        **options: those of `flash_attention`, without `causal` and `q_offset`; a mask is for all keys of the cache.

    Returns:
        Output `(..., q_len, num_heads, v_dim)`, and cache and index with the tokens in it. Where they do not fit, and
        that could not be seen before the program ran, the output is NaN.

    Raises:
        ValueError: other shapes than the cache's, or tokens that do not fit; under `checkify` that is a check.

    Example:
        >>> x, empty = jnp.ones((1, 3, 2, 8)), jnp.zeros((1, 16, 2, 8))
        >>> out, *cache = attend_cached(x, x, x, empty, empty, jnp.array(0))
        >>> out.shape, int(cache[2])
        ((1, 3, 2, 8), 3)
    """
    count, size = key.shape[-3], cached_key.shape[-3]
    for name, new, cached in (("key", key, cached_key), ("value", value, cached_value)):
        if new.shape[:-3] + new.shape[-2:] != cached.shape[:-3] + cached.shape[-2:]:
            raise ValueError(
                f"{name} has shape {new.shape}; expected that of its cache, {cached.shape}, but for the length"
            )
    if query.shape[-3] != count:
        raise ValueError(f"query has {query.shape[-3]} tokens and key {count}; decoding takes the same tokens for both")
    fits = _fits(index, count, size)
    cached_key, cached_value = _written(cached_key, key, index), _written(cached_value, value, index)
    dtype = dtype or jnp.result_type(query, cached_key, cached_value)
    operands = (x.astype(dtype) for x in (query, cached_key, cached_value))
    out = attend(*operands, causal=True, q_offset=index.astype(jnp.int32), **options)
    return jnp.where(fits, out, jnp.nan), cached_key, cached_value, index + count


def _fits(index: jax.Array, count: int, size: int) -> Any:
    """Whether so many tokens more fit into a cache; an error where it is known that they do not."""
    fits = index + count <= size
    full = f"the cache has room for {size} tokens: make it longer, or start anew; {count} more do not fit"
    if count > size or not (isinstance(fits, Tracer) or fits):
        raise ValueError(full if isinstance(index, Tracer) else f"{full} after {int(index)}")
    checkify.debug_check(fits, full + " after {index}", index=index)
    return fits


def _written(cached: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """A cache with new entries from `index` on, in the type of the cache."""
    return lax.dynamic_update_slice_in_dim(cached, new.astype(cached.dtype), index, cached.ndim - 3)
