"""What our attention layers do between their linear maps, in all frameworks."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp

from ejkernel_ops.kernels.config import as_array

from .cache import attend_cached
from .functional import at_path, attend
from .rotary import Rotary


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


class AttentionLayer(Protocol):
    """What a layer says about its attention; see our attention layers for what each means."""

    @property
    def causal(self) -> bool:
        """Whether a token sees no later ones."""
        ...

    @property
    def rotary(self) -> Rotary | None:
        """Rotary position embedding of queries and keys."""
        ...

    @property
    def sliding_window(self) -> int | tuple[int, int] | None:
        """How many tokens before and after it a token sees."""
        ...

    @property
    def softmax_scale(self) -> float | None:
        """Of the logits; default `head_dim ** -0.5`."""
        ...

    @property
    def logits_soft_cap(self) -> float | None:
        """Logits become `cap * tanh(logits / cap)`."""
        ...

    @property
    def precision(self) -> Any:
        """Of products, as in `jax.lax.Precision`."""
        ...

    @property
    def dropout_rate(self) -> float:
        """Of the probabilities."""
        ...

    @property
    def dtype(self) -> Any:
        """Type to compute in; default that of the operands."""
        ...

    @property
    def reproducible(self) -> bool:
        """Whether gradients are the same bits in each run."""
        ...

    @property
    def config(self) -> Any:
        """What the layer pins of the config of attention."""
        ...

    @property
    def backend(self) -> str | None:
        """The back end that it pins."""
        ...

    @property
    def kernel_path(self) -> str | None:
        """Its dotted path, while `explain` asks for it."""
        ...


_OPTIONS = ("sliding_window", "softmax_scale", "logits_soft_cap", "precision", "config", "backend")


def attend_heads(
    layer: AttentionLayer,
    query: Any,
    key: Any,
    value: Any,
    *,
    cache: tuple[Any, Any, Any] | None = None,
    positions: Any = None,
    segment_ids: Any = None,
    dropout_rng: Any = None,
    **options: Any,
) -> tuple[Any, tuple[Any, Any, Any] | None]:
    """Rotary embedding and attention, with or without a cache, as a layer's attributes say.

    Args:
        layer: the layer.
        query: `(..., length, num_heads, head_dim)`.
        key: `(..., length, num_kv_heads, head_dim)`.
        value: `(..., length, num_kv_heads, head_dim)`.
        cache: keys, values and how many tokens they hold; these tokens are the next ones.
        positions: of the tokens, `(..., length)`; default they count up, from what the cache holds.
        segment_ids: `(..., length)`.
        dropout_rng: a key where dropout is on.
        **options: `mask, bias, kv_lengths, sinks` of `flash_attention`.

    Returns:
        `(..., length, num_heads, head_dim)`, and the cache with these tokens in it.

    Raises:
        ValueError: a cache without causality, or with segment ids or dropout; tokens that do not fit; positions without
            a rotary embedding.
        TypeError: a mask that is not bool.
    """
    if cache is not None:
        _refuse_cache(layer.causal, segment_ids, dropout_rng)
    _check_mask(options.get("mask"))
    query, key = _turned(layer, query, key, positions, 0 if cache is None else cache[2][..., None])
    options |= {name: getattr(layer, name) for name in _OPTIONS} | {"deterministic": layer.reproducible}
    dtype = layer.dtype or jnp.result_type(query, key, value)
    with at_path(layer.kernel_path):
        if cache is not None:
            out, *after = attend_cached(query, key, value, *cache, dtype=dtype, **options)
            return out, tuple(after)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        out = attend(
            query, key, value, causal=layer.causal, q_segment_ids=segment_ids, kv_segment_ids=segment_ids,
            dropout_rate=0.0 if dropout_rng is None else layer.dropout_rate, dropout_rng=dropout_rng, **options,
        )  # fmt: skip
        return out, None


def _turned(layer: AttentionLayer, query: Any, key: Any, positions: Any, start: Any) -> tuple[Any, Any]:
    """Queries and keys after the rotary embedding of a layer, if it has one; without positions they count up."""
    if layer.rotary is None:
        if positions is not None:
            raise ValueError("positions are given, but the layer has no rotary embedding to use them; leave them out")
        return query, key
    positions = start + jnp.arange(query.shape[-3]) if positions is None else jnp.asarray(positions)
    with at_path(None if layer.kernel_path is None else f"{layer.kernel_path}.rotary"):
        return layer.rotary(query, positions), layer.rotary(key, positions)


def _check_mask(mask: Any) -> None:
    if mask is not None and (dtype := as_array("mask", mask).dtype) != jnp.bool_:
        raise TypeError(f"mask is {dtype}; expected bool, true where a token may see another; add floats as bias")


def _refuse_cache(causal: bool, segment_ids: Any, dropout_rng: Any) -> None:
    if not causal:
        raise ValueError("decoding needs causal=True: earlier tokens cannot see those that come")
    if segment_ids is not None:
        raise ValueError("segment_ids are given while decoding; decode each document with a cache of its own")
    if dropout_rng is not None:
        raise ValueError("dropout is on while decoding; turn it off (deterministic=True; inference=True in Equinox)")
