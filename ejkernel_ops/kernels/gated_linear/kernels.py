"""The two kernels of a gated linear map: on XLA whole products, or chunks of rows that stay in the caches.

On Triton the products are XLA's still, and what is left to do is one kernel in each direction.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.dims import Dims
from ...core.invocation import Invocation
from ...core.kernel import random_array
from ...errors import ConfigError
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
    held_back,
    num_rows,
    over_rows,
    product,
    product_type,
    transposed,
    weight_gradient,
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GatedLinearConfig(OpConfig):
    """Back end and tile sizes of `gated_linear`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which the op has `"triton"` and `"xla"`.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`; on Triton also `blocksize_n` features of a tile, and
            `num_warps`.
        bwd: the same of the backward kernel; on Triton also `blocksize_k`, rows of which one program sums the gradients
            of the biases.
        recompute: whether the backward computes the two products again: a compiled step then holds neither from the
            forward on.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> GatedLinearConfig(recompute=True).recompute
        True
    """

    recompute: bool | None = None

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.recompute, (bool, type(None))):
            raise ConfigError(f"recompute is {self.recompute!r}; expected None, True or False")


def _products(x, gate_weight, up_weight, gate_bias, up_bias, weight_layout, precision) -> tuple[jax.Array, jax.Array]:
    """Gate and up, before the activation, in the type of sums."""
    dtype = accumulated(x, gate_weight)
    biased = gate_bias is not None or up_bias is not None  # then two roundings would be one too many
    made = dtype if biased else product_type(x.dtype, x, gate_weight)
    gate = product(x, gate_weight, weight_layout, made, precision)
    if up_weight is None:
        gate, up = jnp.split(gate, 2, -1)
    else:
        up = product(x, up_weight, weight_layout, made, precision)
    gate, up = gate.astype(dtype), up.astype(dtype)
    gate, up = (a if b is None else a + b.astype(dtype) for a, b in ((gate, gate_bias), (up, up_bias)))
    return gate, up


class GatedTriton(TritonRows):
    """What both kernels have of Triton, and of devices."""

    launch = activation_launch
    prefers_xla = True

    def dims(self, *, weight_layout: str, up_weight: Any, **arguments: Any) -> Dims:
        """Rows, and the features of two weights; of one weight for both, parts of it are not parts of each."""
        middle = "m" if up_weight is not None else "both"
        weight, rows = f"in {middle}" if weight_layout == "io" else f"{middle} in", "*rows m"
        return Dims(
            operands={
                "x": "*rows in", "gate_weight": weight, "up_weight": weight, "gate_bias": "m", "up_bias": "m",
                **dict.fromkeys(("out", "gate", "up", "dout", "dgate", "dup"), rows),
            },
            outputs=(rows, rows, rows), split="*rows m" if up_weight is not None else "*rows",
        )  # fmt: skip

    def unsupported(self, inv: Invocation, backend: str) -> str | None:
        """What a back end cannot honour."""
        if backend == "triton" and inv.arguments["up_weight"] is None:
            return "the Triton kernel takes two weights, gate_weight and up_weight"
        return super().unsupported(inv, backend)


class GatedLinearBackward(GatedTriton, RowKernel):
    """Gradients of a gated linear map."""

    name = "gated_linear_bwd"
    config_cls = GatedLinearConfig
    direction = "bwd"
    with_rows = ("x", "out", "gate", "up", "dout", "dgate", "dup")
    fields = {
        "xla": ("bwd.blocksize_m", "recompute"),
        "triton": (*(f"bwd.{n}" for n in activation_launch.BACKWARD_FIELDS), "recompute"),
    }
    lazy_cotangents = True

    def config(self, rows: int) -> GatedLinearConfig:
        """The config of a number of rows, with what the forward has saved."""
        return dataclasses.replace(super().config(rows), recompute=False)

    def candidate_cfgs(self, inv: Invocation) -> list[GatedLinearConfig]:
        """Chunks of rows, with what the forward has saved and without."""
        saved = super().candidate_cfgs(inv)
        return [*saved, *(dataclasses.replace(cfg, recompute=True) for cfg in saved)]

    def triton_cfgs(self, inv: Invocation) -> list[GatedLinearConfig]:
        """Tiles, and rows of a program, with what the forward has saved."""
        params = activation_launch.backward_params(inv)
        return [GatedLinearConfig(backend="triton", bwd=bwd, recompute=False) for bwd in params]

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Random operands and cotangents, and the products that belong to the operands."""
        made = {n: None if x is None else random_array(rng, x) for n, x in inv.arguments.items() if n not in inv.kwargs}
        operands = [made[n] for n in ("x", "gate_weight", "up_weight", "gate_bias", "up_bias")]
        statics = {n: inv.kwargs[n] for n in ("weight_layout", "precision")}
        products = jax.jit(lambda *x: _products(*x, **statics))(*operands)
        made |= {n: x.astype(inv.arguments[n].dtype) for n, x in zip(("gate", "up"), products)}
        return [x for x in made.values() if x is not None]

    def illegal(self, inv: Invocation, cfg: GatedLinearConfig) -> str | None:
        """A missing field."""
        return "recompute is missing" if cfg.recompute is None else super().illegal(inv, cfg)

    def run_xla(
        self, x, gate_weight, up_weight, gate_bias, up_bias, out, gate, up, dout, dgate, dup, *,
        cfg, needs, activation, weight_layout, precision,
    ):  # fmt: skip
        """Chunks of rows: both derivatives and the products while a chunk is in the caches."""
        need_x, need_gate, need_up, *need_biases = (bool(n) for n in needs)
        dtype, fused = accumulated(x, gate_weight), up_weight is None
        dw_type = product_type(gate_weight.dtype, x, gate_weight) if self.chunk(cfg) >= num_rows(x) else dtype
        weights = (gate_weight,) if fused else (gate_weight, up_weight)
        biases = [bias is not None and need for bias, need in zip((gate_bias, up_bias), need_biases)]

        def gradients(x, gate, up, dout, dgate, dup):
            if cfg.recompute:
                gate, up = _products(x, gate_weight, up_weight, gate_bias, up_bias, weight_layout, precision)
            gate, up = gate.astype(dtype), up.astype(dtype)
            dout = jnp.zeros(gate.shape, dtype) if dout is None else dout.astype(dtype)
            by_gate, by_up = dout * up * derivative(activation, gate), dout * ACTIVATIONS[activation](gate)
            grads = [g if more is None else g + more.astype(dtype) for g, more in ((by_gate, dgate), (by_up, dup))]
            sums = [g.sum(0) if wanted else None for g, wanted in zip(grads, biases)]
            lows = [jnp.concatenate(grads, -1).astype(x.dtype)] if fused else [g.astype(x.dtype) for g in grads]
            dx, other = None, transposed(weight_layout)
            if need_x:
                dx_type = product_type(x.dtype, x, gate_weight)
                dx = sum(product(low, w, other, dx_type, precision).astype(dtype) for low, w in zip(lows, weights))
            wanted = (need_gate,) if fused else (need_gate, need_up)
            dws = [
                weight_gradient(x, low, weight_layout, dw_type, precision) if need else None
                for low, need in zip(lows, wanted)
            ]
            return dx, (dws, sums)

        if cfg.recompute:  # after the cotangents are there, and not as the forward's products, which XLA would hold
            gate = up = None
            x = held_back(x, (dout, dgate, dup))
        flat = [None if a is None else flat_rows(a) for a in (x, gate, up, dout, dgate, dup)]
        dx, (dws, sums) = over_rows(gradients, flat, self.chunk(cfg))
        return None if dx is None else dx.reshape(x.shape), *dws, *([None] if fused else []), *sums

    def run_triton(
        self, x, gate_weight, up_weight, gate_bias, up_bias, out, gate, up, dout, dgate, dup, *,
        cfg, needs, activation, weight_layout, precision,
    ):  # fmt: skip
        """Both derivatives and the gradients of the biases in one kernel, the products on XLA."""
        need_x, need_gate, need_up, *need_biases = (bool(n) for n in needs)
        if cfg.recompute:
            later = held_back(x, dout)
            gate, up = _products(later, gate_weight, up_weight, gate_bias, up_bias, weight_layout, precision)
        want_bias, want_up_bias = (b is not None and n for b, n in zip((gate_bias, up_bias), need_biases))
        made = activation_launch.backward(
            Products(product=gate, up=up), dout, cfg.bwd, activation, x.dtype,
            want_bias=want_bias, want_up_bias=want_up_bias,
        )  # fmt: skip
        dx_type, dw_type = (product_type(a.dtype, x, gate_weight) for a in (x, gate_weight))
        dx, other, rows = None, transposed(weight_layout), flat_rows(x)
        if need_x:
            wide = accumulated(x, gate_weight)
            pairs = ((made.product, gate_weight), (made.up, up_weight))
            first, second = (product(low, w, other, dx_type, precision).astype(wide) for low, w in pairs)
            dx = (first + second).astype(x.dtype)
        dws = [
            weight_gradient(rows, flat_rows(low), weight_layout, dw_type, precision) if need else None
            for low, need in ((made.product, need_gate), (made.up, need_up))
        ]
        return dx, *dws, made.bias, made.up_bias


class GatedLinearForward(GatedTriton, RowKernel):
    """`activation(x @ gate_weight + gate_bias) * (x @ up_weight + up_bias)`, and both products for the backward."""

    name = "gated_linear"
    config_cls = GatedLinearConfig
    rows, out_rows = (True, False, False, False, False), (True, True, True)
    backward = GatedLinearBackward()
    fields = {"xla": ("fwd.blocksize_m",), "triton": tuple(f"fwd.{n}" for n in activation_launch.FORWARD_FIELDS)}

    def triton_cfgs(self, inv: Invocation) -> list[GatedLinearConfig]:
        """Tiles."""
        return [GatedLinearConfig(backend="triton", fwd=fwd) for fwd in activation_launch.forward_params(inv)]

    def narrow(self, cfg: GatedLinearConfig) -> GatedLinearConfig:
        """The forward part of an op's config."""
        return dataclasses.replace(cfg, bwd=None, recompute=None)

    def out_like(self, x, gate_weight, up_weight, gate_bias, up_bias, *, activation, weight_layout, precision):
        """Types of the output and of the two products."""
        gate = product(x, gate_weight, weight_layout, None, None).astype(x.dtype)
        out = jnp.split(gate, 2, -1)[0] if up_weight is None else gate
        return out, out, out

    def run_xla(
        self, x, gate_weight, up_weight, gate_bias, up_bias, *, cfg, activation, weight_layout, precision
    ) -> Any:  # fmt: skip
        """Chunks of rows: products, biases and activation while a chunk is in the caches."""

        def chunk(x):
            gate, up = _products(x, gate_weight, up_weight, gate_bias, up_bias, weight_layout, precision)
            out = ACTIVATIONS[activation](gate) * up
            return tuple(a.astype(x.dtype) for a in (out, gate, up))

        return by_rows(chunk, [x], self.chunk(cfg))

    def run_triton(
        self, x, gate_weight, up_weight, gate_bias, up_bias, *, cfg, activation, weight_layout, precision
    ) -> Any:  # fmt: skip
        """The products on XLA, activation and gate in one kernel."""
        gate, up = _products(x, gate_weight, up_weight, gate_bias, up_bias, weight_layout, precision)
        if gate_bias is None and up_bias is None:  # which XLA need not widen for a kernel that does
            gate, up = gate.astype(x.dtype), up.astype(x.dtype)
        out = activation_launch.forward(Products(product=gate, up=up), cfg.fwd, activation, x.dtype)
        return out, gate.astype(x.dtype), up.astype(x.dtype)


GATED_LINEAR = GatedLinearForward()
GATED_LINEAR_BWD = GatedLinearForward.backward
