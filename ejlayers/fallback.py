"""Where a layer computes as the framework's own: why no kernel takes a layer or a call, and how that is told."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_ops.core.snapshot import current
from ejkernel_ops.utils.labelled import labelled
from ejkernel_ops.utils.meta import label

_log = logging.getLogger("ejlayers")
_told: set[tuple[str, str]] = set()


def run_stock(kernel: Any, path: str | None, reason: str, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """What a framework's own code computes in place of a kernel: one log line says so, and a row of `explain`.

    Args:
        kernel: the kernel whose place it takes.
        path: dotted path of the module, while `explain` asks for it.
        reason: why no kernel takes the call.
        run: the framework's own code.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        What it returns.

    Example:
        >>> from ejkernel_ops.kernels import LINEAR
        >>> int(run_stock(LINEAR, None, "x is int32", jnp.square, 3))
        9
    """
    if (kernel.op_id, reason) not in _told:
        _told.add((kernel.op_id, reason))
        _log.warning("%s runs as the framework's own, not as a kernel: %s", kernel.op_id, reason)
    if current().path is not None:
        marks = {"ejkernel_cfg": f"backend=stock |  | {reason}", "ejkernel_path": path or ""}
        run = labelled(lambda digits: label(kernel.op_id_v, digits), **marks)(run)
    return run(*args, **kwargs)


def no_kernel(**arrays: Any) -> str | None:
    """Why no kernel takes arrays of these kinds; `None` where one does.

    What is no array, such as `None` or the place of a weight that is tied to another one, is no reason; an object that
    stands for an array, such as a quantized one, is.

    Args:
        **arrays: the arrays, or what describes them.

    Returns:
        The first reason.

    Example:
        >>> no_kernel(x=jnp.ones(3), weight=jnp.ones(3, complex))
        'weight is complex64'
    """
    for name, x in arrays.items():
        if dataclasses.is_dataclass(x):
            return f"{name} is a {type(x).__name__}"
        dtype = jnp.dtype(getattr(x, "dtype", "float32"))
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            return f"{name} is {dtype}"
    return None


def no_type(dtype: Any) -> str | None:
    """Why no kernel computes in a type; `None` where one does.

    Args:
        dtype: the type that a layer of Flax brings its operands to.

    Returns:
        The reason.

    Example:
        >>> no_type(jnp.bfloat16) is None, no_type(jnp.complex64)
        (True, 'the type to compute in is complex64')
    """
    return no_kernel(**{"the type to compute in": jax.ShapeDtypeStruct((), dtype)})


def no_dense(module: Any) -> str | None:
    """Why no kernel takes a general linear layer of Flax, as far as its product and its axes say.

    Args:
        module: with `dot_general`, and perhaps `dot_general_cls`, `batch_axis` or `batch_dims`.

    Returns:
        The reason, or `None`.
    """
    if module.dot_general not in (None, lax.dot_general) or getattr(module, "dot_general_cls", None) is not None:
        return "custom dot_general"
    return "batch axes" if getattr(module, "batch_axis", None) or getattr(module, "batch_dims", None) else None


def no_norm(module: Any) -> str | None:
    """Why no kernel takes a norm of Flax, as far as its axes say.

    Args:
        module: with `axis_name`, `reduction_axes`, `feature_axes`.

    Returns:
        The reason, or `None`.
    """
    if module.axis_name is not None:
        return f"statistics over the devices of the axis {module.axis_name!r}"
    if module.reduction_axes not in (-1, (-1,)) or module.feature_axes not in (-1, (-1,)):
        return "axes other than the last one"
    return None


def no_attention(
    *operands: Any,
    module: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    broadcast_dropout: bool = True,
    dtype: Any = None,
    **products: Any,
) -> str | None:
    """Why no kernel takes a call of an attention function of Flax.

    Args:
        *operands: queries, keys and values.
        module: the layer, where its weights are sown.
        dropout_rate: of the probabilities.
        deterministic: whether dropout is off.
        broadcast_dropout: whether dropout is shared over batch and heads.
        dtype: type to compute in; default that of the operands.
        **products: functions of one's own, or `None`.

    Returns:
        The reason, or `None`.
    """
    if module is not None:
        return "sow_weights=True"
    if not deterministic and (reason := no_dropout(dropout_rate, broadcast_dropout)):
        return reason
    if any(products.values()):
        return "products of one's own"
    return no_type(jnp.result_type(*operands) if dtype is None else dtype)


def no_dropout(rate: float, is_shared: bool) -> str | None:
    """Why no kernel drops probabilities of attention as Flax does; `None` where one does, or there is no dropout.

    Args:
        rate: how many of them are dropped.
        is_shared: whether those are the same ones for the whole batch and all heads.

    Returns:
        The reason, or `None`.

    Example:
        >>> no_dropout(0.1, True), no_dropout(0.1, False)
        ('dropout with broadcast_dropout=True', None)
    """
    if rate > 0 and is_shared:
        return "dropout with broadcast_dropout=True"
    return f"dropout_rate={rate}" if rate >= 1 else None
