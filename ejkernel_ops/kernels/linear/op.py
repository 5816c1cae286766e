"""`linear`: checks its arguments, puts them in canonical form, calls the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...execution.executor import default_executor
from ..activations import check_activation
from ..config import as_array, canonical_precision, explicit_config
from .kernels import LINEAR, LinearConfig


def linear(
    x: Float[Array, "*rows in_features"],
    weight: Float[Array, "in_features out_features"] | Float[Array, "out_features in_features"],
    bias: Float[Array, "out_features"] | None = None,  # noqa: F821
    *,
    activation: str | None = None,
    weight_layout: str = "io",
    preferred_element_type: Any = None,
    precision: Any = None,
    config: LinearConfig | None = None,
    backend: str | None = None,
    cfg: LinearConfig | None = None,
) -> Float[Array, "*rows out_features"]:
    """A linear map over the last axis, with bias and activation.

    Sums, bias and activation are in float32 (float64 for float64 inputs). Products of bfloat16 whose result is bfloat16
    are rounded to it before the bias, as in stock layers: they are written and read in half the bytes. Differentiable
    in `x`, `weight` and `bias`.

    Args:
        x: `(..., in_features)`.
        weight: `(in_features, out_features)`, or `(out_features, in_features)` with `weight_layout="oi"`.
        bias: `(out_features,)`.
        activation: `"gelu"` (tanh), `"gelu_exact"`, `"silu"`, `"relu"`, `"squared_relu"` or `None`.
        weight_layout: `"io"` or `"oi"`; neither copies the weight.
        preferred_element_type: type of the result; default the common type of `x` and `weight`.
        precision: of the product, as in `jax.lax.Precision`; default JAX's.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"xla"`, with an activation also `"triton"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        `(..., out_features)`.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, layout or precision.
        TypeError: arguments that are no floats.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> linear(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), jnp.ones(4), activation="relu")[0, 0, 0].item()
        4.0

    Source: the definition, `activation(x @ weight + bias)`. GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415; SiLU:
    Elfwing, Uchibe and Doya 2017, arXiv:1702.03118.
    """
    if weight_layout not in ("io", "oi"):
        raise ValueError(f"weight_layout is {weight_layout!r}; expected 'io' (in, out) or 'oi' (out, in)")
    x, weight, bias = as_array("x", x), as_array("weight", weight), None if bias is None else as_array("bias", bias)
    for name, a in (("x", x), ("weight", weight), ("bias", bias)):
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{name} is {a.dtype}; expected a float type")
    if x.ndim < 1 or weight.ndim != 2:
        raise ValueError(f"x has shape {x.shape} and weight {weight.shape}; expected (..., in) and two axes")
    features, out_features = weight.shape if weight_layout == "io" else weight.shape[::-1]
    if x.shape[-1] != features:
        other = "oi" if weight_layout == "io" else "io"
        hint = f"; for weights stored the other way pass weight_layout={other!r}" if x.shape[-1] == out_features else ""
        raise ValueError(f"x has {x.shape[-1]} features and weight takes {features} (layout {weight_layout!r}){hint}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias has shape {bias.shape}; expected ({out_features},)")
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    one_row = x.ndim == 1
    out, _ = default_executor()(
        LINEAR, (x[None] if one_row else x).astype(dtype), weight.astype(dtype), bias,
        cfg=explicit_config(LinearConfig, config, cfg, backend), activation=check_activation(activation),
        weight_layout=weight_layout, out_dtype=_result_type(preferred_element_type, dtype),
        precision=canonical_precision(precision),
    )  # fmt: skip
    return out[0] if one_row else out


def _result_type(preferred: Any, default: Any) -> Any:
    try:
        dtype = jax.dtypes.canonicalize_dtype(default if preferred is None else preferred)
    except TypeError:
        raise TypeError(f"preferred_element_type is {preferred!r}; expected a float type, or its name") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"preferred_element_type is {dtype}; expected a float type")
    return dtype
