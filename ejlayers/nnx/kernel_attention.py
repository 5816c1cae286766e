"""An attention function for Flax NNX's own attention layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float, Shaped

from ejkernel_ops import AttentionConfig
from ejkernel_ops.kernels import ATTENTION

from ..cache import attend_cached_by
from ..fallback import no_attention, run_stock
from ..functional import at_path, attend, zero_where_unseen
from ..pins import check_pins


@dataclasses.dataclass(frozen=True)
class KernelAttention:
    """An `attention_fn` for `nnx.MultiHeadAttention` that honours every argument that Flax passes.

    Some things have no kernel and run as Flax's own attention, with one log line: sown attention weights, dropout that
    is shared over batch and heads (`broadcast_dropout=True`, Flax's default) or of everything, complex numbers.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        path: dotted path of the module, while `explain` asks for it.
        reproducible: whether gradients are the same bits in each run; `False` allows sums in any order. (Flax's
            `deterministic` is about dropout.)

    Example:
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(
        ...     2, 8, decode=False, attention_fn=KernelAttention(), rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((1, 3, 8))).shape
        (1, 3, 8)
    """

    config: AttentionConfig | None = None
    backend: str | None = None
    path: str | None = None
    reproducible: bool = True

    config_type = AttentionConfig

    def __post_init__(self):
        check_pins(self)

    def __call__(
        self,
        query: Float[Array, "*batch q_len num_heads head_dim"],
        key: Float[Array, "*batch kv_len num_kv_heads head_dim"],
        value: Float[Array, "*batch kv_len num_kv_heads v_dim"],
        bias: Float[Array, "..."] | None = None,
        mask: Shaped[Array, "..."] | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Any = dtypes.promote_dtype,
        is_causal: bool = False,
    ) -> Float[Array, "*batch q_len num_heads v_dim"]:
        """Attention as `nnx.dot_product_attention` computes it; rows without a visible key give 0."""
        dropout = {
            "broadcast_dropout": broadcast_dropout, "dropout_rate": dropout_rate, "deterministic": deterministic,
        }  # fmt: skip
        if reason := self.why_not(query, key, value, dtype=dtype, module=module, **dropout):
            if is_causal and mask is not None:  # Flax cannot join them where the mask broadcasts
                mask, is_causal = jnp.asarray(mask, bool) & _lower_triangle(query, key), False
            out = run_stock(
                ATTENTION, self.path, reason, nnx.dot_product_attention, query, key, value, bias=bias, mask=mask,
                dropout_rng=dropout_rng, dtype=dtype, precision=precision, module=module, promote_dtype=promote_dtype,
                is_causal=is_causal, **dropout,
            )  # fmt: skip
            return zero_where_unseen(out, mask)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        with at_path(self.path):
            return attend(
                query, key, value, bias=bias, mask=mask, causal=is_causal, precision=precision, config=self.config,
                backend=self.backend, dropout_rate=0.0 if deterministic else dropout_rate, dropout_rng=dropout_rng,
                deterministic=self.reproducible,
            )  # fmt: skip

    @staticmethod
    def why_not(query: Any, key: Any, value: Any, **options: Any) -> str | None:
        """Why no kernel takes a call; `None` where one does."""
        taken = ("module", "dropout_rate", "deterministic", "broadcast_dropout", "dtype")
        return no_attention(query, key, value, **{name: options[name] for name in taken if name in options})


def _lower_triangle(query: Any, key: Any) -> Any:
    """Which keys are no later than a query, `(q_len, kv_len)`."""
    return jnp.tri(query.shape[-3], key.shape[-3], dtype=bool)


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """An attention function that keeps keys and values in the cache of an NNX layer, and attends to all of it."""

    module: Any
    plain: KernelAttention

    def __call__(self, query: Any, key: Any, value: Any, is_causal: bool = False, **options: Any) -> Any:
        """Attention of the next tokens, which are kept; it is causal, whatever `is_causal` says."""
        cache = (self.module.cached_key, self.module.cached_value, self.module.cache_index)
        heads, *after = attend_cached_by(self.plain, tuple(x[...] for x in cache), query, key, value, **options)
        for variable, x in zip(cache, after):
            variable[...] = x
        return heads
