"""Linear layers for Flax NNX."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ejkernel_ops import LinearConfig, linear
from ejkernel_ops.kernels import LINEAR

from ..batch_axes import resharded
from ..fallback import no_dense
from ..functional import at_path, einsum_as_linear, linear_over_axes, with_bias
from .pinned import Pinned, custom_types, no_type_of_call


class _LinearMap(Pinned):
    """A layer whose product is a kernel: its operands in the types that Flax computes in."""

    __slots__ = ()
    config_type, kernel_of_layer = LinearConfig, LINEAR

    def _operands(self: Any, inputs: Any) -> tuple[Any, Any, Any]:
        return inputs, self.kernel[...], self.bias[...] if self.bias is not None else None

    def _linear(self: Any, run: Any, inputs: Any) -> Any:
        inputs, kernel, bias = self.promote_dtype(self._operands(inputs), dtype=self.dtype)
        with at_path(self.kernel_path):
            return run(
                inputs, kernel, bias, preferred_element_type=with_bias(self.preferred_element_type, bias),
                precision=self.precision, config=self.config, backend=self.backend,
            )  # fmt: skip

    def _why_stock(self: Any, inputs: Any) -> str | None:
        """Why a call computes as the stock layer does; `None` where it is a kernel's."""
        return self.why_not(self) or no_type_of_call(self, *self._operands(inputs))


class Linear(nnx.Linear, _LinearMap):
    """`nnx.Linear` as a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. With a `dot_general` of one's own it computes as the stock layer
    does.

    Args:
        *args: as `nnx.Linear`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.Linear`.

    Example:
        >>> layer = Linear(3, 4, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((2, 3))).shape
        (2, 4)
    """

    def __init__(self, *args: Any, config: LinearConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def __call__(
        self, inputs: Float[Array, "*batch in_features"], out_sharding: Any = None
    ) -> Float[Array, "*batch out_features"]:
        """The linear map over the last axis of `(..., in_features)`; returns `(..., out_features)`."""
        if reason := self._why_stock(inputs):
            return self._stock(reason, super().__call__, inputs, out_sharding=out_sharding)
        return resharded(self._linear(linear, inputs), out_sharding)

    @classmethod
    def why_not(cls, module: nnx.Linear) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_dense(module) or custom_types(module, kernel=module.kernel, bias=module.bias)


class LinearGeneral(nnx.LinearGeneral, _LinearMap):
    """`nnx.LinearGeneral` as a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. With a `dot_general` of one's own, or batch axes, it computes as
    the stock layer does.

    Args:
        *args: as `nnx.LinearGeneral`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.LinearGeneral`.

    Example:
        >>> layer = LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((7, 2, 3))).shape
        (7, 4, 5)
    """

    def __init__(self, *args: Any, config: LinearConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def __call__(self, inputs: Float[Array, "..."], out_sharding: Any = None) -> Float[Array, "..."]:
        """The linear map over the layer's axes of an array; the new axes come last."""
        if reason := self._why_stock(inputs):
            return self._stock(reason, super().__call__, inputs, out_sharding=out_sharding)
        axes = sorted(axis % inputs.ndim for axis in self.axis)  # the order of the kernel's, as in the stock layer
        run = functools.partial(linear_over_axes, axes=axes, out_sharding=out_sharding)
        return self._linear(run, inputs)

    @classmethod
    def why_not(cls, module: nnx.LinearGeneral) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_dense(module) or custom_types(module, kernel=module.kernel, bias=module.bias)


class Einsum(nnx.Einsum, _LinearMap):
    """`nnx.Einsum` as a tunable kernel, where its equation is a linear map; same parameters, state and results.

    It is one where the letters of the inputs that stay come first in the result, in order, and those of the kernel
    that are new come after them. Other equations, and an `einsum_op` of one's own, compute as in the stock
    layer.

    Args:
        *args: as `nnx.Einsum`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.Einsum`.

    Example:
        >>> layer = Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((3, 11, 2))).shape
        (3, 11, 8, 4)
    """

    def __init__(self, *args: Any, config: LinearConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def __call__(
        self, inputs: Float[Array, "..."], einsum_str: str | None = None, out_sharding: Any = None
    ) -> Float[Array, "..."]:
        """The product of inputs and kernel by the equation of the layer, or of the call."""
        equation = self.einsum_str if einsum_str is None else einsum_str
        product, reason = einsum_as_linear(equation, jnp.ndim(inputs)), self._why_stock(inputs)
        if product is None or reason:
            reason = reason or f"{equation} is no linear map"
            return self._stock(reason, super().__call__, inputs, einsum_str, out_sharding=out_sharding)
        return self._linear(functools.partial(product, out_sharding=out_sharding), inputs)

    @classmethod
    def why_not(cls, module: nnx.Einsum) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        if module.einsum_op is not jnp.einsum:
            return "custom einsum_op"
        if module.einsum_str is not None and einsum_as_linear(module.einsum_str) is None:
            return f"{module.einsum_str} is no linear map"
        return custom_types(module, kernel=module.kernel, bias=module.bias)
