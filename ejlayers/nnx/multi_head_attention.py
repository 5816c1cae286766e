"""Multi-head attention for Flax NNX."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ejkernel_ops import AttentionConfig, ConfigError

from .kernel_attention import CachedAttention, KernelAttention


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` whose attention is a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. Queries that may see no key give 0, where Flax gives
    the mean of the values. Decoding takes any number of tokens at a time and is causal; the cache has the layer's type,
    and what does not fit into it is an error, or under `jit` NaN.

    Args:
        *args: as `nnx.MultiHeadAttention`.
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.MultiHeadAttention`, `attention_fn` excepted.

    Raises:
        ConfigError: `attention_fn` is given, or a config of another type or for another back end.

    Example:
        >>> layer = MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((1, 3, 8)), is_causal=True).shape
        (1, 3, 8)
    """

    def __init__(self, *args: Any, config: AttentionConfig | None = None, backend: str | None = None, **kwargs: Any):
        if kwargs.pop("attention_fn", nnx.dot_product_attention) is not nnx.dot_product_attention:
            raise ConfigError(
                "attention_fn is given; this layer brings its own: use nnx.MultiHeadAttention for another"
            )
        super().__init__(*args, attention_fn=KernelAttention(config, backend), **kwargs)

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
        plain: Any = self.attention_fn
        is_cached = decoding and isinstance(plain, KernelAttention) and self.cached_key is not None
        if is_cached:  # the stock layer's call, with another attention function for as long as it takes
            object.__setattr__(self, "attention_fn", CachedAttention(self, plain))
            options = {"decode": False}
        try:
            return super().__call__(
                inputs_q, inputs_k, inputs_v, mask=mask, deterministic=deterministic, rngs=rngs,
                sow_weights=sow_weights, out_sharding=out_sharding, qkv_sharding=qkv_sharding, **options,
            )  # fmt: skip
        finally:
            if is_cached:
                object.__setattr__(self, "attention_fn", plain)

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
    def config(self) -> AttentionConfig | None:
        """The config that the module pins."""
        return self.attention_fn.config

    @property
    def backend(self) -> str | None:
        """The back end that the module pins."""
        return self.attention_fn.backend

    @property
    def kernel_path(self) -> str | None:
        """The module's dotted path, while `explain` asks for it."""
        return self.attention_fn.path

    def pin(self, **fields: Any) -> Any:
        """Changes `config`, `backend` or `path` and returns the module; jitted functions retrace once."""
        attention_fn: Any = self.attention_fn
        self.attention_fn = dataclasses.replace(attention_fn, **fields)
        return self

    config_type = AttentionConfig

    @staticmethod
    def why_not(module: nnx.MultiHeadAttention) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None if module.attention_fn is nnx.dot_product_attention else "custom attention_fn"

    @staticmethod
    def adopt(module: nnx.MultiHeadAttention) -> None:
        """What a stock module needs beside the new class."""
        module.attention_fn = KernelAttention()

    def release(self) -> None:
        """Undoes `adopt`."""
        self.attention_fn = nnx.dot_product_attention
