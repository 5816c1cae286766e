"""The two kernels of a linear map on XLA: one product, or a loop over chunks of rows that stay in the caches."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..activations import ACTIVATIONS, derivative
from ..config import OpConfig
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
    weight_gradient,
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LinearConfig(OpConfig):
    """Back end and tile sizes of `linear`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which `linear` has `"xla"` so far.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`.
        bwd: the same of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> LinearConfig(fwd=FwdParams(blocksize_m=512)).fwd.blocksize_m
        512
    """


class LinearBackward(RowKernel):
    """Gradients of a linear map with bias and activation."""

    name = "linear_bwd"
    config_cls = LinearConfig
    direction = "bwd"
    with_rows = ("x", "out", "preact", "dout", "dpreact")
    lazy_cotangents = True

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
        """Chunks of rows: the activation's derivative and three products while a chunk is in the caches."""
        need_x, need_w, need_b = (bool(n) for n in needs)
        dtype, dx_type = accumulated(x, weight), product_type(x.dtype, x, weight)
        whole = self.chunk(cfg) >= num_rows(x)  # else sums of chunks
        dw_type = product_type(weight.dtype, x, weight) if whole else dtype

        def gradients(x, preact, dout, dpreact):
            grad = (
                jnp.zeros(preact.shape if dout is None else dout.shape, dtype) if dout is None else dout.astype(dtype)
            )
            if activation is not None:
                grad = grad * derivative(activation, preact.astype(dtype))
            if dpreact is not None:
                grad = grad + dpreact.astype(dtype)
            low = grad.astype(x.dtype)
            dx = product(low, weight, transposed(weight_layout), dx_type, precision) if need_x else None
            dw = weight_gradient(x, low, weight_layout, dw_type, precision) if need_w else None
            return dx, (dw, grad.sum(0) if need_b else None)

        flat = [None if a is None else flat_rows(a) for a in (x, preact, dout, dpreact)]
        dx, (dw, db) = over_rows(gradients, flat, self.chunk(cfg))
        return None if dx is None else dx.reshape(x.shape), dw, db


class LinearForward(RowKernel):
    """A linear map over the last axis, with bias and activation; also the activation's input, for the backward."""

    name = "linear"
    config_cls = LinearConfig
    rows, out_rows = (True, False, False), (True, True)
    backward = LinearBackward()

    def out_like(self, x, weight, bias, *, activation, weight_layout, out_dtype, precision):
        """Types of output and saved activation input."""
        out = product(x, weight, weight_layout, None, None).astype(out_dtype)
        return out, None if activation is None else out

    def run_xla(
        self, x, weight, bias=None, *, cfg, activation=None, weight_layout="io", out_dtype=None, precision=None
    ):
        """Chunks of rows: product, bias and activation while a chunk is in the caches."""
        dtype, out_dtype = accumulated(x, weight), jnp.result_type(x, weight) if out_dtype is None else out_dtype

        def chunk(x):
            preact = product(x, weight, weight_layout, product_type(out_dtype, x, weight), precision).astype(dtype)
            if bias is not None:
                preact = preact + bias.astype(dtype)
            saved = preact.astype(out_dtype)
            if activation is None:
                return saved, None
            return ACTIVATIONS[activation](preact).astype(out_dtype), saved

        return by_rows(chunk, [x], self.chunk(cfg))


LINEAR = LinearForward()
LINEAR_BWD = LinearForward.backward
