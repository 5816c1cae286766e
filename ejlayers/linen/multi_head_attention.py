"""Multi-head attention for Flax Linen."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from ejkernel_ops import AttentionConfig, ConfigError
from ejkernel_ops.kernels.config import explicit_config

from ..cache import attend_cached
from ..functional import at_path, attend
from .pinned import Pinned
from .twins import twin, undecorated

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KernelAttention:
    """An `attention_fn` for `nn.MultiHeadDotProductAttention` that honours every argument that Flax passes.

    The softmax is in float32, whatever `force_fp32_for_softmax` says. Three things have no kernel and run as Flax's own
    attention, with one log line: sown attention weights, products of one's own, and dropout that is shared over batch
    and heads (`broadcast_dropout=True`, Flax's default).

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        path: dotted path of the module, while `explain` asks for it.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = nn.MultiHeadDotProductAttention(2, attention_fn=KernelAttention()), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """

    config: AttentionConfig | None = None
    backend: str | None = None
    path: str | None = None

    def __post_init__(self):
        explicit_config(AttentionConfig, self.config, None, self.backend)  # what is wrong with them is an error now

    def __call__(  # Flax passes those arguments that it finds in the signature: each has to be named
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Any:
        """Attention as `nn.dot_product_attention` computes it; rows without a visible key give 0."""
        dropping = dropout_rate > 0.0 and not deterministic
        products = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
        if reason := _no_kernel(module is not None, dropping and broadcast_dropout, any(products)):
            _report_fallback(reason)
            return nn.dot_product_attention(
                query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
                precision, module, force_fp32_for_softmax, *products,
            )  # fmt: skip
        query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
        with at_path(self.path):
            return attend(
                query, key, value, bias=bias, mask=mask, precision=precision, config=self.config, backend=self.backend,
                dropout_rate=dropout_rate if dropping else 0.0, dropout_rng=dropout_rng,
            )  # fmt: skip


def _no_kernel(sowing: bool, shared_dropout: bool, own_products: bool) -> str | None:
    """What of a call has no kernel."""
    if sowing:
        return "sow_weights=True"
    if shared_dropout:
        return "broadcast_dropout=True"
    return "products of one's own" if own_products else None


_reported: set[str] = set()


def _report_fallback(reason: str) -> None:
    if reason not in _reported:
        _reported.add(reason)
        _log.warning("attention with %s runs as Flax's own, not as a kernel", reason)


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
        plain, caching = KernelAttention(self.config, self.backend, self.kernel_path), self.decode
        if caching and (options["sow_weights"] or self._is_dropping(options) or self.qk_attn_weights_einsum_cls):
            _report_fallback("a cache, and dropout, sown weights or products of one's own,")
            seen = twin(self, stock)
        elif caching:
            seen = twin(self, stock, decode=False, attention_fn=_CachedAttention(self, plain))
        else:
            seen = twin(self, stock, attention_fn=plain)
        return undecorated(stock, "__call__")(seen, *args, **options)

    def _is_dropping(self: Any, options: dict) -> bool:
        if self.dropout_rate == 0.0:
            return False
        return not nn.merge_param("deterministic", self.deterministic, options["deterministic"])

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        if module.attention_fn is not nn.dot_product_attention:
            return "custom attention_fn"
        own_products = module.qk_attn_weights_einsum_cls or module.attn_weights_value_einsum_cls
        return "custom products of attention" if own_products else None


@dataclasses.dataclass(frozen=True)
class _CachedAttention:
    """An attention function that keeps keys and values in the stock layer's cache, and attends to all of it."""

    module: Any
    plain: KernelAttention

    def __call__(self, query: Any, key: Any, value: Any, mask: Any = None, dtype: Any = None, precision: Any = None):
        is_there = self.module.has_variable("cache", "cached_key")  # the call that makes the cache leaves it empty
        cache = (
            self.module.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
            self.module.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
            self.module.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32)),
        )
        if not is_there:
            return self.plain(query, key, value, mask=mask, dtype=dtype, precision=precision)
        with at_path(self.plain.path):
            heads, *after = attend_cached(
                query, key, value, *(x.value for x in cache), dtype=dtype, mask=mask, precision=precision,
                config=self.plain.config, backend=self.plain.backend,
            )  # fmt: skip
        for variable, x in zip(cache, after):
            variable.value = x
        return heads


class MultiHeadDotProductAttention(_KernelHeads, nn.MultiHeadDotProductAttention):
    """`nn.MultiHeadDotProductAttention` whose attention is a tunable kernel; same parameters, same cache, same results.

    Takes all of the stock layer's fields. Queries that may see no key give 0, where Flax gives the mean of the values;
    the softmax is always in float32. Decoding takes any number of tokens at a time and is causal; what does not fit
    into the cache is an error, or under `jit` NaN. Masks of such calls are for all keys of the cache.

    Args:
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: `attention_fn` is given, or a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = MultiHeadDotProductAttention(2), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """

    config: AttentionConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        inputs_kv: Any = None,
        mask: Any = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
    ) -> Any:
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
        >>> layer, x = MultiHeadAttention(2), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """


class SelfAttention(_KernelHeads, nn.SelfAttention):
    """`nn.SelfAttention`, which Flax deprecates, as `MultiHeadDotProductAttention`: its mask comes second.

    Args:
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: `attention_fn` is given, or a config of another type or for another back end.

    Example:
        >>> import jax, warnings
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> layer, x = SelfAttention(2), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """

    config: AttentionConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(
        self,
        inputs_q: Any,
        mask: Any = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
    ) -> Any:
        """Self-attention of `(..., length, in_features)`."""
        options = {"deterministic": deterministic, "dropout_rng": dropout_rng, "sow_weights": sow_weights}
        return self._run(nn.SelfAttention, (inputs_q, mask), options)
