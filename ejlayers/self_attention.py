"""What our attention layers do between their linear maps, in all frameworks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel_ops.kernels.config import as_array

from .cache import attend_cached
from .functional import at_path, attend


def head_sizes(features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """The number of heads of keys and values, and the features of a head, that a layer's arguments say.

    Args:
        features: of the inputs.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; default `num_heads`.
        head_dim: default `features // num_heads`.

    Returns:
        `(num_kv_heads, head_dim)`.

    Raises:
        ValueError: heads that do not divide.

    Example:
        >>> head_sizes(512, 8, 2, None)
        (2, 64)
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; expected at least 1")
    if head_dim is None and features % num_heads:
        raise ValueError(f"in_features is {features}, no multiple of num_heads, {num_heads}; pass head_dim")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads is {num_heads}; expected a multiple of num_kv_heads, which is {num_kv_heads}")
    return num_kv_heads, features // num_heads if head_dim is None else head_dim


def attend_heads(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    *,
    cache: tuple[Any, Any, Any] | None = None,
    positions: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    dropout_rng: Any = None,
    path: str | None = None,
    **options: Any,
) -> tuple[Any, tuple[Any, Any, Any] | None]:
    """Rotary embedding and attention, with or without a cache, as a layer's attributes say.

    Args:
        layer: with `causal, rotary, sliding_window, softmax_scale, logits_soft_cap, precision, dropout_rate, dtype,
            config, backend`.
        query: `(..., length, num_heads, head_dim)`.
        key: `(..., length, num_kv_heads, head_dim)`.
        value: `(..., length, num_kv_heads, head_dim)`.
        cache: keys, values and how many tokens they hold; these tokens are the next ones.
        positions: of the tokens, `(..., length)`; default they count up, from what the cache holds.
        segment_ids: `(..., length)`.
        sinks: `(num_heads,)`.
        dropout_rng: a key where dropout is on.
        path: dotted path of the module, while `explain` asks for it.
        **options: `mask, bias, kv_lengths` of `flash_attention`.

    Returns:
        `(..., length, num_heads, head_dim)`, and the cache with these tokens in it.

    Raises:
        ValueError: a cache without causality, or with segment ids or dropout; tokens that do not fit; positions without
            a rotary embedding.
        TypeError: a mask that is not bool.
    """
    if cache is not None:
        _refuse_cache(layer.causal, segment_ids, dropout_rng)
    mask = options.get("mask")
    if mask is not None and (mask := as_array("mask", mask)).dtype != jnp.bool_:
        raise TypeError(f"mask is {mask.dtype}; expected bool, true where a token may see another; add floats as bias")
    if layer.rotary is None and positions is not None:
        raise ValueError("positions are given, but the layer has no rotary embedding to use them; leave them out")
    if layer.rotary is not None:
        if positions is None:
            positions = (0 if cache is None else cache[2][..., None]) + jnp.arange(query.shape[-3])
        with at_path(path):
            query, key = (layer.rotary(x, jnp.asarray(positions)) for x in (query, key))
    options |= {
        "sliding_window": layer.sliding_window, "softmax_scale": layer.softmax_scale, "sinks": sinks,
        "logits_soft_cap": layer.logits_soft_cap, "precision": layer.precision, "config": layer.config,
        "backend": layer.backend,
    }  # fmt: skip
    dtype = layer.dtype or jnp.result_type(query, key, value)
    with at_path(path):
        if cache is not None:
            out, *after = attend_cached(query, key, value, *cache, dtype=dtype, **options)
            return out, tuple(after)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        out = attend(
            query, key, value, causal=layer.causal, q_segment_ids=segment_ids, kv_segment_ids=segment_ids,
            dropout_rate=0.0 if dropout_rng is None else layer.dropout_rate, dropout_rng=dropout_rng, **options,
        )  # fmt: skip
        return out, None


def _refuse_cache(causal: bool, segment_ids: Any, dropout_rng: Any) -> None:
    if not causal:
        raise ValueError("decoding needs causal=True: earlier tokens cannot see those that come")
    if segment_ids is not None:
        raise ValueError("segment_ids are given while decoding; decode each document with a cache of its own")
    if dropout_rng is not None:
        raise ValueError("dropout is on while decoding; turn it off (deterministic=True; inference=True in Equinox)")
