"""Activations of linear maps, gated or not, on Triton: which calls the kernels take, their tiles, their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..core.invocation import Invocation
from ..params import BwdParams, FwdParams
from ..triton_call import triton_call, unavailable
from .on_triton import (
    FLOATS,
    MOST_ROWS,
    given,
    params_of,
    power_of_two,
    too_long,
    too_many,
    unfit_arrays,
    unfit_device,
)
from .rows import accumulated, num_rows

FORWARD_FIELDS = ("blocksize_m", "blocksize_n", "num_warps")
BACKWARD_FIELDS = (*FORWARD_FIELDS, "blocksize_k")
_TILES = ((8, 256, 4), (4, 512, 4), (16, 128, 4), (8, 512, 8), (16, 256, 8))  # rows, columns, warps, the best first
_SPANS = (128, 64, 256)  # rows of a program of the backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """What a kernel is compiled for: sizes, a tile, `span` rows of a program, the activation, and what there is."""

    rows: int
    features: int
    block_m: int
    block_n: int
    span: int
    activation: str
    gated: bool
    has_bias: bool
    has_up_bias: bool
    want_bias: bool = False
    want_up_bias: bool = False
    want_out: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
    """What an activation is applied to, `(..., features)`, and a gated map multiplies that by, with their biases."""

    product: jax.Array
    bias: jax.Array | None = None
    up: jax.Array | None = None
    up_bias: jax.Array | None = None

    def wide(self, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
        """Both in a type, with their biases."""

        def made(x: Any, bias: Any) -> Any:
            return x if x is None else x.astype(dtype) if bias is None else x.astype(dtype) + bias.astype(dtype)

        return made(self.product, self.bias), made(self.up, self.up_bias)

    @property
    def operands(self) -> list[jax.Array]:
        """Those of a kernel."""
        return [self.product, *given(self.product, self.bias, self.up, self.up_bias)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the backward makes: gradients of products and biases, and what the forward has made, where wanted."""

    product: jax.Array
    up: Any
    out: Any
    bias: Any
    up_bias: Any

    def plus(self, product: Any, up: Any) -> Gradients:
        """With cotangents more of the products alone, where there are any."""
        first = self.product if product is None else self.product + product.astype(self.product.dtype)
        second = self.up if up is None or self.up is None else self.up + up.astype(self.up.dtype)
        return dataclasses.replace(self, product=first, up=second)


