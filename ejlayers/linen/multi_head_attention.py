"""Multi-head attention for Flax Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float, Shaped

from ejkernel_ops import AttentionConfig, ConfigError

from ..fallback import no_dropout, no_type
from .kernel_attention import CachedAttention, KernelAttention
from .pinned import Pinned
from .twins import twin, undecorated


class _KernelHeads(Pinned):
    """A layer whose attention is a kernel; what is around it is the stock layer's own code."""

    config_type = AttentionConfig

    def __post_init__(self: Any) -> None:
        """Refuses an attention function: the layer brings its own."""
        if self.attention_fn is not nn.dot_product_attention:
            raise ConfigError("attention_fn is given; this layer brings its own: use Flax's own layer for another")
        super().__post_init__()

    def _run(self: Any, stock: type, args: tuple, options: dict) -> Any:
        """The stock layer's call, with the kernel as its attention, and its cache where it decodes."""
        plain = KernelAttention(self.config, self.backend, self.kernel_path, self.reproducible)
        if self.decode:
            seen = twin(self, stock, decode=False, attention_fn=CachedAttention(self, plain))
        else:
            seen = twin(self, stock, attention_fn=plain)
        return undecorated(stock, "__call__")(seen, *args, **options)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        if module.attention_fn is not nn.dot_product_attention:
            return "custom attention_fn"
        if module.qk_attn_weights_einsum_cls or module.attn_weights_value_einsum_cls:
            return "custom products of attention"
        return no_type(module.param_dtype if module.dtype is None else module.dtype)

    @classmethod
    def when_not(cls, module: Any) -> str | None:
        """When a module of ours computes as the stock one, as far as its fields say; `None` if never."""
        return cls.why_not(module) or no_dropout(module.dropout_rate, module.broadcast_dropout)


class MultiHeadDotProductAttention(_KernelHeads, nn.MultiHeadDotProductAttention):
    """`nn.MultiHeadDotProductAttention` whose attention is a tunable kernel; same parameters, same cache, same results.

    Takes all of the stock layer's fields. Queries that may see no key give 0, where Flax gives the mean of the values;
    the softmax is always in float32. Decoding takes any number of tokens at a time and is causal; what does not fit
    into the cache is an error, or under `jit` NaN. Masks of such calls are for all keys of the cache.

    Args:
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.

    Raises:
        ConfigError: `attention_fn` is given, or a config of another type or for another back end.
        TypeError: a `reproducible` that is no bool.

    Example:
        >>> import jax
        >>> layer, x = MultiHeadDotProductAttention(2), jax.numpy.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """

    config: AttentionConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)
    reproducible: bool = dataclasses.field(default=True, kw_only=True)

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*batch q_len in_features"],
        inputs_k: Float[Array, "*batch kv_len in_kv_features"] | None = None,
        inputs_v: Float[Array, "*batch kv_len in_v_features"] | None = None,
        *,
        inputs_kv: Float[Array, "*batch kv_len in_kv_features"] | None = None,
        mask: Shaped[Array, "..."] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch q_len out_features"]:
        """Attention of `(..., length, in_features)`; with `decode`, of the next tokens, one or more, with a cache."""
        options = {
            "inputs_kv": inputs_kv, "mask": mask, "deterministic": deterministic, "dropout_rng": dropout_rng,
            "sow_weights": sow_weights,
        }  # fmt: skip
        return self._run(nn.MultiHeadDotProductAttention, (inputs_q, inputs_k, inputs_v), options)


class MultiHeadAttention(MultiHeadDotProductAttention, nn.MultiHeadAttention):
    """`nn.MultiHeadAttention`: `MultiHeadDotProductAttention` under another name.

    Example:
        >>> import jax
        >>> layer, x = MultiHeadAttention(2), jax.numpy.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """


class SelfAttention(_KernelHeads, nn.SelfAttention):
    """`nn.SelfAttention`, which Flax deprecates, as `MultiHeadDotProductAttention`: its mask comes second.

    Args:
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.

    Raises:
        ConfigError: `attention_fn` is given, or a config of another type or for another back end.
        TypeError: a `reproducible` that is no bool.

    Example:
        >>> import jax, warnings
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> layer, x = SelfAttention(2), jax.numpy.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """

    config: AttentionConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)
    reproducible: bool = dataclasses.field(default=True, kw_only=True)

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*batch length in_features"],
        mask: Shaped[Array, "..."] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch length out_features"]:
        """Self-attention of `(..., length, in_features)`."""
        options = {"deterministic": deterministic, "dropout_rng": dropout_rng, "sow_weights": sow_weights}
        return self._run(nn.SelfAttention, (inputs_q, mask), options)
