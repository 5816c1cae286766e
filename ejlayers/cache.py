"""Keys and values of earlier tokens, kept for decoding: written, checked and attended to; free of any framework."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Float, Int

from .functional import at_path, attend


def attend_cached(
    query: Float[Array, "*batch q_len num_heads head_dim"],
    key: Float[Array, "*batch q_len num_kv_heads head_dim"],
    value: Float[Array, "*batch q_len num_kv_heads v_dim"],
    cached_key: Float[Array, "*batch size num_kv_heads head_dim"],
    cached_value: Float[Array, "*batch size num_kv_heads v_dim"],
    index: Int[Array, "..."],
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
        index: how many tokens the cache holds, a number or one for each example, `(...)`.
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
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} tokens and key {key.shape[-3]}; decoding takes the same for both"
        )
    cached_key, cached_value, after, fits = extended(key, value, cached_key, cached_value, index)
    dtype = dtype or jnp.result_type(query, cached_key, cached_value)
    operands = (x.astype(dtype) for x in (query, cached_key, cached_value))
    out = attend(*operands, causal=True, q_offset=index.astype(jnp.int32), **options)
    return _or_nan(fits, out), cached_key, cached_value, after


def attend_cached_by(
    plain: Any, cache: tuple[Any, Any, Any], query: Any, key: Any, value: Any, *, mask: Any = None, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """`attend_cached` as an attention function of Flax: what its kernel cannot do it does itself, on the same cache.

    Args:
        plain: a `KernelAttention` of either Flax, with `config`, `backend`, `path`, `reproducible` and `why_not`.
        cache: keys, values and how many tokens they hold.
        query: of the next tokens, `(..., q_len, num_heads, head_dim)`.
        key: of the same tokens, `(..., q_len, num_kv_heads, head_dim)`.
        value: of the same tokens.
        mask: for all keys of the cache.
        **options: those that Flax passes: `dropout_rate`, `module` and so on.

    Returns:
        As `attend_cached`.

    Raises:
        ValueError: as `attend_cached`.
    """
    dropping = options.get("dropout_rate", 0.0) > 0.0 and not options.get("deterministic", False)
    if not dropping and not plain.why_not(query, key, value, **options):
        with at_path(plain.path):
            return attend_cached(
                query, key, value, *cache, mask=mask, dtype=options.get("dtype"), precision=options.get("precision"),
                config=plain.config, backend=plain.backend, deterministic=plain.reproducible,
            )  # fmt: skip
    keys, values, after, fits = extended(key, value, *cache)
    seen = seen_of_cache(cache[2], query.shape[-3], keys.shape[-3], mask)
    out = plain(query, keys.astype(query.dtype), values.astype(query.dtype), mask=seen, **options)
    return _or_nan(fits, out), keys, values, after


def extended(
    key: Float[Array, "*batch q_len num_kv_heads head_dim"],
    value: Float[Array, "*batch q_len num_kv_heads v_dim"],
    cached_key: Float[Array, "*batch size num_kv_heads head_dim"],
    cached_value: Float[Array, "*batch size num_kv_heads v_dim"],
    index: Int[Array, "..."],
) -> tuple[Any, Any, Any, Any]:
    """A cache with the next tokens in it.

    Args:
        key: of the next tokens.
        value: of the same tokens.
        cached_key: the cache, of tokens `[0, index)` so far.
        cached_value: the cache of values.
        index: how many tokens the cache holds, a number or one for each example, `(...)`.

    Returns:
        Keys, values, how many tokens they hold now, and whether they fit.

    Raises:
        ValueError: other shapes than the cache's, or tokens that do not fit; under `checkify` that is a check.

    Example:
        >>> x, empty = jnp.ones((1, 3, 2, 8)), jnp.zeros((1, 16, 2, 8))
        >>> int(extended(x, x, empty, empty, jnp.array(5))[2])
        8
    """
    count, size = key.shape[-3], cached_key.shape[-3]
    if index.shape not in ((), key.shape[:-3]):
        raise ValueError(f"the cache's index has shape {index.shape}; expected () or the batch axes, {key.shape[:-3]}")
    for name, new, cached in (("key", key, cached_key), ("value", value, cached_value)):
        if new.shape[:-3] + new.shape[-2:] != cached.shape[:-3] + cached.shape[-2:]:
            raise ValueError(
                f"{name} has shape {new.shape}; expected that of its cache, {cached.shape}, but for the length"
            )
    fits = _fits(index, count, size)
    return _written(cached_key, key, index), _written(cached_value, value, index), index + count, fits


def seen_of_cache(index: jax.Array, count: int, size: int, mask: Any = None) -> jax.Array:
    """Which keys of a cache the next tokens see: those up to themselves, and of these what a mask lets through.

    Args:
        index: how many tokens the cache held before, a number or `(...)`.
        count: of the next tokens.
        size: of the cache.
        mask: broadcastable to `(..., num_heads, count, size)`, or `None`.

    Returns:
        `(count, size)`, `(..., 1, count, size)`, or of the mask's axes.

    Example:
        >>> seen_of_cache(jnp.array(1), 1, 3)
        Array([[ True,  True, False]], dtype=bool)
    """
    first = index[..., None, None, None] if index.ndim else index
    seen = jnp.arange(size) <= first + jnp.arange(count)[:, None]
    return seen if mask is None else seen & jnp.asarray(mask, bool)


def _fits(index: jax.Array, count: int, size: int) -> Any:
    """Whether so many tokens more fit into a cache; an error where it is known that they do not."""
    fits = index + count <= size
    full = f"the cache has room for {size} tokens: make it longer, or start anew; {count} more do not fit"
    if count > size or not (isinstance(fits, Tracer) or fits.all()):
        raise ValueError(full if isinstance(index, Tracer) else f"{full} after {int(index.max())}")
    checkify.debug_check(jnp.all(fits), full + " after {index}", index=index)
    return fits


def _written(cached: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """A cache with new entries from `index` on, in the type of the cache."""
    if index.ndim:
        return jax.vmap(_written)(cached, new, index)
    return lax.dynamic_update_slice_in_dim(cached, new.astype(cached.dtype), index, cached.ndim - 3)


def _or_nan(fits: Any, out: jax.Array) -> jax.Array:
    """Outputs, with NaN for the examples whose tokens did not fit."""
    fits = jnp.asarray(fits)
    return jnp.where(fits.reshape(fits.shape + (1,) * (out.ndim - fits.ndim)), out, jnp.nan)
