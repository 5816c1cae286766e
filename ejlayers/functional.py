"""The maths of the layers, free of any framework."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ejkernel_ops import (
    AttentionConfig,
    GatedLinearConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    NormConfig,
    RotaryConfig,
    flash_attention,
    linear,
)
from ejkernel_ops.core.snapshot import current, entered
from ejkernel_ops.kernels import LINEAR
from ejkernel_ops.kernels.activations import ACTIVATIONS, check_activation
from ejkernel_ops.kernels.config import as_array

from .batch_axes import joined, joining_order, resharded, split
from .fallback import run_stock

CONFIGS = (AttentionConfig, LinearConfig, GatedLinearConfig, NormConfig, RotaryConfig, LinearCrossEntropyConfig)


def at_path(path: str | None) -> contextlib.AbstractContextManager:
    """Context in which calls carry the dotted path of their module; without a path it does nothing."""
    if path is None:
        return contextlib.nullcontext()
    return entered(lambda snapshot: dataclasses.replace(snapshot, path=path))


def explaining() -> bool:
    """Whether `explain` asks the layers for their paths; at other times a path would only make programs differ."""
    return current().path is not None


def with_bias(preferred: Any, bias: jax.Array | None) -> Any:
    """The type of a linear layer's result: what is preferred for the product, after the bias was added.

    Example:
        >>> with_bias(jnp.bfloat16, jnp.zeros(3))
        dtype('float32')
    """
    return preferred if preferred is None or bias is None else jnp.result_type(preferred, bias)


def activated(name: str, x: jax.Array) -> jax.Array:
    """An activation by its name, as `gated_linear` knows it.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> float(activated("relu", jnp.float32(-1.0)))
        0.0
    """
    check_activation(name)
    return ACTIVATIONS[name](x)


def zero_where_unseen(out: jax.Array, mask: Any) -> jax.Array:
    """Outputs of attention that has no kernel, with 0 for the queries that may see no key.

    Args:
        out: `(..., q_len, num_heads, head_dim)`.
        mask: broadcastable to `(..., num_heads, q_len, kv_len)`, or `None`.

    Example:
        >>> zero_where_unseen(jnp.ones((2, 1, 1)), jnp.array([[True], [False]]))[:, 0, 0]
        Array([1., 0.], dtype=float32)
    """
    if mask is None:
        return out
    seen = jnp.asarray(mask, bool).any(-1)  # (..., num_heads, q_len)
    seen = seen.reshape((1,) * max(0, 2 - seen.ndim) + seen.shape)
    return jnp.where(jnp.swapaxes(seen, -1, -2)[..., None], out, 0)


def attend(
    query: Float[Array, "*batch q_len num_heads head_dim"],
    key: Float[Array, "*batch kv_len num_kv_heads head_dim"],
    value: Float[Array, "*batch kv_len num_kv_heads v_dim"],
    *,
    bias: Any = None,
    mask: Any = None,
    **options: Any,
) -> Float[Array, "*batch q_len num_heads v_dim"]:
    """`flash_attention` with any number of batch axes.

    Args:
        query: `(..., q_len, num_heads, head_dim)`.
        key: `(..., kv_len, num_kv_heads, head_dim)`.
        value: `(..., kv_len, num_kv_heads, v_dim)`.
        bias: broadcastable to `(..., num_heads, q_len, kv_len)`.
        mask: likewise; what is not 0 may be seen.
        **options: those of `flash_attention`; a `dropout_rate` of 1, too, which gives 0.

    Returns:
        `(..., q_len, num_heads, v_dim)`.

    Raises:
        ValueError: batch axes that differ.

    Example:
        >>> x = jnp.ones((2, 3, 5, 4, 8))
        >>> attend(x, x, x).shape
        (2, 3, 5, 4, 8)
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {x.shape}; expected (..., length, heads, head_dim)")
    batch = query.shape[:-3]
    if key.shape[:-3] != batch or value.shape[:-3] != batch:
        raise ValueError(f"query {query.shape}, key {key.shape} and value {value.shape} differ in their batch axes")
    mask = None if mask is None else as_array("mask", mask).astype(bool)
    bias = None if bias is None else as_array("bias", bias)
    order = joining_order(query, len(batch))
    bias, mask = (
        None if x is None else _one_batch_axis(name, x, batch, order) for name, x in (("bias", bias), ("mask", mask))
    )
    query, key, value = (joined(x, order) for x in (query, key, value))
    for name in {"q_segment_ids", "kv_segment_ids", "kv_lengths", "q_offset"} & options.keys():
        x = options[name]
        if x is not None and not (name == "q_offset" and np.ndim(x) == 0):  # one of all examples
            x = as_array(name, x)
            if x.shape[: len(batch)] != batch:
                raise ValueError(f"{name} has shape {x.shape}; expected the batch axes of query, {batch}, first")
            options[name] = joined(x, order)
    rate = options.get("dropout_rate", 0.0)
    if drops_all := isinstance(rate, (int, float)) and rate == 1:
        options |= {"dropout_rate": 0.0}
    out = split(flash_attention(query, key, value, bias=bias, mask=mask, **options), batch, order)
    return jnp.zeros_like(out) if drops_all else out


