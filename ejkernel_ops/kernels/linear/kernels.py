"""The two kernels of a linear map: on XLA products, at once or in chunks of rows; on Triton what an activation adds.

On Triton the products are XLA's still, and what is left to do is one kernel in each direction.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core.dims import Dims
from ...core.invocation import Invocation
from .. import activation_launch
from ..activation_launch import Products
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
class LinearConfig(OpConfig):
    """Back end and tile sizes of `linear`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which `linear` has `"xla"`, and with an activation
            `"triton"`.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`; on Triton also `blocksize_n` features of a tile, and
            `num_warps`.
        bwd: the same of the backward kernel; on Triton also `blocksize_k`, rows of which one program sums the gradient
            of the bias.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> LinearConfig(fwd=FwdParams(blocksize_m=512)).fwd.blocksize_m
        512
    """


def _dims(*, weight_layout: str, activation: str | None, bias: Any, **others: Any) -> Dims:
    """Rows may be split, and features: products of parts of those that go in are summed, before bias and activation."""
    out = "*rows out" if bias is None and activation is None else "*rows out | in"
    return Dims(
        operands={
            "x": "*rows in", "weight": "in out" if weight_layout == "io" else "out in", "bias": "out | in",
            "out": "*rows out", "preact": "*rows out", "dout": "*rows out", "dpreact": "*rows out",
        },
        outputs=(out, out), split="*rows in out",
    )  # fmt: skip


class LinearBackward(TritonRows, RowKernel):
    """Gradients of a linear map with bias and activation."""

    name = "linear_bwd"
    config_cls = LinearConfig
    launch = activation_launch
    direction = "bwd"
    with_rows = ("x", "out", "preact", "dout", "dpreact")
    lazy_cotangents = True
    fields = {"xla": ("bwd.blocksize_m",), "triton": tuple(f"bwd.{n}" for n in activation_launch.BACKWARD_FIELDS)}

    def dims(self, **arguments: Any) -> Dims:
        """Those of the forward."""
        return _dims(**arguments)

    def triton_cfgs(self, inv: Invocation) -> list[LinearConfig]:
        """Tiles, and rows of a program."""
        return [LinearConfig(backend="triton", bwd=params) for params in activation_launch.backward_params(inv)]

    def run_xla(
        self,
        x,
        weight,
        bias,
        out,
        preact,
        dout,
        dpreact,
        *,
        cfg,
        needs,
        activation,
        weight_layout,
        out_dtype,
        precision,
    ):
        """Chunks of rows: the activation's derivative and the products while a chunk is in the caches."""
        need_x, need_w, need_b = (bool(n) for n in needs)
        dtype, dx_type = accumulated(x, weight), product_type(x.dtype, x, weight)
        whole = self.chunk(cfg) >= num_rows(x)  # else sums of chunks
        dw_type = product_type(weight.dtype, x, weight) if whole else dtype

        def gradients(x, made, dout, dpreact):
            by_out = jnp.zeros(made.shape, dtype) if dout is None else dout.astype(dtype)
            if activation is not None:
                preact = made.astype(dtype) if bias is None else made.astype(dtype) + bias.astype(dtype)
                by_out = by_out * derivative(activation, preact)
            grad = by_out if dpreact is None else by_out + dpreact.astype(dtype)
            low = grad.astype(x.dtype)
            dx = product(low, weight, transposed(weight_layout), dx_type, precision) if need_x else None
            dw = weight_gradient(x, low, weight_layout, dw_type, precision) if need_w else None
            return dx, (dw, by_out.sum(0) if need_b else None)

        flat = [None if a is None else flat_rows(a) for a in (x, preact, dout, dpreact)]
        dx, (dw, db) = over_rows(gradients, flat, self.chunk(cfg))
        return None if dx is None else dx.reshape(x.shape), dw, db

    def run_triton(
        self,
        x,
        weight,
        bias,
        out,
        preact,
        dout,
        dpreact,
        *,
        cfg,
        needs,
        activation,
        weight_layout,
        out_dtype,
        precision,
    ):
        """The activation's derivative and the gradient of the bias in one kernel, the products on XLA."""
        need_x, need_w, need_b = (bool(n) for n in needs)
        products = Products(product=preact, bias=bias)
        made = activation_launch.backward(products, dout, cfg.bwd, activation, x.dtype, want_bias=need_b)
        low, db = made.product, made.bias
        dx_type, dw_type = (product_type(a.dtype, x, weight) for a in (x, weight))
        dx = product(low, weight, transposed(weight_layout), dx_type, precision) if need_x else None
        rows = flat_rows(x), flat_rows(low)
        return dx, weight_gradient(*rows, weight_layout, dw_type, precision) if need_w else None, db


class LinearForward(TritonRows, RowKernel):
    """A linear map over the last axis, with bias and activation; also the product alone, for the backward."""

    name = "linear"
    config_cls = LinearConfig
    launch = activation_launch
    rows, out_rows = (True, False, False), (True, True)
    backward = LinearBackward()
    fields = {"xla": ("fwd.blocksize_m",), "triton": tuple(f"fwd.{n}" for n in activation_launch.FORWARD_FIELDS)}

    def dims(self, **arguments: Any) -> Dims:
        """Rows and features."""
        return _dims(**arguments)

    def on_shards(self, run, axes, x, weight, bias=None, *, activation=None, out_dtype=None, **statics):
        """Where the features that go in are split, the sum of products comes before bias and activation."""
        if "in" not in axes or (bias is None and activation is None):
            return run(x, weight, bias, activation=activation, out_dtype=out_dtype, **statics)
        out_dtype = jnp.result_type(x, weight) if out_dtype is None else out_dtype
        saved_type = waiting_type(out_dtype, bias, x, weight)
        made = jax.lax.psum(run(x, weight, None, activation=None, out_dtype=saved_type, **statics)[0], axes["in"])
        dtype = accumulated(x, weight)
        preact = made.astype(dtype) if bias is None else made.astype(dtype) + bias.astype(dtype)
        if activation is None:
            return preact.astype(out_dtype), None
        return ACTIVATIONS[activation](preact).astype(out_dtype), made

    def triton_cfgs(self, inv: Invocation) -> list[LinearConfig]:
        """Tiles."""
        return [LinearConfig(backend="triton", fwd=params) for params in activation_launch.forward_params(inv)]

    def out_like(self, x, weight, bias, *, activation, weight_layout, out_dtype, precision):
        """Types of output and saved product."""
        made = product(x, weight, weight_layout, None, None)
        saved = None if activation is None else made.astype(waiting_type(out_dtype, bias, x, weight))
        return made.astype(out_dtype), saved

    def run_xla(
        self, x, weight, bias=None, *, cfg, activation=None, weight_layout="io", out_dtype=None, precision=None
    ):
        """Chunks of rows: product, bias and activation while a chunk is in the caches."""
        dtype, out_dtype = accumulated(x, weight), jnp.result_type(x, weight) if out_dtype is None else out_dtype
        saved_type = waiting_type(out_dtype, bias, x, weight)

        def chunk(x):
            made = product(x, weight, weight_layout, product_type(saved_type, x, weight), precision)
            preact = made.astype(dtype) if bias is None else made.astype(dtype) + bias.astype(dtype)
            if activation is None:
                return preact.astype(out_dtype), None
            return ACTIVATIONS[activation](preact).astype(out_dtype), made.astype(saved_type)

        return by_rows(chunk, [x], self.chunk(cfg))

    def run_triton(
        self, x, weight, bias=None, *, cfg, activation=None, weight_layout="io", out_dtype=None, precision=None
    ):
        """The product on XLA, bias and activation in one kernel."""
        out_dtype = jnp.result_type(x, weight) if out_dtype is None else out_dtype
        saved_type = waiting_type(out_dtype, bias, x, weight)
        made = product(x, weight, weight_layout, product_type(saved_type, x, weight), precision)
        products = Products(product=made, bias=bias)
        return activation_launch.forward(products, cfg.fwd, activation, out_dtype), made.astype(saved_type)


LINEAR = LinearForward()
LINEAR_BWD = LinearForward.backward
