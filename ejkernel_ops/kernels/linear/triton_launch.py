"""A linear map's activation on Triton: which calls its kernels take, their tiles, and their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core.invocation import Invocation
from ...params import BwdParams, FwdParams
from ...triton_call import triton_call, unavailable
from ..on_triton import (
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
from ..rows import accumulated, num_rows

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
    has_bias: bool
    want_bias: bool = False


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot do a call, either direction; `None` where it can."""
    x, weight = inv.arguments["x"], inv.arguments["weight"]
    if inv.arguments["activation"] is None:
        return "without an activation a linear map is products, which are XLA's"
    if accumulated(x, weight) != jnp.float32:
        return f"Triton takes bfloat16, float16 and float32, these sums are {accumulated(x, weight)}"
    if num_rows(x) > MOST_ROWS:
        return "there are more than 2**30 rows"
    if (out_dtype := inv.arguments["out_dtype"]) is not None and out_dtype not in FLOATS:
        return f"Triton makes bfloat16, float16 and float32, preferred_element_type is {jnp.dtype(out_dtype)}"
    if inv.arguments.get("dpreact") is not None or ("dout" in inv.arguments and inv.arguments["dout"] is None):
        return "the Triton kernel takes the cotangent of the output alone"
    return unfit_device(inv) or unfit_arrays(inv, ("x", "weight", "bias", "dout", "out")) or unavailable()


def _features(inv: Invocation) -> int:
    """The features of a call's output."""
    return inv.arguments["weight"].shape[1 if inv.arguments["weight_layout"] == "io" else 0]


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


def _spec(product: jax.Array, bias: Any, params: Any, span: int, activation: str, **more: Any) -> ActivationSpec:
    return ActivationSpec(
        rows=num_rows(product), features=product.shape[-1], block_m=params.blocksize_m, block_n=params.blocksize_n,
        span=span, activation=activation, has_bias=bias is not None, **more,
    )  # fmt: skip


def _programs(spec: ActivationSpec) -> tuple[int]:
    return (-(-spec.features // spec.block_n) * -(-spec.rows // spec.span),)


def forward(product: jax.Array, bias: Any, params: Any, activation: Any, dtype: Any) -> jax.Array:
    """The activation of `product + bias`."""
    from .triton_tiles import activation_forward

    spec = _spec(product, bias, params, params.blocksize_m, activation)
    [out] = triton_call(
        activation_forward, product, *given(product, bias), out_types=[jax.ShapeDtypeStruct(product.shape, dtype)],
        grid=_programs(spec), num_warps=params.num_warps, num_stages=1, name="activation_forward", spec=spec,
    )  # fmt: skip
    return out


def backward(
    product: jax.Array, bias: Any, dout: jax.Array, params: Any, activation: str, dtype: Any, want_bias: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of `product`, and that of the bias where it is wanted."""
    from .triton_tiles import activation_backward

    spec = _spec(product, bias, params, params.blocksize_k, activation, want_bias=want_bias)
    part = (-(-spec.rows // spec.span), spec.features) if want_bias else (1,)
    grad, dbias = triton_call(
        activation_backward, product, *given(product, bias), dout,
        out_types=[jax.ShapeDtypeStruct(product.shape, dtype), jax.ShapeDtypeStruct(part, jnp.float32)],
        grid=_programs(spec), num_warps=params.num_warps, num_stages=1, name="activation_backward", spec=spec,
    )  # fmt: skip
    return grad, dbias.sum(0) if want_bias else None
