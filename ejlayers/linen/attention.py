"""Attention of today's language models for Flax Linen: grouped heads, rotary embedding, windows, sinks, a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Bool, Float, Int

from ejkernel_ops import AttentionConfig

from ..arguments import check_rate, check_rotary
from ..rotary import Rotary
from ..self_attention import attend_heads, head_sizes
from .linear import DenseGeneral
from .norm import RMSNorm
from .pinned import Pinned


class Attention(Pinned, nn.Module):
    """Self-attention of a decoder or an encoder, with what current models have; the attention is a tunable kernel.

    Parameters are those of four general linear layers: `query`, `key`, `value` `(in_features, heads, head_dim)` and
    `out` `(num_heads, head_dim, out_features)`; with `qk_norm` of the norms `query_norm` and `key_norm`; with `sinks`
    `(num_heads,)`. With `decode` there is a collection `cache`, as that of `nn.MultiHeadDotProductAttention`: `init`
    makes it, empty and for as many tokens as the inputs of `init` have, and each call adds its tokens, one or more.

    Args:
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, of which `num_heads` is a multiple; default `num_heads`.
        head_dim: features of a head; default `in_features // num_heads`.
        out_features: features of outputs; default those of inputs.
        causal: whether a token sees no later ones.
        sliding_window: `(left, right)`, how many tokens before and after it a token sees; an int is both.
        softmax_scale: default `head_dim ** -0.5`.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        sinks: whether each head has a learned logit that takes its share of the probabilities and gives nothing.
        qk_norm: whether queries and keys of each head go through `RMSNorm`.
        rotary: rotary position embedding of queries and keys, or `None`.
        dropout_rate: of the probabilities.
        deterministic: whether dropout is off, where the call does not say.
        use_bias: whether the linear layers have biases.
        dtype: type to compute in; default that of inputs and parameters.
        param_dtype: type of the parameters.
        precision: as in `jax.lax.Precision`.
        kernel_init: initializer of the kernels.
        bias_init: initializer of the biases.
        decode: whether calls are about the next tokens after those in the cache.
        out_kernel_init: initializer of the kernel of `out`; default `kernel_init`.
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.

    Raises:
        ValueError: a rate of dropout that is none.
        TypeError: a `rotary` that is no `Rotary`, or a `reproducible` that is no bool.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = Attention(4, num_kv_heads=2, rotary=Rotary()), jnp.ones((2, 5, 16))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 5, 16)

    Source: grouped heads: Ainslie et al. 2023, arXiv:2305.13245; rotary: Su et al. 2021, arXiv:2104.09864; sinks: Xiao
    et al. 2023, arXiv:2309.17453.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    causal: bool = True
    sliding_window: int | tuple[int, int] | None = None
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    qk_norm: bool = False
    rotary: Rotary | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    bias_init: Any = initializers.zeros_init()
    decode: bool = False
    out_kernel_init: Any = dataclasses.field(default=None, kw_only=True)
    config: AttentionConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)
    reproducible: bool = dataclasses.field(default=True, kw_only=True)

    config_type = AttentionConfig

    def __post_init__(self) -> None:
        """Refuses what is wrong with the fields where the layer is made."""
        check_rotary(self.rotary)
        check_rate("dropout_rate", self.dropout_rate)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch length in_features"],
        *,
        positions: Int[Array, "*#batch length"] | None = None,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*batch length"] | None = None,
        kv_lengths: Int[Array, "*batch"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*batch length out_features"]:
        """From `(..., length, in_features)` to `(..., length, out_features)`.

        Args:
            x: the inputs.
            positions: of the tokens, `(..., length)` integers; default they count up, from what the cache holds.
            mask: bool, broadcastable to `(..., num_heads, length, length)`, true where a token may see another; with a
                cache it is for all of its keys, `(..., length, max_length)`.
            bias: added to the logits, broadcastable in the same way.
            segment_ids: `(..., length)` integers: tokens see those with the same one; negative ones see nothing.
            kv_lengths: `(...)` integers: tokens from there on are seen by none.
            deterministic: whether dropout is off; default what the module says.

        Returns:
            The outputs.

        Raises:
            ValueError: heads that do not divide; decoding past the cache's end, without causality, or with segment ids
                or dropout.
        """
        num_kv_heads, head_dim = head_sizes(x.shape[-1], self.num_heads, self.num_kv_heads, self.head_dim)
        out_features = x.shape[-1] if self.out_features is None else self.out_features
        names = ("use_bias", "dtype", "param_dtype", "precision", "kernel_init", "bias_init")
        options = {name: getattr(self, name) for name in names}
        heads = {"query": self.num_heads, "key": num_kv_heads, "value": num_kv_heads}
        query, key, value = (DenseGeneral((n, head_dim), name=name, **options)(x) for name, n in heads.items())
        if self.qk_norm:
            norm = {"dtype": self.dtype, "param_dtype": self.param_dtype}
            query, key = RMSNorm(name="query_norm", **norm)(query), RMSNorm(name="key_norm", **norm)(key)
        sinks = self.param("sinks", initializers.zeros, (self.num_heads,), self.param_dtype) if self.sinks else None
        cache = self._cache(key, value) if self.decode else None
        out, after = attend_heads(
            self, query, key, value, cache=tuple(x.value for x in cache) if cache else None, positions=positions,
            segment_ids=segment_ids, sinks=sinks, dropout_rng=self._dropout_rng(deterministic), mask=mask, bias=bias,
            kv_lengths=kv_lengths,
        )  # fmt: skip
        for variable, new in zip(cache or (), after or ()):
            variable.value = new
        options |= {} if self.out_kernel_init is None else {"kernel_init": self.out_kernel_init}
        return DenseGeneral(out_features, axis=(-2, -1), name="out", **options)(out)

    def _cache(self, key: Any, value: Any) -> tuple[Any, Any, Any] | None:
        """The cache; `None` in the call that makes it and leaves it empty."""
        is_there, dtype = self.has_variable("cache", "cached_key"), self.dtype or jnp.result_type(key, value)
        cache = (
            self.variable("cache", "cached_key", jnp.zeros, key.shape, dtype),
            self.variable("cache", "cached_value", jnp.zeros, value.shape, dtype),
            self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32)),
        )
        return cache if is_there else None

    def _dropout_rng(self, deterministic: bool | None) -> Any:
        if self.dropout_rate == 0.0 or (self.deterministic if deterministic is None else deterministic):
            return None
        return self.make_rng("dropout")
