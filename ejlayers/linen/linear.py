"""Linear layers for Flax Linen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from ejkernel_ops import LinearConfig, linear
from ejkernel_ops.kernels import LINEAR

from ..fallback import no_dense
from ..functional import at_path, einsum_as_linear, linear_over_axes, with_bias
from .pinned import Pinned, custom_types, no_type_of_call


class _LinearMap(Pinned):
    """A layer whose product is a kernel: its operands in the types that Flax computes in."""

    config_type, kernel_of_layer = LinearConfig, LINEAR

    def _linear(self: Any, run: Any, inputs: Any, kernel: Any, bias: Any, **options: Any) -> Any:
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        options |= {"precision": self.precision, "config": self.config, "backend": self.backend}
        with at_path(self.kernel_path):
            return run(inputs, kernel, bias, **options)

    def _why_stock(self: Any, inputs: Any) -> str | None:
        """Why a call computes as the stock layer does; `None` where it is a kernel's."""
        return self.why_not(self) or no_type_of_call(self, inputs, "kernel", *["bias"] * self.use_bias)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_dense(module) or custom_types(module)


def dense_params(module: Any, in_features: int) -> tuple[Any, Any]:
    """Kernel and bias of a `Dense` layer, made as the stock layer makes them."""
    kernel = module.param("kernel", module.kernel_init, (in_features, module.features), module.param_dtype)
    bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype) if module.use_bias else None
    return kernel, bias


class Dense(_LinearMap, nn.Dense):
    """`nn.Dense` as a tunable kernel; same parameters, same results.

    Takes all of the stock layer's fields. With a `dot_general` or `promote_dtype` of one's own it computes as the
    stock layer does.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = Dense(4), jax.numpy.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 4)
    """

    config: LinearConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch in_features"]) -> Float[Array, "*batch features"]:
        """The linear map over the last axis of `(..., in_features)`; returns `(..., features)`."""
        if reason := self._why_stock(inputs):
            return self._stock(reason, nn.Dense, "__call__", inputs)
        return self._linear(linear, inputs, *dense_params(self, jnp.shape(inputs)[-1]))


class DenseGeneral(_LinearMap, nn.DenseGeneral):
    """`nn.DenseGeneral` as a tunable kernel; same parameters, same results.

    Takes all of the stock layer's fields. With batch axes, or a `dot_general` or `promote_dtype` of one's own, it
    computes as the stock layer does.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = DenseGeneral((4, 5), axis=(-2, -1)), jax.numpy.ones((7, 2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (7, 4, 5)
    """

    config: LinearConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(self, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
        """The linear map over the layer's axes of an array; the new axes come last."""
        if reason := self._why_stock(inputs):
            return self._stock(reason, nn.DenseGeneral, "__call__", inputs)
        axes = sorted(axis % inputs.ndim for axis in _several(self.axis))  # the kernel's order, as in the stock layer
        ins, outs = tuple(inputs.shape[axis] for axis in axes), _several(self.features)
        kernel_init, bias_init = _flat(self.kernel_init, math.prod(ins)), _flat(self.bias_init)
        kernel = self.param("kernel", kernel_init, ins + outs, self.param_dtype)
        bias = self.param("bias", bias_init, outs, self.param_dtype) if self.use_bias else None
        return self._linear(functools.partial(linear_over_axes, axes=axes), inputs, kernel, bias)


class Einsum(_LinearMap, nn.Einsum):
    """`nn.Einsum` as a tunable kernel, where its equation is a linear map; same parameters, same results.

    It is one where the letters of the inputs that stay come first in the result, in order, and those of the kernel
    that are new come after them. Takes all of the stock layer's fields. Other equations, and a `promote_dtype` of one's
    own, compute as in the stock layer.

    Args:
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = Einsum((8, 2, 4), "nta,hab->nthb"), jax.numpy.ones((3, 11, 2))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (3, 11, 8, 4)
    """

    config: LinearConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(self, inputs: Float[Array, "..."], einsum_str: str | None = None) -> Float[Array, "..."]:
        """The product of inputs and kernel by the equation of the layer, or of the call."""
        equation, is_one = self.einsum_str or einsum_str, None in (self.einsum_str, einsum_str)
        product, reason = einsum_as_linear(equation, jnp.ndim(inputs)) if is_one else None, self._why_stock(inputs)
        if product is None or reason:
            reason = reason or f"{equation} is no linear map"
            return self._stock(reason, nn.Einsum, "__call__", inputs, einsum_str)
        outs = tuple(self.shape[axis] for axis in product.kernel_axes[len(product.axes) :])
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, outs, self.param_dtype) if self.use_bias else None
        return self._linear(
            product, inputs, kernel, bias, preferred_element_type=with_bias(self.preferred_element_type, bias)
        )

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        if module.einsum_str is not None and einsum_as_linear(module.einsum_str) is None:
            return f"{module.einsum_str} is no linear map"
        return custom_types(module)


def _several(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)


def _flat(initializer: Any, rows: int | None = None) -> Any:
    """An initializer that is asked for a matrix of so many rows, or for a vector, and gives the shape of the layer."""

    def init(rng, shape, dtype):
        count = math.prod(shape)
        made = initializer(rng, (count,) if rows is None else (rows, count // rows), dtype)
        return jax.tree.map(lambda x: x.reshape(shape), made)  # a box of metadata is a pytree, and stays as it is

    return init