_WEIGHTS = ("weight", "gate_weight", "up_weight")  # of what is activated: the first that there is
_SAVED = ("dpreact", "dgate", "dup")  # cotangents of what a forward has saved, which a second derivative has
_ARRAYS = ("x", *_WEIGHTS, "down_weight", "bias", "gate_bias", "up_bias", "down_bias", "dout", "out")


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot do a call, either direction; `None` where it can."""
    x, weight = inv.arguments["x"], _weight(inv)
    if inv.arguments["activation"] is None:
        return "without an activation a linear map is products, which are XLA's"
    if accumulated(x, weight) != jnp.float32:
        return f"Triton takes bfloat16, float16 and float32, these sums are {accumulated(x, weight)}"
    if num_rows(x) > MOST_ROWS:
        return "there are more than 2**30 rows"
    if (out_dtype := inv.arguments.get("out_dtype")) is not None and out_dtype not in FLOATS:
        return f"Triton makes bfloat16, float16 and float32, preferred_element_type is {jnp.dtype(out_dtype)}"
    saved = any(inv.arguments.get(name) is not None for name in _SAVED)
    if saved or ("dout" in inv.arguments and inv.arguments["dout"] is None):
        return "the Triton kernel takes the cotangent of the output alone"
    return unfit_device(inv) or unfit_arrays(inv, _ARRAYS) or unavailable()


def _weight(inv: Invocation) -> Any:
    """The weight of what is activated."""
    return next(w for name in _WEIGHTS if (w := inv.arguments.get(name)) is not None)


def _features(inv: Invocation) -> int:
    """The features that are activated."""
    return _weight(inv).shape[1 if inv.arguments["weight_layout"] == "io" else 0]


def _tiles(inv: Invocation) -> list[tuple[int, int, int]]:
    rows, features = power_of_two(num_rows(inv.arguments["x"])), power_of_two(_features(inv))
    return list(dict.fromkeys((min(m, rows), min(n, features), warps) for m, n, warps in _TILES))


def forward_params(inv: Invocation) -> list[FwdParams]:
    """Tiles of the forward kernel, the best first."""
    return [FwdParams(blocksize_m=m, blocksize_n=n, num_warps=w) for m, n, w in _tiles(inv)]


def backward_params(inv: Invocation) -> list[BwdParams]:
    """Tiles of the backward kernel and rows of a program, the best first."""
    tiles = _tiles(inv)
    pairs = [(tile, _SPANS[0]) for tile in tiles] + [(tiles[0], span) for span in _SPANS[1:]]
    return [BwdParams(blocksize_m=m, blocksize_n=n, num_warps=w, blocksize_k=max(m, span)) for (m, n, w), span in pairs]


def illegal(inv: Invocation, cfg: Any) -> str | None:
    """Why the kernel of a call's direction cannot run with a config; `None` where it can."""
    backward = "dout" in inv.arguments
    params, fault = params_of(cfg, BACKWARD_FIELDS if backward else FORWARD_FIELDS, backward=backward)
    if fault:
        return fault
    span = params.blocksize_k if backward else params.blocksize_m
    programs = -(-num_rows(inv.arguments["x"]) // span) * -(-_features(inv) // params.blocksize_n)
    return too_long(programs) or too_many(params.blocksize_m * params.blocksize_n // (32 * params.num_warps))


def _spec(products: Products, params: Any, span: int, activation: str, **wanted: bool) -> ActivationSpec:
    like = products.product
    return ActivationSpec(
        rows=num_rows(like), features=like.shape[-1], block_m=params.blocksize_m, block_n=params.blocksize_n,
        span=span, activation=activation, gated=products.up is not None, has_bias=products.bias is not None,
        has_up_bias=products.up_bias is not None, **wanted,
    )  # fmt: skip


def _programs(spec: ActivationSpec) -> tuple[int]:
    return (-(-spec.features // spec.block_n) * -(-spec.rows // spec.span),)


def forward(products: Products, params: Any, activation: Any, dtype: Any) -> jax.Array:
    """The activation of the product, times the other one of a gated map."""
    from .activation_tiles import activation_forward

    spec = _spec(products, params, params.blocksize_m, activation)
    [out] = triton_call(
        activation_forward, *products.operands, out_types=[jax.ShapeDtypeStruct(products.product.shape, dtype)],
        grid=_programs(spec), num_warps=params.num_warps, num_stages=1, name="activation_forward", spec=spec,
    )  # fmt: skip
    return out


def backward(
    products: Products, dout: jax.Array, params: Any, activation: str, dtype: Any, *,
    want_bias: bool = False, want_up_bias: bool = False, want_out: bool = False,
) -> Gradients:  # fmt: skip
    """The gradients of the products, those of their biases, and the forward's output, where they are wanted."""
    from .activation_tiles import activation_backward

    spec = _spec(
        products, params, params.blocksize_k, activation, want_bias=want_bias, want_up_bias=want_up_bias,
        want_out=want_out,
    )  # fmt: skip
    whole, part = products.product.shape, (-(-spec.rows // spec.span), spec.features)

    def made(shape: tuple[int, ...], wanted: bool, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape if wanted else (1,), dtype)

    wide = jnp.float32
    grad, dup, out, dbias, dup_bias = triton_call(
        activation_backward, *products.operands, dout,
        out_types=[
            made(whole, True, dtype), made(whole, spec.gated, dtype), made(whole, want_out, dtype),
            made(part, want_bias, wide), made(part, want_up_bias, wide),
        ],
        grid=_programs(spec), num_warps=params.num_warps, num_stages=1, name="activation_backward", spec=spec,
    )  # fmt: skip
    return Gradients(
        product=grad, up=dup if spec.gated else None, out=out if want_out else None,
        bias=dbias.sum(0) if want_bias else None, up_bias=dup_bias.sum(0) if want_up_bias else None,
    )  # fmt: skip
