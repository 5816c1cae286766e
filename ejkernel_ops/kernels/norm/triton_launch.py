"""Norms on Triton: which calls its kernels take, their tiles, and their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core.invocation import Invocation
from ...params import BwdParams, FwdParams
from ...triton_call import triton_call, unavailable
from ..on_triton import MOST_ROWS, given, params_of, power_of_two, too_many, unfit_arrays, unfit_device
from ..rows import num_rows

_ARRAYS = ("x", "residual", "summed", "scale", "bias", "dnormed", "dsummed")
_MOST_FEATURES = 8192
FORWARD_FIELDS = ("blocksize_m", "num_warps")
BACKWARD_FIELDS = (*FORWARD_FIELDS, "blocksize_k")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """What a kernel is compiled for: sizes, a tile of `block_m` rows, `span` rows of a program, and what there is."""

    rows: int
    features: int
    block_m: int
    block_f: int
    centred: bool
    span: int = 0
    epsilon: float = 0.0
    has_residual: bool = False
    has_scale: bool = False
    has_bias: bool = False
    has_dsummed: bool = False
    want_rows: bool = False
    want_scale: bool = False
    want_bias: bool = False


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot do a call, either direction; `None` where it can."""
    features = inv.arguments["x"].shape[-1]
    if features > _MOST_FEATURES:
        return f"the Triton kernels hold a row of at most {_MOST_FEATURES} features, these are {features}"
    if num_rows(inv.arguments["x"]) > MOST_ROWS:
        return "there are more than 2**30 rows"
    if any(inv.arguments.get(name) is not None for name in ("dmean", "drstd")):
        return "the Triton kernels take no cotangents of the statistics"
    return unfit_device(inv) or unfit_arrays(inv, _ARRAYS) or unavailable()


def _tiles(inv: Invocation) -> list[tuple[int, int]]:
    """Rows of a tile and warps, the best first: so that a thread holds 16 numbers of each array, or about so many."""
    features = power_of_two(inv.arguments["x"].shape[-1])
    rows = power_of_two(num_rows(inv.arguments["x"]))
    found = []
    for numbers in (16, 32, 8):
        for warps in (4, 8, 16, 2):
            block_m = numbers * 32 * warps // features
            if 1 <= block_m <= 16:
                found.append((min(block_m, rows), warps))
    return list(dict.fromkeys(found)) or [(min(16, rows), 1) if features < 64 else (1, 16)]


def forward_params(inv: Invocation) -> list[FwdParams]:
    """Tiles of the forward kernel, the best first."""
    return [FwdParams(blocksize_m=m, num_warps=warps) for m, warps in _tiles(inv)[:5]]


def backward_params(inv: Invocation) -> list[BwdParams]:
    """Tiles of the backward kernel, the best first, and rows of a program."""
    rows = num_rows(inv.arguments["x"])
    spans = dict.fromkeys(max(8, power_of_two(-(-rows // programs))) for programs in (528, 1056, 264))
    tiles = _tiles(inv)[:4]
    pairs = [(m, w, span) for span in spans for m, w in tiles]
    return [BwdParams(blocksize_m=m, num_warps=w, blocksize_k=max(m, span)) for m, w, span in pairs]


def illegal(inv: Invocation, cfg: Any) -> str | None:
    """Why the kernel of a call's direction cannot run with a config; `None` where it can."""
    backward = "dnormed" in inv.arguments
    params, fault = params_of(cfg, BACKWARD_FIELDS if backward else FORWARD_FIELDS, backward=backward)
    if fault:
        return fault
    features = power_of_two(inv.arguments["x"].shape[-1])
    return too_many(features * params.blocksize_m // (32 * params.num_warps))


def forward(x, scale, bias, residual, *, params: Any, centred: bool, epsilon: float) -> tuple:
    """Norm, sum, mean and reciprocal standard deviation, as `run_xla` returns them."""
    from .triton_rows import norm_forward

    out = jax.ShapeDtypeStruct(x.shape, x.dtype if residual is None else jnp.result_type(x, residual))
    statistic, none = jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)
    spec = NormSpec(
        rows=num_rows(x), features=x.shape[-1], block_m=params.blocksize_m, block_f=power_of_two(x.shape[-1]),
        centred=centred, epsilon=epsilon, has_residual=residual is not None, has_scale=scale is not None,
        has_bias=bias is not None,
    )  # fmt: skip
    normed, summed, mean, rstd = triton_call(
        norm_forward, x, *given(x, residual, scale, bias),
        out_types=[out, none if residual is None else out, statistic if centred else none, statistic],
        grid=(-(-spec.rows // spec.block_m),), num_warps=params.num_warps, num_stages=1, name="norm_forward", spec=spec,
    )  # fmt: skip
    return normed, None if residual is None else summed, mean if centred else None, rstd


def backward(total, scale, mean, rstd, dnormed, dsummed, *, params: Any, centred: bool, needs: tuple) -> tuple:
    """Gradients of the normed numbers, of scale and of bias, each `None` where `needs` is false."""
    from .triton_rows import norm_backward

    need_rows, need_scale, need_bias = needs
    dnormed = jnp.zeros_like(total) if dnormed is None else dnormed  # of the sum alone
    spec = NormSpec(
        rows=num_rows(total), features=total.shape[-1], block_m=params.blocksize_m,
        block_f=power_of_two(total.shape[-1]), span=params.blocksize_k, centred=centred, has_scale=scale is not None,
        has_dsummed=dsummed is not None, want_rows=need_rows, want_scale=need_scale, want_bias=need_bias,
    )  # fmt: skip
    programs = -(-spec.rows // spec.span)
    none, part = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1,), (programs, spec.features)))
    dtotal, dscale, dbias = triton_call(
        norm_backward, total, *given(total, scale, mean), rstd, dnormed, *given(total, dsummed),
        out_types=[
            jax.ShapeDtypeStruct(total.shape, total.dtype) if need_rows else none,
            part if need_scale else none, part if need_bias else none,
        ],
        grid=(programs,), num_warps=params.num_warps, num_stages=1, name="norm_backward", spec=spec,
    )  # fmt: skip
    return dtotal if need_rows else None, dscale.sum(0) if need_scale else None, dbias.sum(0) if need_bias else None
