"""The two kernels of an MLP: the products on XLA, what is between them on XLA or in one kernel of Triton.

What the activation gives is made again for the gradient, from the products: it costs a write, and saves keeping it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core.dims import Dims
from ...core.invocation import Invocation
from .. import activation_launch
from ..activation_launch import Gradients, Products
from ..activations import ACTIVATIONS, derivative
from ..config import OpConfig
from ..on_triton import TritonRows
from ..rows import (
    RowKernel,
    accumulated,
    by_rows,
    flat_rows,
    num_rows,
    over_rows,
    product,
    product_type,
    transposed,
    waiting_type,
    weight_gradient,
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MlpConfig(OpConfig):
    """Back end and tile sizes of `mlp`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which the op has `"triton"` and `"xla"`.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`; on Triton also `blocksize_n` features of a tile, and
            `num_warps`.
        bwd: the same of the backward kernel; on Triton also `blocksize_k`, rows of which one program sums the gradients
            of the biases.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> MlpConfig(fwd=FwdParams(blocksize_m=512)).fwd.blocksize_m
        512
    """


def _kept_type(x: Any, up_weight: Any, up_bias: Any, gate_bias: Any) -> Any:
    """The type of both first products."""
    return waiting_type(x.dtype, gate_bias if up_bias is None else up_bias, x, up_weight)


def _products(x, up_weight, up_bias, gate_weight, gate_bias, weight_layout, precision) -> Products:
    """What is activated, and what that is multiplied by, both without their biases yet."""
    saved = _kept_type(x, up_weight, up_bias, gate_bias)

    def made(weight: Any) -> jax.Array:
        return product(x, weight, weight_layout, product_type(saved, x, weight), precision)

    if gate_weight is None:
        return Products(product=made(up_weight), bias=up_bias)
    return Products(product=made(gate_weight), bias=gate_bias, up=made(up_weight), up_bias=up_bias)


def _kept(x, up_weight, up_bias, up, gate_weight, gate_bias, gate) -> Products:
    """The same of what a forward has kept."""
    if gate_weight is None:
        return Products(product=up, bias=up_bias)
    return Products(product=gate, bias=gate_bias, up=up, up_bias=up_bias)


def _between(products: Products, activation: str, dtype: Any) -> jax.Array:
    """What the activation gives, on XLA."""
    x, up = products.wide(dtype)
    out = ACTIVATIONS[activation](x)
    return out if up is None else out * up


def _back(products: Products, dout: jax.Array, activation: str, dtype: Any) -> Gradients:
    """The gradients of what is activated, on XLA, where no sum is rounded."""
    x, up = products.wide(dtype)
    value, dout = ACTIVATIONS[activation](x), dout.astype(dtype)
    grad = dout * derivative(activation, x)
    if up is None:
        return Gradients(product=grad, up=None, out=value, bias=grad, up_bias=None)
    return Gradients(product=grad * up, up=dout * value, out=value * up, bias=grad * up, up_bias=dout * value)


def _dims(*, weight_layout: str, down_bias: Any, **arguments: Any) -> Dims:
    """Rows and hidden features: what each device makes of some of those is summed before the last bias."""
    first, second = ("in m", "m out") if weight_layout == "io" else ("m in", "out m")
    out = "*rows out" if down_bias is None else "*rows out | m"
    return Dims(
        operands={
            "x": "*rows in", "up_weight": first, "gate_weight": first, "up_bias": "m", "gate_bias": "m",
            "down_weight": second, "down_bias": "out | m", "out": "*rows out", "dout": "*rows out",
            **dict.fromkeys(("up", "gate", "dup", "dgate"), "*rows m"),
        },
        outputs=(out, "*rows m", "*rows m"), split="*rows m",
    )  # fmt: skip


class MlpBackward(TritonRows, RowKernel):
    """Gradients of an MLP."""

    name = "mlp_bwd"
    config_cls = MlpConfig
    launch = activation_launch
    direction = "bwd"
    with_rows = ("x", "out", "up", "gate", "dout", "dup", "dgate")
    lazy_cotangents = True
    fields = {"xla": ("bwd.blocksize_m",), "triton": tuple(f"bwd.{n}" for n in activation_launch.BACKWARD_FIELDS)}

    def dims(self, **arguments: Any) -> Dims:
        """Rows and hidden features."""
        return _dims(**arguments)

    def triton_cfgs(self, inv: Invocation) -> list[MlpConfig]:
        """Tiles, and rows of a program."""
        return [MlpConfig(backend="triton", bwd=params) for params in activation_launch.backward_params(inv)]

    def run_xla(
        self, x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, out, up, gate, dout, dup, dgate, *,
        cfg, needs, activation, weight_layout, precision,
    ):  # fmt: skip
        """Chunks of rows, all products of a chunk while it is in the caches."""
        dtype, whole = accumulated(x, up_weight), self.chunk(cfg) >= num_rows(x)
        weights, biases = (up_weight, gate_weight, down_weight), (up_bias, gate_bias, down_bias)

        def gradients(x, up, gate, dout, dup, dgate):
            dout = jnp.zeros((*x.shape[:-1], out.shape[-1]), x.dtype) if dout is None else dout
            kept = _kept(x, up_weight, up_bias, up, gate_weight, gate_bias, gate)

            def back(by_hidden: jax.Array) -> Gradients:
                made = _back(kept, by_hidden, activation, dtype)
                first, second = (dup, None) if gate_weight is None else (dgate, dup)
                return made.plus(first, second)

            return _gradients(x, weights, biases, dout, back, needs, weight_layout, precision, whole)

        flat = [None if a is None else flat_rows(a) for a in (x, up, gate, dout, dup, dgate)]
        dx, (dws, dbs) = over_rows(gradients, flat, self.chunk(cfg))
        return _in_order(x, dx, dws, dbs)

    def run_triton(
        self, x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, out, up, gate, dout, dup, dgate, *,
        cfg, needs, activation, weight_layout, precision,
    ):  # fmt: skip
        """What is between the products in one kernel, and the sums of its biases."""
        weights, biases = (up_weight, gate_weight, down_weight), (up_bias, gate_bias, down_bias)
        kept = _kept(x, up_weight, up_bias, up, gate_weight, gate_bias, gate)
        wants = [b is not None and bool(n) for b, n in zip((up_bias, gate_bias), (needs[2], needs[4]))]
        first, second = (wants[0], False) if gate_weight is None else reversed(wants)

        def back(by_hidden: jax.Array) -> Gradients:
            return activation_launch.backward(
                kept, by_hidden, cfg.bwd, activation, x.dtype, want_bias=first, want_up_bias=second,
                want_out=bool(needs[5]),
            )  # fmt: skip

        dx, (dws, dbs) = _gradients(x, weights, biases, dout, back, needs, weight_layout, precision, True)
        return _in_order(x, dx, dws, dbs)


def _gradients(
    x: jax.Array, weights: Any, biases: Any, dout: jax.Array, back: Callable[[jax.Array], Gradients], needs: Any,
    weight_layout: str, precision: Any, whole: bool,
) -> Any:  # fmt: skip
    """Gradients of rows, and the sums of those of weights and biases: all of them if `whole`, else parts of a sum."""
    up_weight, gate_weight, down_weight = weights
    need_x, need_up, need_up_bias, need_gate, need_gate_bias, need_down, need_down_bias = (bool(n) for n in needs)
    dtype, other = accumulated(x, up_weight), transposed(weight_layout)
    rows = flat_rows(x)

    def by_weight(wanted: bool, left: Any, right: Any, weight: Any) -> Any:
        made = product_type(weight.dtype, x, weight) if whole else dtype
        return weight_gradient(flat_rows(left), flat_rows(right), weight_layout, made, precision) if wanted else None

    dhidden = product(dout, down_weight, other, product_type(x.dtype, dout, down_weight), precision)
    made = back(dhidden)
    lows = [made.product] if gate_weight is None else [made.up, made.product]  # of up, then of the gate
    pairs = list(zip(lows, [w for w in (up_weight, gate_weight) if w is not None]))
    dx = None
    if need_x:
        parts = [product(low.astype(x.dtype), w, other, product_type(x.dtype, x, w), precision) for low, w in pairs]
        wide: Any = [part.astype(dtype) for part in parts]
        dx = functools.reduce(jnp.add, wide).astype(x.dtype)
    wanted = (need_up, need_gate)[: len(pairs)]
    dws = [by_weight(need, rows, low.astype(x.dtype), w) for need, (low, w) in zip(wanted, pairs)]
    dws += [None] * (2 - len(dws)) + [by_weight(need_down, made.out, dout, down_weight) if need_down else None]
    sums = [made.bias, None] if gate_weight is None else [made.up_bias, made.bias]
    asked = [b is not None and need for b, need in zip(biases, (need_up_bias, need_gate_bias, need_down_bias))]
    dbs = [_summed(s) if want else None for s, want in zip([*sums, dout.astype(dtype)], asked)]
    return dx, (dws, dbs)


def _summed(gradient: jax.Array) -> jax.Array:
    """The gradient of a bias, of rows or summed already."""
    return gradient if gradient.ndim == 1 else flat_rows(gradient).sum(0)


def _in_order(x: jax.Array, dx: Any, dws: Any, dbs: Any) -> tuple[Any, ...]:
    """As the operands are."""
    dx = None if dx is None else dx.reshape(x.shape)
    return (dx, *(g for pair in zip(dws, dbs) for g in pair))


class MlpForward(TritonRows, RowKernel):
    """`activation(x @ up + up_bias) @ down + down_bias`, gated or not, and the first products for the backward."""

    name = "mlp"
    config_cls = MlpConfig
    launch = activation_launch
    rows, out_rows = (True, False, False, False, False, False, False), (True, True, True)
    backward = MlpBackward()
    fields = {"xla": ("fwd.blocksize_m",), "triton": tuple(f"fwd.{n}" for n in activation_launch.FORWARD_FIELDS)}

    def dims(self, **arguments: Any) -> Dims:
        """Rows and hidden features."""
        return _dims(**arguments)

    def on_shards(self, run: Any, axes: dict[str, tuple[str, ...]], *operands: Any, **statics: Any) -> Any:
        """Where hidden features are split, the sum of products comes before the last bias."""
        *others, down_bias = operands
        if "m" not in axes or down_bias is None:
            return run(*operands, **statics)
        out, up, gate = run(*others, None, **statics)
        out = jax.lax.psum(out, axes["m"])
        dtype = accumulated(out, down_bias)
        return (out.astype(dtype) + down_bias.astype(dtype)).astype(out.dtype), up, gate

    def triton_cfgs(self, inv: Invocation) -> list[MlpConfig]:
        """Tiles."""
        return [MlpConfig(backend="triton", fwd=params) for params in activation_launch.forward_params(inv)]

    def out_like(
        self, x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, *,
        activation, weight_layout, precision,
    ):  # fmt: skip
        """Types of the output and of the products that are kept."""
        up = product(x, up_weight, weight_layout, None, None)
        out = product(up.astype(x.dtype), down_weight, weight_layout, None, None).astype(x.dtype)
        kept = up.astype(_kept_type(x, up_weight, up_bias, gate_bias))
        return out, kept, None if gate_weight is None else kept

    def run_xla(
        self, x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, *,
        cfg, activation, weight_layout, precision,
    ):  # fmt: skip
        """Chunks of rows, all of a chunk while it is in the caches."""
        dtype = accumulated(x, up_weight)
        kept = _kept_type(x, up_weight, up_bias, gate_bias)

        def chunk(x):
            products = _products(x, up_weight, up_bias, gate_weight, gate_bias, weight_layout, precision)
            hidden = _between(products, activation, dtype).astype(x.dtype)
            out = _down(hidden, down_weight, down_bias, weight_layout, precision)
            return out, *(None if a is None else a.astype(kept) for a in _up_and_gate(products))

        return by_rows(chunk, [x], self.chunk(cfg))

    def run_triton(
        self, x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, *,
        cfg, activation, weight_layout, precision,
    ):  # fmt: skip
        """What is between the products in one kernel."""
        kept = _kept_type(x, up_weight, up_bias, gate_bias)
        products = _products(x, up_weight, up_bias, gate_weight, gate_bias, weight_layout, precision)
        hidden = activation_launch.forward(products, cfg.fwd, activation, x.dtype)
        out = _down(hidden, down_weight, down_bias, weight_layout, precision)
        return out, *(None if a is None else a.astype(kept) for a in _up_and_gate(products))


def _down(hidden: jax.Array, weight: jax.Array, bias: Any, weight_layout: str, precision: Any) -> jax.Array:
    """The second linear map; its product is rounded before the bias only where the type has the range for it."""
    dtype = accumulated(hidden, weight)
    made_type = product_type(waiting_type(hidden.dtype, bias, hidden, weight), hidden, weight)
    made = product(hidden, weight, weight_layout, made_type, precision)
    return made.astype(hidden.dtype) if bias is None else (made.astype(dtype) + bias.astype(dtype)).astype(hidden.dtype)


def _up_and_gate(products: Products) -> tuple[Any, Any]:
    """What is kept: the product of up, and that of the gate where there is one."""
    return (products.product, None) if products.up is None else (products.up, products.product)


MLP = MlpForward()
MLP_BWD = MlpForward.backward
