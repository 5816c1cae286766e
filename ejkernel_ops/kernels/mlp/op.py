"""`mlp`: checks its arguments, puts them in canonical form, calls the kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...execution.executor import default_executor
from ..activations import ACTIVATIONS
from ..config import as_array, canonical_precision, explicit_config
from .kernels import MLP, MlpConfig


def mlp(
    x: Float[Array, "*rows in_features"],
    up_weight: Float[Array, "in_features hidden_features"] | Float[Array, "hidden_features in_features"],
    down_weight: Float[Array, "hidden_features out_features"] | Float[Array, "out_features hidden_features"],
    gate_weight: Float[Array, "in_features hidden_features"]
    | Float[Array, "hidden_features in_features"]
    | None = None,
    *,
    up_bias: Float[Array, "hidden_features"] | None = None,  # noqa: F821
    down_bias: Float[Array, "out_features"] | None = None,  # noqa: F821
    gate_bias: Float[Array, "hidden_features"] | None = None,  # noqa: F821
    activation: str = "gelu",
    weight_layout: str = "io",
    precision: Any = None,
    config: MlpConfig | None = None,
    backend: str | None = None,
    cfg: MlpConfig | None = None,
) -> Float[Array, "*rows out_features"]:
    """A whole MLP over the last axis: `activation(x @ up_weight + up_bias) @ down_weight + down_bias`.

    With a gate `activation(x @ gate_weight + gate_bias) * (x @ up_weight + up_bias)` takes the place of the activation.
    For the gradient the products are kept; what the activation makes of them is made again, so that an MLP of two maps
    keeps half of what it would as two layers, and a gated one two thirds. Sums, biases and activation are in float32
    (float64 for float64 inputs); products are rounded to the type of `x` before their biases, as in stock layers.
    Differentiable in all arrays.

    Args:
        x: `(..., in_features)`.
        up_weight: `(in_features, hidden_features)`, or `(hidden_features, in_features)` with `weight_layout="oi"`.
        down_weight: `(hidden_features, out_features)`, or `(out_features, hidden_features)`.
        gate_weight: as `up_weight`; without one the MLP is not gated.
        up_bias: `(hidden_features,)`.
        down_bias: `(out_features,)`.
        gate_bias: `(hidden_features,)`.
        activation: `"gelu"` (tanh), `"gelu_exact"`, `"silu"` (SwiGLU with a gate), `"relu"`, `"squared_relu"`.
        weight_layout: `"io"` or `"oi"`, of all weights; neither copies them.
        precision: of the products, as in `jax.lax.Precision`; default JAX's.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"triton"`, `"xla"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        `(..., out_features)`, in the common type of `x` and the weights.

    Raises:
        ValueError: shapes that do not fit, a bias of a gate that there is not, an unknown activation, layout or
            precision.
        TypeError: arguments that are no floats.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> mlp(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), jnp.ones((4, 3)), activation="relu")[0, 0].tolist()
        [12.0, 12.0, 12.0]

    Source: Vaswani et al. 2017, arXiv:1706.03762, §3.3; with a gate Shazeer 2020, arXiv:2002.05202.
    """
    if weight_layout not in ("io", "oi"):
        raise ValueError(f"weight_layout is {weight_layout!r}; expected 'io' (in, out) or 'oi' (out, in)")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    needed = {"x": x, "up_weight": up_weight, "down_weight": down_weight}
    optional = {"gate_weight": gate_weight, "up_bias": up_bias, "gate_bias": gate_bias, "down_bias": down_bias}
    arrays = needed | {name: a for name, a in optional.items() if a is not None}
    arrays = {name: as_array(name, a) for name, a in arrays.items()}
    for name, a in arrays.items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{name} is {a.dtype}; expected a float type")
    _check_shapes(arrays, weight_layout)
    dtype = jnp.result_type(*(a.dtype for name, a in arrays.items() if not name.endswith("bias")))
    rows, up, gate, down = (
        arrays[n].astype(dtype) if n in arrays else None for n in ("x", "up_weight", "gate_weight", "down_weight")
    )
    one_row = rows.ndim == 1  # type: ignore[union-attr]
    out, *_ = default_executor()(
        MLP, rows[None] if one_row else rows, up, arrays.get("up_bias"), gate, arrays.get("gate_bias"),  # type: ignore[index]
        down, arrays.get("down_bias"),
        cfg=explicit_config(MlpConfig, config, cfg, backend), activation=activation, weight_layout=weight_layout,
        precision=canonical_precision(precision),
    )  # fmt: skip
    return out[0] if one_row else out


def _check_shapes(arrays: dict[str, Any], weight_layout: str) -> None:
    """Refuses arrays that do not fit each other."""
    if arrays["x"].ndim < 1:
        raise ValueError(f"x has shape {arrays['x'].shape}; expected (..., in)")
    sizes = {}
    for name in ("up_weight", "gate_weight", "down_weight"):
        if name in arrays:
            if arrays[name].ndim != 2:
                raise ValueError(f"{name} has shape {arrays[name].shape}; expected two axes")
            sizes[name] = arrays[name].shape if weight_layout == "io" else arrays[name].shape[::-1]
    features, (into, hidden) = arrays["x"].shape[-1], sizes["up_weight"]
    if features != into:
        other = "oi" if weight_layout == "io" else "io"
        hint = f"; for weights stored the other way pass weight_layout={other!r}" if features == hidden else ""
        raise ValueError(f"x has {features} features and up_weight takes {into} (layout {weight_layout!r}){hint}")
    if sizes.get("gate_weight", sizes["up_weight"]) != sizes["up_weight"]:
        given, up = arrays["gate_weight"].shape, arrays["up_weight"].shape
        raise ValueError(f"gate_weight has shape {given}; expected that of up_weight, {up}")
    if sizes["down_weight"][0] != hidden:
        raise ValueError(
            f"down_weight takes {sizes['down_weight'][0]} features and up_weight makes {hidden} (layout "
            f"{weight_layout!r}); expected the same number"
        )
    if "gate_bias" in arrays and "gate_weight" not in arrays:
        raise ValueError("gate_bias is given without gate_weight; pass both or neither")
    for name, size in (("up_bias", hidden), ("gate_bias", hidden), ("down_bias", sizes["down_weight"][1])):
        if name in arrays and arrays[name].shape != (size,):
            raise ValueError(f"{name} has shape {arrays[name].shape}; expected ({size},)")
