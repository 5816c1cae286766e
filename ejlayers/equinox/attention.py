"""Attention of today's language models for Equinox: grouped heads, rotary embedding, windows, sinks, a cache."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ejkernel_ops import AttentionConfig

from ..arguments import check_rate, check_rotary
from ..rotary import Rotary
from ..self_attention import attend_heads, head_sizes
from .dropout import dropout_key
from .linear import Linear
from .norm import RMSNorm
from .pinned import Pinned


class Cache(eqx.Module):
    """Keys and values of earlier tokens, which `Attention` takes and gives back with the next ones in it.

    Args:
        key: `(max_length, num_kv_heads, head_dim)`.
        value: the same.
        index: how many tokens it holds.

    Example:
        >>> layer = Attention(16, 4, key=jax.random.key(0))
        >>> out, cache = layer(jnp.ones((3, 16)), cache=layer.init_cache(8))
        >>> int(cache.index)
        3
    """

    key: jax.Array
    value: jax.Array
    index: jax.Array


class Attention(Pinned):
    """Self-attention of a decoder or an encoder, with what current models have; the attention is a tunable kernel.

    It takes one example; under `jax.vmap`, nested or not, a batch is one kernel call, with a cache too. Parameters are
    those of four linear layers: `query_proj`, `key_proj`, `value_proj` and `output_proj`; with `qk_norm` of the norms
    `query_norm` and `key_norm`; with `sinks` `(num_heads,)`.

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
        qk_norm: whether queries and keys of each head go through `RMSNorm`, without biases and with `eps=1e-6`.
        rotary: rotary position embedding of queries and keys, or `None`.
        dropout_p: how many of the probabilities are dropped.
        inference: whether dropout is off; `eqx.nn.inference_mode` changes it.
        use_bias: whether the linear layers have biases.
        dtype: type of the parameters; default that of Equinox.
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.
        key: for the parameters.

    Raises:
        ValueError: heads that do not divide, or a rate of dropout that is none.
        TypeError: a `rotary` that is no `Rotary`, or a `reproducible` that is no bool.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> layer = Attention(16, 4, num_kv_heads=2, rotary=Rotary(), key=jax.random.key(0))
        >>> jax.vmap(layer)(jax.random.normal(jax.random.key(1), (2, 5, 16))).shape
        (2, 5, 16)

    Source: grouped heads: Ainslie et al. 2023, arXiv:2305.13245; rotary: Su et al. 2021, arXiv:2104.09864; sinks: Xiao
    et al. 2023, arXiv:2309.17453.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    sinks: jax.Array | None
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    sliding_window: int | tuple[int, int] | None = eqx.field(static=True)
    softmax_scale: float | None = eqx.field(static=True)
    logits_soft_cap: float | None = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    reproducible: bool = eqx.field(default=True, static=True, kw_only=True)

    config_type = AttentionConfig
    dtype = None  # to compute in: that of inputs and parameters, as in all layers of Equinox
    precision = None  # JAX's default

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
        dropout_p: float = 0.0,
        inference: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        config: AttentionConfig | None = None,
        backend: str | None = None,
        reproducible: bool = True,
        key: Any,
    ):
        self.reproducible = reproducible
        super().__init__(config=config, backend=backend)
        check_rotary(rotary)
        check_rate("dropout_p", dropout_p)
        num_kv_heads, head_dim = head_sizes(in_features, num_heads, num_kv_heads, head_dim)
        out_features = in_features if out_features is None else out_features
        sizes = {
            "query_proj": (in_features, num_heads * head_dim),
            "key_proj": (in_features, num_kv_heads * head_dim),
            "value_proj": (in_features, num_kv_heads * head_dim),
            "output_proj": (num_heads * head_dim, out_features),
        }
        for (name, size), of_layer in zip(sizes.items(), jax.random.split(key, 4)):
            setattr(self, name, Linear(*size, use_bias=use_bias, dtype=dtype, key=of_layer))
        norm = {"eps": 1e-6, "use_bias": False, "dtype": dtype}
        self.query_norm = RMSNorm(head_dim, **norm) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, **norm) if qk_norm else None
        self.sinks = jnp.zeros(num_heads, dtype) if sinks else None
        self.dropout = eqx.nn.Dropout(dropout_p, inference=inference)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.sliding_window, self.rotary = causal, sliding_window, rotary
        self.softmax_scale, self.logits_soft_cap = softmax_scale, logits_soft_cap

    @property
    def dropout_rate(self) -> float:
        """How many of the probabilities are dropped, where dropout is on."""
        return self.dropout.p

    def __call__(
        self,
        x: Float[Array, "length in_features"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "length"] | None = None,  # noqa: F821
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "length"] | None = None,  # noqa: F821
        kv_lengths: int | Int[Array, ""] | None = None,
        key: Any = None,
        inference: bool | None = None,
    ) -> Float[Array, "length out_features"] | tuple[Float[Array, "length out_features"], Cache]:
        """From `(length, in_features)` to `(length, out_features)`.

        Args:
            x: the inputs.
            cache: what earlier tokens left, of which these are the next ones, one or more. Then masks and biases are
                for all keys of the cache, `(length, max_length)`.
            positions: of the tokens, `(length,)` integers; default they count up, from what the cache holds.
            mask: bool, broadcastable to `(num_heads, length, length)`, true where a token may see another.
            bias: added to the logits, broadcastable in the same way.
            segment_ids: `(length,)` integers: tokens see those with the same one; negative ones see nothing.
            kv_lengths: an integer: tokens from there on are seen by none.
            key: for dropout.
            inference: whether dropout is off; default what the module says.

        Returns:
            The outputs; with a cache a pair, the outputs and the cache with these tokens in it.

        Raises:
            ValueError: another shape of `x`, dropout without a key; with a cache: tokens that do not fit, an attention
                that is not causal, segment ids, dropout.
        """
        _check_shapes(self, x, cache, {"mask": mask, "bias": bias}, {
            "positions": positions, "segment_ids": segment_ids, "kv_lengths": kv_lengths,
        })  # fmt: skip
        projections = (self.query_proj, self.key_proj, self.value_proj)
        query, keys, value = (jax.vmap(layer)(x).reshape(len(x), -1, self.head_dim) for layer in projections)
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = (jax.vmap(jax.vmap(norm))(a) for norm, a in ((self.query_norm, query), (self.key_norm, keys)))
        heads, after = attend_heads(
            self, query, keys, value, cache=None if cache is None else (cache.key, cache.value, cache.index),
            positions=positions, segment_ids=segment_ids, sinks=self.sinks,
            dropout_rng=dropout_key(self.dropout, key, inference), mask=mask, bias=bias, kv_lengths=kv_lengths,
        )  # fmt: skip
        out = jax.vmap(self.output_proj)(heads.reshape(len(x), self.num_heads * self.head_dim))
        return out if after is None else (out, Cache(*after))

    def init_cache(self, max_length: int, dtype: Any = None) -> Cache:
        """An empty cache for so many tokens of one example.

        Args:
            max_length: the most tokens.
            dtype: type of cached keys and values; default that of the parameters.

        Returns:
            The cache; of a batch `eqx.filter_vmap(lambda: layer.init_cache(64), axis_size=8)()` makes one.

        Raises:
            ValueError: no room for a token.
        """
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; expected at least 1 token")
        shape = (max_length, self.num_kv_heads, self.head_dim)
        dtype = self.key_proj.weight.dtype if dtype is None else dtype
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


