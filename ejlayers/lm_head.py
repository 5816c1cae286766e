"""What our last layers of language models compute, in all frameworks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops import linear, linear_cross_entropy

from .batch_axes import joined, joining_order, split
from .functional import at_path


def head_logits(layer: Any, hidden: Any, weight: Any, bias: Any, weight_layout: str) -> jax.Array:
    """Logits in float32 of hidden states, capped or not.

    Args:
        layer: with `kernel_path, logits_soft_cap, precision`.
        hidden: `(..., features)`, in the type of the product.
        weight: `(features, vocab_size)` for `"io"`, `(vocab_size, features)` for `"oi"`, in any type.
        bias: `(vocab_size,)` or `None`.
        weight_layout: `"io"` or `"oi"`.

    Returns:
        `(..., vocab_size)`.
    """
    options = {"preferred_element_type": jnp.float32, "precision": layer.precision}
    with at_path(layer.kernel_path):
        logits = linear(hidden, weight.astype(hidden.dtype), bias, weight_layout=weight_layout, **options)
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
    names = ("logits_soft_cap", "precision", "config", "backend")
    options = {name: getattr(layer, name) for name in names} | {"dtype": hidden.dtype} | options
    rows, order = jnp.shape(hidden)[:-1], joining_order(hidden, jnp.ndim(hidden) - 1)
    if is_spread := order != tuple(range(len(order))):  # over a mesh, such that the op cannot join the rows itself
        hidden, labels = joined(hidden, order), joined(labels, order)
        if (weights := options.get("token_weights")) is not None:
            options["token_weights"] = joined(weights, order)
    with at_path(layer.kernel_path):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, weight_layout=weight_layout, **options)
    return split(loss, rows, order) if is_spread and loss.ndim else loss
