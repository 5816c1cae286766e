"""Norms for Equinox."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel_ops import NormConfig, layer_norm, rms_norm
from ejkernel_ops.kernels import LAYER_NORM, RMS_NORM

from ..fallback import no_kernel
from ..functional import at_path
from .pinned import Pinned

_NO_STATE: Any = object()  # None is a state that may be passed


class _Norm(Pinned):
    """A layer whose norm, over all axes of its shape, is a kernel over one axis of as many numbers."""

    config_type = NormConfig
    kernel: ClassVar[Any]

    def __call__(
        self: Any, x: Float[Array, "*shape"], state: Any = _NO_STATE, *, key: Any = None
    ) -> Float[Array, "*shape"] | tuple[Float[Array, "*shape"], Any]:
        """The norm of an array of the layer's shape, and the state if one is passed; `key` has no effect."""
        given = () if state is _NO_STATE else (state,)
        x = jnp.asarray(x)
        if x.shape != self.shape:
            raise ValueError(f"x has shape {x.shape}; expected {self.shape}: for more than one use jax.vmap(layer)(x)")
        if reason := no_kernel(x=x) or self.why_not(self):
            return self._stock(reason, super().__call__, x, *given, key=key)  # pyright: ignore[reportAttributeAccessIssue]
        parameters = (self.weight if self.use_weight else None, self.bias if self.use_bias else None)
        rows = (None if a is None else a.reshape(x.size) for a in (x, *parameters))
        with at_path(self.kernel_path):
            out = self.kernel(*rows, epsilon=self.eps, config=self.config, backend=self.backend)
        return (out.reshape(x.shape), *given) if given else out.reshape(x.shape)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_kernel(weight=module.weight, bias=module.bias) if math.prod(module.shape) else "no features"


class LayerNorm(_Norm, eqx.nn.LayerNorm):
    """`eqx.nn.LayerNorm` as a tunable kernel; same parameters, same leaves, same results.

    Takes all of the stock constructor's arguments. What is no array of floats computes as the stock layer does.

    Args:
        *args: as `eqx.nn.LayerNorm`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `eqx.nn.LayerNorm`.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> jax.vmap(LayerNorm(3))(jax.random.normal(jax.random.key(0), (2, 3))).shape
        (2, 3)
    """

    kernel, kernel_of_layer = staticmethod(layer_norm), LAYER_NORM

    def __init__(self, *args: Any, config: NormConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, config=config, backend=backend, **kwargs)


class RMSNorm(_Norm, eqx.nn.RMSNorm):
    """`eqx.nn.RMSNorm` as a tunable kernel; same parameters, same leaves, same results.

    Takes all of the stock constructor's arguments. What is no array of floats computes as the stock layer does.

    Args:
        *args: as `eqx.nn.RMSNorm`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `eqx.nn.RMSNorm`.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> jax.vmap(RMSNorm(3))(jax.random.normal(jax.random.key(0), (2, 3))).shape
        (2, 3)
    """

    kernel, kernel_of_layer = staticmethod(rms_norm), RMS_NORM

    def __init__(self, *args: Any, config: NormConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, config=config, backend=backend, **kwargs)
