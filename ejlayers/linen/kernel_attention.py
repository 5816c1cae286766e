"""Attention functions for Flax Linen's own attention layers: with kernels, and with a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jaxtyping import Array, Float, Shaped

from ejkernel_ops import AttentionConfig
from ejkernel_ops.kernels import ATTENTION

from ..cache import attend_cached_by
from ..fallback import no_attention, run_stock
from ..functional import at_path, attend, zero_where_unseen
from ..pins import check_pins


@dataclasses.dataclass(frozen=True)
class KernelAttention:
    """An `attention_fn` for `nn.MultiHeadDotProductAttention` that honours every argument that Flax passes.

    The softmax is in float32, whatever `force_fp32_for_softmax` says. Some things have no kernel and run as Flax's own
    attention, with one log line: sown attention weights, products of one's own, dropout that is shared over batch and
    heads (`broadcast_dropout=True`, Flax's default) or of everything, complex numbers.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        path: dotted path of the module, while `explain` asks for it.
        reproducible: whether gradients are the same bits in each run; `False` allows sums in any order. (Flax's
            `deterministic` is about dropout.)

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
    reproducible: bool = True

    config_type = AttentionConfig

    def __post_init__(self):
        check_pins(self)

    def __call__(  # Flax passes those arguments that it finds in the signature: each has to be named
        self,
        query: Float[Array, "*batch q_len num_heads head_dim"],
        key: Float[Array, "*batch kv_len num_heads head_dim"],
        value: Float[Array, "*batch kv_len num_heads v_dim"],
        bias: Float[Array, "..."] | None = None,
        mask: Shaped[Array, "..."] | None = None,
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
    ) -> Float[Array, "*batch q_len num_heads v_dim"]:
        """Attention as `nn.dot_product_attention` computes it; rows without a visible key give 0."""
        options = {
            "broadcast_dropout": broadcast_dropout, "dropout_rate": dropout_rate, "deterministic": deterministic,
            "dtype": dtype, "module": module, "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum, "attn_weights_value_einsum": attn_weights_value_einsum,
        }  # fmt: skip
        if reason := self.why_not(query, key, value, **options):
            out = run_stock(
                ATTENTION, self.path, reason, nn.dot_product_attention, query, key, value, bias, mask,
                precision=precision, dropout_rng=dropout_rng, force_fp32_for_softmax=force_fp32_for_softmax, **options,
            )  # fmt: skip
            return zero_where_unseen(out, mask)
        query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
        with at_path(self.path):
            return attend(
                query, key, value, bias=bias, mask=mask, precision=precision, config=self.config, backend=self.backend,
                dropout_rate=0.0 if deterministic else dropout_rate, dropout_rng=dropout_rng,
                deterministic=self.reproducible,
            )  # fmt: skip

    @staticmethod
    def why_not(query: Any, key: Any, value: Any, **options: Any) -> str | None:
        """Why no kernel takes a call; `None` where one does."""
        ignored = ("mask", "precision", "dropout_rng", "force_fp32_for_softmax")
        return no_attention(query, key, value, **{n: x for n, x in options.items() if n not in ignored})


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """An attention function that keeps keys and values in the stock layer's cache, and attends to all of it."""

    module: Any
    plain: KernelAttention

    def __call__(  # each argument has to be named here too
        self,
        query: Any,
        key: Any,
        value: Any,
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
        """Attention of the next tokens, which are kept; in the call that makes the cache, plain attention."""
        options = {
            "mask": mask, "broadcast_dropout": broadcast_dropout, "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate, "deterministic": deterministic, "dtype": dtype, "precision": precision,
            "module": module, "force_fp32_for_softmax": force_fp32_for_softmax,
            "einsum_dot_general": einsum_dot_general, "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }  # fmt: skip
        is_there = self.module.has_variable("cache", "cached_key")
        cache = (
            self.module.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
            self.module.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
            self.module.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32)),
        )
        if not is_there:
            return self.plain(query, key, value, **options)
        heads, *after = attend_cached_by(self.plain, tuple(x.value for x in cache), query, key, value, **options)
        for variable, x in zip(cache, after):
            variable.value = x
        return heads