def _one_batch_axis(name: str, x: jax.Array, batch: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """A bias or mask with its batch axes joined, still 1 where all of them broadcast."""
    lead = x.shape[:-3]
    if len(lead) > len(batch) or any(size not in (1, of) for size, of in zip(lead[::-1], batch[::-1])):
        raise ValueError(f"{name} has shape {x.shape}, whose batch axes {lead} do not broadcast to query's, {batch}")
    if math.prod(lead) == 1:
        return x.reshape(1, *x.shape[-3:]) if x.ndim >= 3 else x
    return joined(jnp.broadcast_to(x, (*batch, *x.shape[-3:])), order)


def linear_over_axes(
    x: jax.Array, kernel: jax.Array, bias: Any, axes: Sequence[int], *, out_sharding: Any = None, **options: Any
) -> jax.Array:
    """`linear` over several axes of an array at once.

    Where a mesh with Explicit axes spreads an array along another than the first of the axes that become one, JAX's
    own product is taken.

    Args:
        x: an array that has the sizes `in...` at `axes`.
        kernel: `(in..., out...)`, the first axes in the order of `axes`.
        bias: `(out...)`, or of as many numbers, or `None`.
        axes: axes of `x`; what is left of it comes first in the result.
        out_sharding: how the result is to be spread over a mesh with Explicit axes; default however it comes.
        **options: those of `linear`.

    Returns:
        `(..., out...)`.

    Raises:
        TypeError: sizes that do not fit.

    Example:
        >>> linear_over_axes(jnp.ones((7, 2, 3)), jnp.ones((2, 3, 4, 5)), None, (-2, -1)).shape
        (7, 4, 5)
    """
    count = len(axes)
    ins, outs = kernel.shape[:count], kernel.shape[count:]
    if (given := tuple(x.shape[axis] for axis in axes)) != ins:
        raise TypeError(f"the input has sizes {given} at its axes {tuple(axes)}; expected {ins}, those of the kernel")
    x = jnp.moveaxis(x, axes, range(-count, 0))
    lead = x.shape[: x.ndim - count]
    if not (_joinable(x, len(lead), x.ndim) and _joinable(kernel, 0, count) and _joinable(kernel, count, kernel.ndim)):
        taken = {n: options[n] for n in ("precision", "preferred_element_type") if n in options}
        reason = "a mesh with Explicit axes spreads an axis that is not the first of those that become one"
        out = run_stock(
            LINEAR, current().path, reason, jnp.tensordot, x, kernel, count, out_sharding=out_sharding, **taken
        )
        return out if bias is None else out + bias.reshape(outs)
    bias = None if bias is None else bias.reshape(math.prod(outs))
    flat = linear(x.reshape(*lead, math.prod(ins)), kernel.reshape(math.prod(ins), math.prod(outs)), bias, **options)
    return resharded(flat.reshape(*lead, *outs), out_sharding)


def _joinable(x: jax.Array, first: int, last: int) -> bool:
    """Whether axes `[first, last)` can become one as far as the type of an array says how it is spread over a mesh."""
    return not any(jax.typeof(x).sharding.spec[first + 1 : last])


@dataclasses.dataclass(frozen=True)
class EinsumProduct:
    """An einsum of an array and a kernel that is a linear map: `linear_over_axes` with these axes of both."""

    axes: tuple[int, ...]
    kernel_axes: tuple[int, ...]

    def __call__(self, x: jax.Array, kernel: jax.Array, bias: Any, **options: Any) -> jax.Array:
        """The result of the equation, and the bias in the axes that it takes from the kernel."""
        return linear_over_axes(x, kernel.transpose(self.kernel_axes), bias, self.axes, **options)


def einsum_as_linear(equation: str | None, ndim: int | None = None) -> EinsumProduct | None:
    """An equation such as `"...a,ab->...b"` as a linear map; `None` where it is none.

    It is one where the letters of the first operand that stay come first in the result, in order, and those of the
    second that are new come after them.

    Args:
        equation: of two operands, with or without `...` in front.
        ndim: axes of the first operand, if they are known; where they are not as many as its letters, it is no map.

    Example:
        >>> einsum_as_linear("nta,hab->nthb")
        EinsumProduct(axes=(-1,), kernel_axes=(1, 0, 2))
        >>> einsum_as_linear("ba,ba->b") is None
        True
    """
    operands, _, result = (equation or "").replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    if x.startswith("...") and result.startswith("..."):
        x, result, ndim = x[3:], result[3:], None
    letters = (x, kernel, result)
    if not all(text.isalpha() and len(set(text)) == len(text) for text in letters) or ndim not in (None, len(x)):
        return None
    stay, new = [c for c in x if c in result], [c for c in result if c not in x]
    summed = [c for c in x if c not in result]
    if list(result) != stay + new or sorted(kernel) != sorted(summed + new) or not summed or not new:
        return None
    return EinsumProduct(tuple(x.index(c) - len(x) for c in summed), tuple(map(kernel.index, summed + new)))
