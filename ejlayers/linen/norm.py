"""Norms for Flax Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jaxtyping import Array, Float

from ejkernel_ops import NormConfig, layer_norm, rms_norm
from ejkernel_ops.kernels import LAYER_NORM, RMS_NORM

from ..fallback import no_norm
from ..functional import at_path
from .pinned import Pinned, custom_types, no_type_of_call


class _Norm(Pinned):
    """A layer whose norm is a kernel over the last axis."""

    config_type = NormConfig

    def _norm(self: Any, kernel: Any, x: Any, **parameters: Any) -> Any:
        dtype = dtypes.canonicalize_dtype(x, *parameters.values(), dtype=self.dtype)
        x = jnp.asarray(x, jnp.promote_types(jnp.result_type(x), dtype))  # as the stock layer: rounded at the end alone
        with at_path(self.kernel_path):
            out = kernel(x, **parameters, epsilon=self.epsilon, config=self.config, backend=self.backend)
        return out.astype(dtype)

    def _parameter(self: Any, name: str, is_used: bool, init: Any, x: Any) -> Any:
        return self.param(name, init, (jnp.shape(x)[-1],), self.param_dtype) if is_used else None

    def _why_stock(self: Any, x: Any, mask: Any) -> str | None:
        """Why a call computes as the stock layer does; `None` where it is a kernel's."""
        used = {"scale": self.use_scale, "bias": getattr(self, "use_bias", False)}
        reason = "mask" if mask is not None else self.why_not(self)
        return reason or no_type_of_call(self, x, *(name for name, is_used in used.items() if is_used))

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_norm(module) or custom_types(module)


class RMSNorm(_Norm, nn.RMSNorm):
    """`nn.RMSNorm` as a tunable kernel; same parameters, same results.

    Takes all of the stock layer's fields. Statistics are in float32, whatever `force_float32_reductions` says. With a
    mask, axes other than the last one, or statistics over several devices it computes as the stock layer does.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = RMSNorm(), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3)
    """

    config: NormConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    kernel_of_layer = RMS_NORM

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"], *, mask: Any = None) -> Float[Array, "*batch features"]:
        """The norm of `(..., features)`."""
        if reason := self._why_stock(x, mask):
            return self._stock(reason, nn.RMSNorm, "__call__", x, mask=mask)
        return self._norm(rms_norm, x, scale=self._parameter("scale", self.use_scale, self.scale_init, x))


class LayerNorm(_Norm, nn.LayerNorm):
    """`nn.LayerNorm` as a tunable kernel; same parameters, and results that are as good or better.

    The variance is the mean of squared differences from the mean, whatever `use_fast_variance` says: it is right where
    the mean is great, and takes no more time. Statistics are in float32, whatever `force_float32_reductions` says. With
    a mask, axes other than the last one, or statistics over several devices it computes as the stock layer does.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = LayerNorm(), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3)
    """

    config: NormConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    kernel_of_layer = LAYER_NORM

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"], *, mask: Any = None) -> Float[Array, "*batch features"]:
        """The norm of `(..., features)`."""
        if reason := self._why_stock(x, mask):
            return self._stock(reason, nn.LayerNorm, "__call__", x, mask=mask)
        scale = self._parameter("scale", self.use_scale, self.scale_init, x)
        bias = self._parameter("bias", self.use_bias, self.bias_init, x)
        return self._norm(layer_norm, x, scale=scale, bias=bias)
