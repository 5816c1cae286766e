"""`linear_cross_entropy`: checks its arguments, puts them in canonical form, calls the kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ...core.partition import require_manual
from ...execution.executor import default_executor
from ..config import as_array, canonical_precision, explicit_config, static_number
from ..rows import accumulated
from .kernels import LINEAR_CROSS_ENTROPY, LinearCrossEntropyConfig
from .loss import IGNORED, Loss
from .row_order import RowOrder


def linear_cross_entropy(
    hidden: Float[Array, "*rows features"],
    weight: Float[Array, "features vocab"] | Float[Array, "vocab features"],
    labels: Int[Array, "*rows"],
    *,
    bias: Float[Array, "vocab"] | None = None,  # noqa: F821
    token_weights: Float[Array, "*rows"] | None = None,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight_layout: str = "io",
    vocab_axis: str | None = None,
    dtype: Any = None,
    logits_dtype: Any = None,
    precision: Any = None,
    config: LinearCrossEntropyConfig | None = None,
    backend: str | None = None,
    cfg: LinearCrossEntropyConfig | None = None,
) -> Float[Array, ""] | Float[Array, "*rows"]:
    """Cross-entropy of `hidden @ weight + bias` with labels, without ever holding all logits.

    With `logits = soft_cap * tanh((hidden @ weight + bias) / soft_cap)`, and `lse` their log-sum-exp, the loss of a
    token is `lse - (1 - label_smoothing) * logits[label] - label_smoothing * mean(logits) + z_loss * lse**2`. All that
    follows the product is float32 (float64 for float64 inputs). Differentiable in `hidden`, `weight`, `bias` and
    `token_weights`; with `reduction` `"mean"` or `"sum"` the gradients may be made in the forward, which spares a
    product, as the config says. A call that is not differentiated makes none.

    Args:
        hidden: `(..., features)`.
        weight: `(features, vocab)`, or `(vocab, features)` with `weight_layout="oi"`, as a tied embedding has it.
        labels: `(...)` ints in `[0, vocab)`, or `ignore_index`. Others are an error outside `jit`; inside, where no
            value is known, their loss and gradients are NaN.
        bias: `(vocab,)`.
        token_weights: `(...)`, by which each loss is multiplied.
        logits_soft_cap: bound of the logits, above 0.
        z_loss: weight of `lse**2`.
        label_smoothing: in `[0, 1]`, the part of the target that all entries share.
        ignore_index: the label of tokens that do not count: their loss is 0, and what they hold reaches nothing.
        reduction: `"mean"`, the sum of the weighted losses over the sum of the weights (without weights: over the
            count of tokens that are not ignored; 0 where that is 0), `"sum"`, or `"none"`.
        weight_layout: `"io"` or `"oi"`; neither copies the weight.
        vocab_axis: inside `jax.shard_map`, the mesh axis over which the vocabulary is split: `weight` and `bias` are
            this device's part of it, `hidden` and labels those of all. The devices then tell each other four numbers
            of each token. Elsewhere the sharding of the weight says all that.
        dtype: in which hidden states and weight are multiplied, as the `dtype` of Flax's layers; default that to which
            both promote. The gradient of a wider weight is not rounded to it.
        logits_dtype: to which the product is rounded before bias and cap: `float32`, or default what a layer of `dtype`
            gives in bfloat16, and the type of the sums else.
        precision: of the products, as in `jax.lax.Precision`; default JAX's.
        config: back end and chunks; what it leaves open is chosen. `recompute=False` makes gradients in the forward: it
            takes chunks of the whole vocabulary, and a reduction.
        backend: `"triton"`, `"xla"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        A scalar, or with `reduction="none"` the loss of each token `(...)`, float32.

    Raises:
        ValueError: shapes that do not fit, labels out of range, an option out of range, an unknown reduction, layout
            or precision.
        TypeError: floats that are none, labels that are no ints, types that are no floats.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = linear_cross_entropy(jnp.ones((2, 3, 8)), jnp.ones((8, 16)), jnp.zeros((2, 3), int))
        >>> round(float(loss), 4)  # log(16)
        2.7726

    Source: gradients in the forward: Hsu et al. 2024, arXiv:2410.10989; z-loss: Chowdhery et al. 2022,
    arXiv:2204.02311; label smoothing: Szegedy et al. 2015, arXiv:1512.00567.
    """
    if weight_layout not in ("io", "oi"):
        raise ValueError(f"weight_layout is {weight_layout!r}; expected 'io' (in, vocab) or 'oi' (vocab, in)")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    hidden, weight, labels = as_array("hidden", hidden), as_array("weight", weight), as_array("labels", labels)
    bias = None if bias is None else as_array("bias", bias)
    token_weights = None if token_weights is None else as_array("token_weights", token_weights)
    _check_types(hidden=hidden, weight=weight, bias=bias, token_weights=token_weights)
    axes = {} if vocab_axis is None else {"v": vocab_axis}
    require_manual(LINEAR_CROSS_ENTROPY, axes, "vocab_axis")
    vocab = _check_shapes(hidden, weight, labels, bias, token_weights, weight_layout)
    vocab *= 1 if vocab_axis is None else jax.lax.axis_size(vocab_axis)
    _check_labels(labels, vocab, ignore_index)
    dtype = _float_type("dtype", dtype) or jnp.promote_types(hidden.dtype, weight.dtype)
    logits_dtype = _float_type("logits_dtype", logits_dtype) or (dtype if dtype == jnp.bfloat16 else None)
    loss = Loss(
        weight_layout=weight_layout,
        soft_cap=_in_range("logits_soft_cap", logits_soft_cap, 0.0, math.inf, "above 0", least_allowed=False),
        z_loss=_in_range("z_loss", z_loss, 0.0, math.inf, "at least 0") or 0.0,
        label_smoothing=_in_range("label_smoothing", label_smoothing, 0.0, 1.0, "in [0, 1]") or 0.0,
        logits_dtype=None if logits_dtype is None else logits_dtype.name,
    )
    rows = RowOrder.of(hidden)
    hidden, weight = rows.flat(hidden).astype(dtype), weight.astype(_held_type(weight.dtype, dtype))
    wide = accumulated(hidden, weight)
    token_weights = None if token_weights is None else rows.flat(token_weights)
    flat, coefficients = _canonical(rows.flat(labels), token_weights, vocab, ignore_index, reduction, wide)
    out = default_executor()(
        LINEAR_CROSS_ENTROPY, hidden, weight, flat, bias, coefficients,
        cfg=explicit_config(LinearCrossEntropyConfig, config, cfg, backend), loss=loss, reduce=reduction != "none",
        precision=canonical_precision(precision), mesh_axes=axes,
    )  # fmt: skip
    if vocab_axis is not None:  # all have the same, and now their types say so
        out = jax.lax.pmean(out, vocab_axis)
    return rows.back(out) if reduction == "none" else out


def _canonical(
    labels: jax.Array, token_weights: Any, vocab: int, ignore_index: int, reduction: str, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Labels of which those out of range are `vocab`, and by what each loss is multiplied."""
    ignored = _holds(labels, ignore_index) & (labels == labels.dtype.type(_within(labels, ignore_index)))
    valid = (labels >= 0) & (labels <= labels.dtype.type(_within(labels, vocab - 1)))
    canonical = jnp.where(ignored, IGNORED, jnp.where(valid, labels.astype(jnp.int32), vocab))
    weights = jnp.ones(labels.shape, dtype) if token_weights is None else token_weights.astype(dtype)
    weights = jnp.where(ignored, 0.0, weights)
    if reduction != "mean":
        return canonical, weights
    total = weights.sum()
    return canonical, weights / jnp.where(total == 0, 1.0, total)


def _within(labels: jax.Array, number: Any) -> int:
    """The number, or the nearest one that the type of labels holds: bytes have no -100, and none is 256."""
    limits = jnp.iinfo(labels.dtype)
    return min(max(int(number), int(limits.min)), int(limits.max))


def _holds(labels: jax.Array, number: Any) -> bool:
    """Whether a number is one that the type of labels holds."""
    return _within(labels, number) == number


def _check_types(**arrays: Any) -> None:
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is {x.dtype}; expected a float type")


def _held_type(weight: Any, dtype: Any) -> Any:
    """The type of the weight, in which its gradient is: no narrower than products, no wider than their sums."""
    sums = jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(weight if jnp.promote_types(weight, sums) == sums else sums, dtype)


def _float_type(name: str, dtype: Any) -> Any:
    """A float type that was asked for, or `None`."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} is {dtype!r}; expected a float type such as jnp.bfloat16, or None")
    return None if dtype is None else jnp.dtype(dtype)


def _check_shapes(hidden: Any, weight: Any, labels: Any, bias: Any, token_weights: Any, weight_layout: str) -> int:
    """The size of the vocabulary."""
    if hidden.ndim < 1 or weight.ndim != 2:
        raise ValueError(f"hidden has shape {hidden.shape} and weight {weight.shape}; expected (..., in) and two axes")
    features, vocab = weight.shape if weight_layout == "io" else weight.shape[::-1]
    if hidden.shape[-1] != features:
        other = "oi" if weight_layout == "io" else "io"
        hint = f"; for weights stored the other way pass weight_layout={other!r}" if hidden.shape[-1] == vocab else ""
        found = f"hidden has {hidden.shape[-1]} features and weight takes {features} (layout {weight_layout!r})"
        raise ValueError(f"{found}{hint}")
    if vocab == 0:
        raise ValueError(f"weight has shape {weight.shape}; expected a vocabulary of at least one entry")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels is {labels.dtype}; expected ints, one for each row of hidden")
    for name, x, shape in (
        ("labels", labels, hidden.shape[:-1]), ("token_weights", token_weights, hidden.shape[:-1]),
        ("bias", bias, (vocab,)),
    ):  # fmt: skip
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; expected {shape}")
    return vocab


def _check_labels(labels: Any, vocab: int, ignore_index: Any) -> None:
    """Refuses labels out of range, where their values are known."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, np.integer)):
        raise TypeError(f"ignore_index is {ignore_index!r}; expected an int")
    if isinstance(labels, Tracer) or not labels.size:
        return
    values = np.asarray(labels)
    counted = values if not _holds(labels, ignore_index) else values[values != values.dtype.type(ignore_index)]
    wrong = counted[(counted < 0) | (counted > _within(labels, vocab - 1))]
    if wrong.size:
        raise ValueError(
            f"labels has {wrong.size} values out of range, such as {wrong[0]}; expected 0 to {vocab - 1}, or "
            f"ignore_index={ignore_index} for tokens that do not count"
        )


def _in_range(name: str, value: Any, least: float, most: float, text: str, least_allowed: bool = True) -> float | None:
    if value is None:
        return None
    value = static_number(name, value)
    if not (least <= value <= most) or math.isinf(value) or (value == least and not least_allowed):
        raise ValueError(f"{name} is {value}; expected a finite number {text}")
    return value