def _check_shapes(layer: Attention, x: Any, cache: Any, by_pair: dict[str, Any], by_token: dict[str, Any]) -> None:
    """Refuses arguments that are not those of one example."""
    features = getattr(layer.query_proj, "in_features", None)
    if jnp.ndim(x) != 2 or features not in (None, x.shape[1]):
        size = "in_features" if features is None else features
        raise ValueError(f"x has shape {jnp.shape(x)}; expected (length, {size}): for a batch use jax.vmap")
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(
            f"cache is a {type(cache).__name__}; expected a Cache, as layer.init_cache(max_length) makes one"
        )
    length = len(x)
    sizes = (layer.num_heads, length, length if cache is None else len(cache.key))
    for name, given in by_pair.items():
        shape = () if given is None else np.shape(given)
        if len(shape) > 3 or any(n not in (1, size) for n, size in zip(shape[::-1], sizes[::-1])):
            raise ValueError(
                f"{name} has shape {shape}; expected what broadcasts to (num_heads, length, keys), {sizes}"
            )
    for name, given in by_token.items():
        expected = () if name == "kv_lengths" else (length,)
        if given is not None and np.shape(given) != expected:
            raise ValueError(f"{name} has shape {np.shape(given)}; expected {expected}: for a batch use jax.vmap")
