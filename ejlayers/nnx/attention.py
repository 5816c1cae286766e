"""Attention of today's language models for Flax NNX: grouped heads, rotary embedding, windows, sinks, a cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ejkernel_ops import AttentionConfig

from ..arguments import check_rate, check_rotary
from ..rotary import Rotary
from ..self_attention import attend_heads, head_sizes
from .linear import LinearGeneral
from .norm import RMSNorm
from .pinned import Pinned


class Attention(nnx.Module, Pinned):
    """Self-attention of a decoder or an encoder, with what current models have; the attention is a tunable kernel.

    Parameters are those of four general linear layers: `query`, `key`, `value` `(in_features, heads, head_dim)` and
    `out` `(num_heads, head_dim, out_features)`; with `qk_norm` of the norms `query_norm` and `key_norm`; with `sinks`
    `(num_heads,)`.

    Args:
        in_features: features of inputs.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, of which `num_heads` is a multiple; default `num_heads`.
        head_dim: features of a head; default `in_features // num_heads`.
        out_features: features of outputs; default `in_features`.
        causal: whether a token sees no later ones.
        sliding_window: `(left, right)`, how many tokens before and after it a token sees; an int is both.
        softmax_scale: default `head_dim ** -0.5`.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        sinks: whether each head has a learned logit that takes its share of the probabilities and gives nothing.
        qk_norm: whether queries and keys of each head go through `RMSNorm`.
        rotary: rotary position embedding of queries and keys, or `None`.
        dropout_rate: of the probabilities.
        deterministic: whether dropout is off, where the call does not say; `model.eval()` changes it.
        decode: whether calls are about the next tokens, where they do not say; `nnx.view` changes it.
        use_bias: whether the linear layers have biases.
        dtype: type to compute in; default that of inputs and parameters.
        param_dtype: type of the parameters.
        precision: as in `jax.lax.Precision`.
        kernel_init: initializer of the kernels; default that of `nnx.LinearGeneral`.
        out_kernel_init: initializer of the kernel of `out`; default `kernel_init`.
        bias_init: initializer of the biases.
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.
        rngs: for the parameters, and its stream `dropout` for dropout.

    Raises:
        ValueError: heads that do not divide, or a rate of dropout that is none.
        TypeError: a `rotary` that is no `Rotary`, or a `reproducible` that is no bool.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> layer = Attention(16, 4, num_kv_heads=2, rotary=Rotary(), rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((2, 5, 16))).shape
        (2, 5, 16)

    Source: grouped heads: Ainslie et al. 2023, arXiv:2305.13245; rotary: Su et al. 2021, arXiv:2104.09864; sinks: Xiao
    et al. 2023, arXiv:2309.17453.
    """

    config_type = AttentionConfig
    reproducible: bool = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        causal: bool = True,
        sliding_window: int | tuple[int, int] | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        qk_norm: bool = False,
        rotary: Rotary | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        decode: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = None,
        out_kernel_init: Any = None,
        bias_init: Any = None,
        config: AttentionConfig | None = None,
        backend: str | None = None,
        reproducible: bool = True,
        rngs: nnx.Rngs,
    ):
        check_rotary(rotary)
        check_rate("dropout_rate", dropout_rate)
        num_kv_heads, head_dim = head_sizes(in_features, num_heads, num_kv_heads, head_dim)
        out_features = in_features if out_features is None else out_features
        options = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        given = {"kernel_init": kernel_init, "bias_init": bias_init}
        options |= {name: value for name, value in given.items() if value is not None}
        self.query = LinearGeneral(in_features, (num_heads, head_dim), **options)
        self.key = LinearGeneral(in_features, (num_kv_heads, head_dim), **options)
        self.value = LinearGeneral(in_features, (num_kv_heads, head_dim), **options)
        options |= {} if out_kernel_init is None else {"kernel_init": out_kernel_init}
        self.out = LinearGeneral((num_heads, head_dim), out_features, axis=(-2, -1), **options)
        norm = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query_norm = RMSNorm(head_dim, **norm) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, **norm) if qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if sinks else None
        self.num_kv_heads, self.head_dim, self.causal, self.rotary = num_kv_heads, head_dim, causal, rotary
        self.sliding_window, self.softmax_scale, self.logits_soft_cap = sliding_window, softmax_scale, logits_soft_cap
        self.dtype, self.param_dtype, self.precision, self.dropout_rate = dtype, param_dtype, precision, dropout_rate
        self.deterministic, self.decode = deterministic, decode
        self.dropout = rngs.dropout.fork() if dropout_rate > 0 else None
        self.cached_key, self.cached_value, self.cache_index = (nnx.data(None) for _ in range(3))
        self.pin(config=config, backend=backend, reproducible=reproducible)

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
        decode: bool | None = None,
    ) -> Float[Array, "*batch length out_features"]:
        """From `(..., length, in_features)` to `(..., length, out_features)`.

        Args:
            x: the inputs.
            positions: of the tokens, `(..., length)` integers; default they count up, from what the cache holds.
            mask: bool, broadcastable to `(..., num_heads, length, length)`, true where a token may see another.
            bias: added to the logits, broadcastable in the same way.
            segment_ids: `(..., length)` integers: tokens see those with the same one; negative ones see nothing.
            kv_lengths: `(...)` integers: tokens from there on are seen by none.
            deterministic: whether dropout is off; default what the module says.
            decode: whether these are the next tokens after those in the cache, which they are added to; default what
                the module says. Then masks and biases are for all keys of the cache, `(..., length, max_length)`.

        Returns:
            The outputs.

        Raises:
            ValueError: decoding without a cache, past its end, without causality, or with segment ids or dropout.
        """
        query, key, value = (layer(x) for layer in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        decode = self.decode if decode is None else decode
        dropping = self.dropout is not None and not (self.deterministic if deterministic is None else deterministic)
        variables = self._cache() if decode else ()
        heads, after = attend_heads(
            self, query, key, value, cache=tuple(x[...] for x in variables) if decode else None, positions=positions,
            segment_ids=segment_ids, sinks=None if self.sinks is None else self.sinks[...],
            dropout_rng=self.dropout() if dropping else None, mask=mask, bias=bias, kv_lengths=kv_lengths,  # pyright: ignore[reportOptionalCall]
        )  # fmt: skip
        for variable, x in zip(variables, after or ()):
            variable[...] = x
        return self.out(heads)

    def init_cache(self, batch_size: int | tuple[int, ...], max_length: int, dtype: Any = None) -> None:
        """Makes an empty cache for so many tokens of each example, in the layer's type or a given one.

        Args:
            batch_size: the batch axes of inputs.
            max_length: the most tokens of an example.
            dtype: type of cached keys and values.
        """
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        shape = (*batch, max_length, self.num_kv_heads, self.head_dim)
        dtype = dtype or self.dtype or self.param_dtype
        self.cached_key, self.cached_value = nnx.Cache(jnp.zeros(shape, dtype)), nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` sets; with `decode=True` and sizes it makes the cache, where there is none."""
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        if decode and self.cached_key is None and batch_size is not None and max_length is not None:
            self.init_cache(batch_size, max_length)

    def _cache(self) -> tuple[Any, Any, Any]:
        if self.cache_index is None:
            raise ValueError("decode=True without a cache; call init_cache(batch_size, max_length) first")
        return self.cached_key, self.cached_value, self.cache_index
