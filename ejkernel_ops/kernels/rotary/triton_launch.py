"""Rotary embedding on Triton: which calls its kernel takes, its tiles, and its launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ...core.invocation import Invocation
from ...params import BwdParams, FwdParams
from ...triton_call import triton_call, unavailable
from ..on_triton import MOST_ROWS, missing, power_of_two, too_many, unfit_arrays, unfit_device

P = TypeVar("P", FwdParams, BwdParams)
FIELDS = ("blocksize_m", "num_warps")
_TILES = ((16, 4), (32, 4), (32, 8), (64, 8), (8, 2))  # heads of a program and warps, the best first


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnSpec:
    """What the kernel is compiled for: `rows` heads of all tokens, of which `tokens` have a place in the table."""

    rows: int
    heads: int
    head_dim: int
    tokens: int
    pairs: int
    block_m: int
    block_pairs: int
    block_rest: int
    step: int  # from a pair to the next
    gap: int  # between the two features of a pair
    back: bool


def _rows(x: Any) -> int:
    """Heads of all tokens."""
    return math.prod(x.shape[:3])


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot do a call, either direction; `None` where it can."""
    x = inv.arguments["x"]
    if _rows(x) > MOST_ROWS or inv.arguments["positions"].size * x.shape[-1] > MOST_ROWS:
        return "there are more than 2**30 heads of tokens, or angles"
    return unfit_device(inv) or unfit_arrays(inv, ("x", "dout")) or unavailable()


def params(kind: type[P], inv: Invocation) -> list[P]:
    """Tiles, the best first."""
    rows = power_of_two(_rows(inv.arguments["x"]))
    tiles = dict.fromkeys((min(m, rows), warps) for m, warps in _TILES)
    return [kind(blocksize_m=m, num_warps=w) for m, w in tiles]


def illegal(inv: Invocation, cfg: Any) -> str | None:
    """Why the kernel cannot run with a config; `None` where it can."""
    params, direction = (cfg.bwd, "bwd") if "dout" in inv.arguments else (cfg.fwd, "fwd")
    if fault := missing(params, FIELDS, direction):
        return fault
    return too_many(params.blocksize_m * power_of_two(inv.arguments["features"] // 2) // (32 * params.num_warps))


def turned(x: jax.Array, table: jax.Array, params: Any, *, interleaved: bool, back: bool) -> jax.Array:
    """Heads `(batch, length, heads, head_dim)`, turned by a table of cosines and sines `(2, tokens, pairs)`."""
    from .triton_turn import turn

    (_, tokens, pairs), head_dim = table.shape, x.shape[-1]
    spec = TurnSpec(
        rows=_rows(x), heads=x.shape[2], head_dim=head_dim, tokens=tokens, pairs=pairs, block_m=params.blocksize_m,
        block_pairs=power_of_two(pairs), block_rest=power_of_two(head_dim - 2 * pairs),
        step=2 if interleaved else 1, gap=1 if interleaved else pairs, back=back,
    )  # fmt: skip
    [out] = triton_call(
        turn, x, table.astype(jnp.float32), out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(-(-spec.rows // spec.block_m),), num_warps=params.num_warps, num_stages=1, name="rotary_turn", spec=spec,
    )  # fmt: skip
    return out
