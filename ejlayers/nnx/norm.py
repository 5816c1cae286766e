"""Norms for Flax NNX."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ejkernel_ops import NormConfig, layer_norm, rms_norm
from ejkernel_ops.kernels import LAYER_NORM, RMS_NORM

from ..fallback import no_norm
from ..functional import at_path
from .pinned import Pinned, custom_types, no_type_of_call


class _Norm(Pinned):
    """A layer whose norm is a kernel over the last axis."""

    __slots__ = ()
    config_type = NormConfig

    def _norm(self: Any, kernel: Any, stock: Any, x: Any, mask: Any, *parameters: Any) -> Any:
        reason = "mask" if mask is not None else self.why_not(self)
        if reason := reason or no_type_of_call(self, x, *parameters):
            return self._stock(reason, stock, x, mask=mask)
        operands = self.promote_dtype((x, *parameters), dtype=self.dtype)
        with at_path(self.kernel_path):
            return kernel(*operands, epsilon=self.epsilon, config=self.config, backend=self.backend)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_norm(module) or custom_types(module, scale=module.scale, bias=getattr(module, "bias", None))


class RMSNorm(nnx.RMSNorm, _Norm):
    """`nnx.RMSNorm` as a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. With a mask, axes other than the last one, or statistics over
    several devices it computes as the stock layer does.

    Args:
        *args: as `nnx.RMSNorm`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.RMSNorm`.

    Example:
        >>> layer = RMSNorm(3, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((2, 3))).shape
        (2, 3)
    """

    kernel_of_layer = RMS_NORM

    def __init__(self, *args: Any, config: NormConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def __call__(self, x: Float[Array, "*batch num_features"], mask: Any = None) -> Float[Array, "*batch num_features"]:
        """The norm of `(..., num_features)`."""
        return self._norm(rms_norm, super().__call__, x, mask, self.scale[...] if self.scale is not None else None)


class LayerNorm(nnx.LayerNorm, _Norm):
    """`nnx.LayerNorm` as a tunable kernel; same parameters, same state, and results that are as good or better.

    The variance is the mean of squared differences from the mean, whatever `use_fast_variance` says: it is right where
    the mean is great, and takes no more time. With a mask, axes other than the last one, or statistics over several
    devices it computes as the stock layer does.

    Args:
        *args: as `nnx.LayerNorm`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.LayerNorm`.

    Example:
        >>> layer = LayerNorm(3, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((2, 3))).shape
        (2, 3)
    """

    kernel_of_layer = LAYER_NORM

    def __init__(self, *args: Any, config: NormConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def __call__(
        self, x: Float[Array, "*batch num_features"], *, mask: Any = None
    ) -> Float[Array, "*batch num_features"]:
        """The norm of `(..., num_features)`."""
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return self._norm(layer_norm, super().__call__, x, mask, scale, bias)
