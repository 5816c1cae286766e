"""Attention of an NNX layer to the tokens that its cache holds."""

from __future__ import annotations

from typing import Any

from ..cache import attend_cached
from ..functional import at_path


def decoded(layer: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`attend_cached` with the cache of a layer, which then holds the new tokens too.

    Args:
        layer: with `cached_key, cached_value, cache_index`, as `nnx.MultiHeadAttention` has them.
        query: `(..., q_len, num_heads, head_dim)`.
        key: `(..., q_len, num_kv_heads, head_dim)`.
        value: `(..., q_len, num_kv_heads, head_dim)`.
        **options: those of `attend_cached`.

    Returns:
        `(..., q_len, num_heads, head_dim)`.

    Raises:
        ValueError: tokens that do not fit.
    """
    cache = (layer.cached_key, layer.cached_value, layer.cache_index)
    with at_path(layer.kernel_path):
        out, *after = attend_cached(query, key, value, *(x[...] for x in cache), **options)
    for variable, x in zip(cache, after):
        variable[...] = x
    return out
