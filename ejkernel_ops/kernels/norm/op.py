"""`rms_norm` and `layer_norm`: check their arguments, put them in canonical form, call the kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core.kernel import Kernel
from ...execution.executor import default_executor
from ..config import as_array, canonical_precision, explicit_config, static_number
from .kernels import LAYER_NORM, RMS_NORM, NormConfig


def rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, "features"] | None = None,  # noqa: F821
    bias: Float[Array, "features"] | None = None,  # noqa: F821
    *,
    epsilon: float = 1e-6,
    residual: Float[Array, "*rows features"] | None = None,
    precision: Any = None,
    config: NormConfig | None = None,
    backend: str | None = None,
    cfg: NormConfig | None = None,
) -> Float[Array, "*rows features"] | tuple[Float[Array, "*rows features"], Float[Array, "*rows features"]]:
    """Divides each row by the root of its mean square: `x / sqrt(mean(x ** 2) + epsilon) * scale + bias`.

    All of it is in float32 (float64 for float64 inputs), scale and bias included. Differentiable in every array.

    Args:
        x: `(..., features)`.
        scale: `(features,)`; default 1. Models that store it around 0 pass `1 + scale`.
        bias: `(features,)`; default 0.
        epsilon: added to the mean square, in its unit; with 0 a row of zeros gives NaN.
        residual: of the shape of `x`, added to it before; the norm is that of the sum as it is returned, rounded.
        precision: checked as in `jax.lax.Precision`, and without effect: a norm has no products of matrices.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"triton"`, `"xla"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        `(..., features)` in the type of `x`. With `residual` a pair, norm and sum, both in the common type of the two.

    Raises:
        ValueError: shapes that do not fit, no features, an epsilon that is negative or infinite, an unknown precision.
        TypeError: arrays that are no floats, an epsilon that is no number or traced.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([[3.0, -3.0]]), jnp.ones(2))[0, 1].item()
        -1.0

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return _norm(
        RMS_NORM, x, scale, bias, epsilon, residual, precision, explicit_config(NormConfig, config, cfg, backend)
    )


def layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, "features"] | None = None,  # noqa: F821
    bias: Float[Array, "features"] | None = None,  # noqa: F821
    *,
    epsilon: float = 1e-6,
    residual: Float[Array, "*rows features"] | None = None,
    precision: Any = None,
    config: NormConfig | None = None,
    backend: str | None = None,
    cfg: NormConfig | None = None,
) -> Float[Array, "*rows features"] | tuple[Float[Array, "*rows features"], Float[Array, "*rows features"]]:
    """Gives each row mean 0 and variance 1: `(x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias`.

    All of it is in float32 (float64 for float64 inputs), scale and bias included; the variance is the mean of the
    squared differences from the mean. Differentiable in every array.

    Args:
        x: `(..., features)`.
        scale: `(features,)`; default 1.
        bias: `(features,)`; default 0.
        epsilon: added to the variance, in its unit; with 0 a row of equal numbers gives NaN.
        residual: of the shape of `x`, added to it before; the norm is that of the sum as it is returned, rounded.
        precision: checked as in `jax.lax.Precision`, and without effect: a norm has no products of matrices.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"triton"`, `"xla"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        `(..., features)` in the type of `x`. With `residual` a pair, norm and sum, both in the common type of the two.

    Raises:
        ValueError: shapes that do not fit, no features, an epsilon that is negative or infinite, an unknown precision.
        TypeError: arrays that are no floats, an epsilon that is no number or traced.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([[1.0, 3.0]]), epsilon=0.0)[0].tolist()
        [-1.0, 1.0]

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    return _norm(
        LAYER_NORM, x, scale, bias, epsilon, residual, precision, explicit_config(NormConfig, config, cfg, backend)
    )


def _norm(
    kernel: Kernel,
    x: Any,
    scale: Any,
    bias: Any,
    epsilon: float,
    residual: Any,
    precision: Any,
    config: NormConfig | None,
) -> Any:
    x = as_array("x", x)
    scale, bias, residual = (
        None if a is None else as_array(name, a)
        for name, a in (("scale", scale), ("bias", bias), ("residual", residual))
    )
    _check_arrays(x, scale, bias, residual)
    epsilon = static_number("epsilon", epsilon)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}; expected a finite number that is not negative, such as 1e-6")
    canonical_precision(precision)
    one_row = x.ndim == 1
    if one_row:
        x, residual = x[None], None if residual is None else residual[None]
    normed, summed, *_ = default_executor()(kernel, x, scale, bias, residual, cfg=config, epsilon=epsilon)
    outs = tuple(out[0] if one_row else out for out in (normed, summed) if out is not None)
    return outs[0] if residual is None else outs


def _check_arrays(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, residual: jax.Array | None) -> None:
    """Refuses types and shapes that do not fit."""
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {x.shape}; expected (..., features) with at least one feature")
    each = f"one for each of the {x.shape[-1]} features of x, whose shape is {x.shape}; reshape it, or x has others"
    for name, a, shape, what in (
        ("x", x, x.shape, "itself"),
        ("scale", scale, x.shape[-1:], each),
        ("bias", bias, x.shape[-1:], each),
        ("residual", residual, x.shape, "the shape of x; broadcast it"),
    ):
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{name} is {a.dtype}; expected a float type")
        if a is not None and a.shape != shape:
            raise ValueError(f"{name} has shape {a.shape}; expected {shape}, {what}")
