"""What our last layers of language models compute, in all frameworks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops import linear, linear_cross_entropy

from .functional import at_path


def head_logits(layer: Any, hidden: Any, weight: Any, bias: Any, weight_layout: str) -> jax.Array:
    """Logits in float32 of hidden states, capped or not.

    Args:
        layer: with `kernel_path, logits_soft_cap, precision`.
        hidden: `(..., features)`.
        weight: `(features, vocab_size)` for `"io"`, `(vocab_size, features)` for `"oi"`.
        bias: `(vocab_size,)` or `None`.
        weight_layout: `"io"` or `"oi"`.

    Returns:
        `(..., vocab_size)`.
    """
    options = {"preferred_element_type": jnp.float32, "precision": layer.precision}
    with at_path(layer.kernel_path):
        logits = linear(hidden, weight, bias, weight_layout=weight_layout, **options)
    cap = layer.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def head_loss(
    layer: Any, hidden: Any, weight: Any, bias: Any, weight_layout: str, labels: Any, options: dict[str, Any]
) -> jax.Array:
    """The cross-entropy of labels.

    Args:
        layer: with `kernel_path, logits_soft_cap, precision, config, backend`.
        hidden: `(..., features)`.
        weight: as of `head_logits`.
        bias: `(vocab_size,)` or `None`.
        weight_layout: `"io"` or `"oi"`.
        labels: `(...)` integers.
        options: those of `linear_cross_entropy`; they come before what the layer says.

    Returns:
        A scalar, the mean, or what `reduction` says.
    """
    of_layer = {name: getattr(layer, name) for name in ("logits_soft_cap", "precision", "config", "backend")}
    with at_path(layer.kernel_path):
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, weight_layout=weight_layout, **{**of_layer, **options}
        )
