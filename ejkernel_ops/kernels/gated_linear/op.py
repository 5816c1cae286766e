"""`gated_linear`: checks its arguments, puts them in canonical form, calls the kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...execution.executor import default_executor
from ..activations import ACTIVATIONS
from ..config import as_array, canonical_precision, explicit_config
from .kernels import GATED_LINEAR, GatedLinearConfig


def gated_linear(
    x: Float[Array, "*rows in_features"],
    gate_weight: Float[Array, "in_features gate_features"] | Float[Array, "gate_features in_features"],
    up_weight: Float[Array, "in_features out_features"] | Float[Array, "out_features in_features"] | None = None,
    *,
    gate_bias: Float[Array, "out_features"] | None = None,  # noqa: F821
    up_bias: Float[Array, "out_features"] | None = None,  # noqa: F821
    activation: str = "silu",
    weight_layout: str = "io",
    precision: Any = None,
    config: GatedLinearConfig | None = None,
    backend: str | None = None,
    cfg: GatedLinearConfig | None = None,
) -> Float[Array, "*rows out_features"]:
    """A gated linear map over the last axis: `activation(x @ gate_weight + gate_bias) * (x @ up_weight + up_bias)`.

    Sums, biases and activation are in float32 (float64 for float64 inputs). Differentiable in all arrays; for the
    gradient both products are saved, or computed again, as the config says.

    Args:
        x: `(..., in_features)`.
        gate_weight: `(in_features, out_features)`, or `(out_features, in_features)` with `weight_layout="oi"`; without
            `up_weight` both in one, the gate's features first: `(in_features, 2 * out_features)`.
        up_weight: as `gate_weight`.
        gate_bias: `(out_features,)`; without `up_weight` it may be both biases in one, `(2 * out_features,)`.
        up_bias: `(out_features,)`.
        activation: of the gate: `"silu"` (SwiGLU), `"gelu"` (tanh), `"gelu_exact"`, `"relu"`, `"squared_relu"`.
        weight_layout: `"io"` or `"oi"`; neither copies the weights.
        precision: of the products, as in `jax.lax.Precision`; default JAX's.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"triton"` (with two weights), `"xla"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        `(..., out_features)`, in the common type of `x` and the weights.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, layout or precision.
        TypeError: arguments that are no floats.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> gated_linear(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), jnp.ones((3, 4)), activation="relu")[0, 0, 0].item()
        9.0

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    if weight_layout not in ("io", "oi"):
        raise ValueError(f"weight_layout is {weight_layout!r}; expected 'io' (in, out) or 'oi' (out, in)")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    given = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight, "gate_bias": gate_bias, "up_bias": up_bias}
    arrays = {n: None if a is None and n not in ("x", "gate_weight") else as_array(n, a) for n, a in given.items()}
    for name, a in arrays.items():
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{name} is {a.dtype}; expected a float type")
    features = _check_weights(arrays, weight_layout)
    biases = _biases(arrays, features)
    given = [arrays[n] for n in ("x", "gate_weight", "up_weight")]
    dtype = jnp.result_type(*(a.dtype for a in given if a is not None))
    rows: Any
    rows, *weights = (None if a is None else a.astype(dtype) for a in given)
    one_row = rows.ndim == 1
    out, *_ = default_executor()(
        GATED_LINEAR, rows[None] if one_row else rows, *weights, *biases,
        cfg=explicit_config(GatedLinearConfig, config, cfg, backend), activation=activation,
        weight_layout=weight_layout, precision=canonical_precision(precision),
    )  # fmt: skip
    return out[0] if one_row else out


def _check_weights(arrays: dict[str, Any], weight_layout: str) -> int:
    """The number of features of the result."""
    x, gate, up = (arrays[name] for name in ("x", "gate_weight", "up_weight"))
    for name, weight in (("gate_weight", gate), ("up_weight", up)):
        if weight is not None and weight.ndim != 2:
            raise ValueError(f"{name} has shape {weight.shape}; expected two axes")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., in)")
    into, out = gate.shape if weight_layout == "io" else gate.shape[::-1]
    if x.shape[-1] != into:
        other = "oi" if weight_layout == "io" else "io"
        hint = f"; for weights stored the other way pass weight_layout={other!r}" if x.shape[-1] == out else ""
        raise ValueError(f"x has {x.shape[-1]} features and gate_weight takes {into} (layout {weight_layout!r}){hint}")
    if up is None and out % 2:
        raise ValueError(
            f"gate_weight has shape {gate.shape}; without up_weight it holds both, so expected an even number of "
            f"features, not {out}"
        )
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"up_weight has shape {up.shape}; expected that of gate_weight, {gate.shape}")
    return out // 2 if up is None else out


def _biases(arrays: dict[str, Any], features: int) -> tuple[Any, Any]:
    """The two biases, each of its own."""
    gate, up = arrays["gate_bias"], arrays["up_bias"]
    if arrays["up_weight"] is None and up is None and gate is not None and gate.shape == (2 * features,):
        return gate[:features], gate[features:]
    both = f", or without up_bias, for both in one, ({2 * features},)" if arrays["up_weight"] is None else ""
    for name, bias, more in (("gate_bias", gate, both), ("up_bias", up, "")):
        if bias is not None and bias.shape != (features,):
            raise ValueError(f"{name} has shape {bias.shape}; expected ({features},){more}")
    return gate, up
