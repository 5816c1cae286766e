"""Multi-head attention for Flax NNX."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ejkernel_ops import AttentionConfig, ConfigError
from ejkernel_ops.kernels import ATTENTION

from ..fallback import no_dropout
from ..functional import explaining
from .kernel_attention import CachedAttention, KernelAttention
from .pinned import Pinned


class MultiHeadAttention(nnx.MultiHeadAttention, Pinned):
    """`nnx.MultiHeadAttention` whose attention is a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. Queries that may see no key give 0, where Flax gives
    the mean of the values. Decoding takes any number of tokens at a time and is causal; the cache has the layer's type,
    and what does not fit into it is an error, or under `jit` NaN.

    Args:
        *args: as `nnx.MultiHeadAttention`.
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.
        **kwargs: as `nnx.MultiHeadAttention`, `attention_fn` excepted.

    Raises:
        ConfigError: `attention_fn` is given, or a config of another type or for another back end.
        TypeError: a `reproducible` that is no bool.

    Example:
        >>> layer = MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((1, 3, 8)), is_causal=True).shape
        (1, 3, 8)
    """

    config_type, kernel_of_layer = AttentionConfig, ATTENTION
    reproducible: bool = True

    def __init__(
        self,
        *args: Any,
        config: AttentionConfig | None = None,
        backend: str | None = None,
        reproducible: bool = True,
        **kwargs: Any,
    ):
        if kwargs.pop("attention_fn", nnx.dot_product_attention) is not nnx.dot_product_attention:
            raise ConfigError(
                "attention_fn is given; this layer brings its own: use nnx.MultiHeadAttention for another"
            )
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend, reproducible=reproducible)

    def __call__(
        self,
        inputs_q: Float[Array, "*batch q_len in_features"],
        inputs_k: Float[Array, "*batch kv_len in_kv_features"] | None = None,
        inputs_v: Float[Array, "*batch kv_len in_kv_features"] | None = None,
        *,
        mask: Any = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> Float[Array, "*batch q_len out_features"]:
        """Attention of `(..., length, in_features)`; with `decode`, of the next tokens, one or more, with a cache."""
        decoding = self.decode if decode is None else decode
        options: dict[str, Any] = {"decode": decode, "is_causal": is_causal}
        plain, kept = self.attention_fn, vars(self)["attention_fn"]
        is_cached = decoding and isinstance(plain, KernelAttention) and self.cached_key is not None
        if is_cached:  # the stock layer's call, with another attention function for as long as it takes
            vars(self)["attention_fn"] = CachedAttention(self, plain)
            options = {"decode": False}
        try:
            return super().__call__(
                inputs_q, inputs_k, inputs_v, mask=mask, deterministic=deterministic, rngs=rngs,
                sow_weights=sow_weights, out_sharding=out_sharding, qkv_sharding=qkv_sharding, **options,
            )  # fmt: skip
        finally:
            if is_cached:
                vars(self)["attention_fn"] = kept

    def init_cache(self, input_shape: Any, dtype: Any = None) -> None:
        """Makes an empty cache for inputs `(..., length, in_features)`, in the layer's type or a given one."""
        super().init_cache(input_shape, dtype or self.dtype or self.param_dtype)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: Any = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` sets; with `decode=True` it makes the cache, where there is none."""
        super().set_view(deterministic, decode, batch_size, max_length)
        if not decode or self.cached_key is not None:
            return
        for name, given in (("batch_size", batch_size), ("max_length", max_length)):
            if given is None:
                raise TypeError(f"{name} is missing: there is no cache yet, and decoding needs one of a size")
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        self.init_cache((*batch, max_length, self.in_features))

    @property
    def attention_fn(self) -> Any:
        """The attention of a call: the kernel, as long as no other function was put in the place of Flax's."""
        fn = vars(self)["attention_fn"]
        if fn is nnx.dot_product_attention:
            return KernelAttention(self.config, self.backend, self.kernel_path, self.reproducible)
        is_other = explaining() and not isinstance(fn, (KernelAttention, CachedAttention))
        return functools.partial(self._stock, "custom attention_fn", fn) if is_other else fn

    @attention_fn.setter
    def attention_fn(self, fn: Any) -> None:
        vars(self)["attention_fn"] = fn

    @classmethod
    def why_not(cls, module: nnx.MultiHeadAttention) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        is_flax = vars(module)["attention_fn"] is nnx.dot_product_attention
        return None if is_flax else "custom attention_fn"

    @classmethod
    def when_not(cls, module: nnx.MultiHeadAttention) -> str | None:
        """When a module of ours computes as the stock one, as far as its attributes say; `None` if never."""
        return cls.why_not(module) or no_dropout(module.dropout_rate, module.broadcast_dropout)
