"""What our gated MLPs compute before their last linear map, in all frameworks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops import gated_linear
from ejkernel_ops.kernels import GATED_LINEAR

from .fallback import no_type, run_stock
from .functional import activated, at_path


def gated_product(
    layer: Any, x: Any, gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None, weight_layout: str = "io"
) -> jax.Array:
    """`activation(x @ gate + gate_bias) * (x @ up + up_bias)`, as one kernel where there is one for the types.

    Args:
        layer: with `kernel_path, activation, precision, config, backend`.
        x: `(..., in_features)`.
        gate: `(in_features, hidden_features)` for `"io"`, transposed for `"oi"`.
        up: likewise.
        gate_bias: `(hidden_features,)` or `None`.
        up_bias: likewise.
        weight_layout: `"io"` or `"oi"`.

    Returns:
        `(..., hidden_features)`.
    """
    if reason := no_type(jnp.result_type(x, gate, up)):
        gate, up = (w.T if weight_layout == "oi" else w for w in (gate, up))

        def apart(x):
            maps = ((gate, gate_bias), (up, up_bias))
            first, second = (jnp.dot(x, w, precision=layer.precision) + (0 if b is None else b) for w, b in maps)
            return activated(layer.activation, first) * second

        return run_stock(GATED_LINEAR, layer.kernel_path, reason, apart, x)
    with at_path(layer.kernel_path):
        return gated_linear(
            x, gate, up, gate_bias=gate_bias, up_bias=up_bias, activation=layer.activation, weight_layout=weight_layout,
            precision=layer.precision, config=layer.config, backend=layer.backend,
        )  # fmt: skip


def gated_apart(layer: Any, gate: Any, up: Any, x: Any, reason: str) -> jax.Array:
    """The same, of two layers that are called, and whose product has no kernel.

    Args:
        layer: with `kernel_path, activation`.
        gate: makes `(..., hidden_features)` of `x`.
        up: likewise.
        x: `(..., in_features)`.
        reason: why they are called.

    Returns:
        `(..., hidden_features)`.
    """
    return run_stock(GATED_LINEAR, layer.kernel_path, reason, lambda x: activated(layer.activation, gate(x)) * up(x), x)
