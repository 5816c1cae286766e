"""Tiles of the Triton kernels of attention: which are legal, which are worth trying, which one to start from.

The lists are what won or came near it on an H200, the fastest first; closed formulas for shared memory and registers
drop those that a call's options and types leave no room for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ...core.invocation import Invocation
from ...params import BwdParams, FwdParams
from ...utils.fingerprint import platform_kind
from .config import AttentionConfig
from .triton_seen import MOST_ROWS
from .triton_spec import dot_precision, width

_HOPPER_SHARED = 232448
_MOST_REGISTERS, _ALL_REGISTERS = 208, 1 << 16  # of a thread, for sums and scores; of all threads of a program
_MOST_CANDIDATES = 24


FORWARD_FIELDS = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
BACKWARD_FIELDS = (*FORWARD_FIELDS, "blocksize_m", "blocksize_n", "num_warps_mn", "num_stages_mn")


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of one kernel and its launch: rows of queries and of keys, warps, and loop iterations in flight."""

    q: int
    kv: int
    warps: int
    stages: int


def _tiles(*rows: tuple[int, int, int, int]) -> tuple[Tile, ...]:
    return tuple(Tile(*row) for row in rows)


# By the width of a head's tile, the best first.
_FORWARD = {
    64: _tiles(
        (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 128, 4, 3),
        (64, 32, 4, 4), (128, 128, 8, 3),
    ),
    128: _tiles(
        (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 4), (64, 32, 4, 3), (64, 64, 4, 2),
        (128, 128, 8, 2), (64, 32, 4, 2),
    ),
    256: _tiles(
        (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (64, 16, 4, 3),
        (64, 16, 4, 2),
    ),
}  # fmt: skip
_KEYS = {
    64: _tiles(
        (128, 64, 4, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (32, 64, 4, 3),
        (128, 128, 8, 2),
        (32, 128, 4, 3),
        (32, 64, 4, 2),
    ),
    128: _tiles((64, 64, 4, 2), (64, 128, 8, 3), (64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2)),
    256: _tiles((64, 64, 8, 2), (32, 128, 8, 2), (32, 64, 8, 3), (32, 64, 8, 2)),
}
_QUERIES = {
    64: _tiles((64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 2)),
    128: _tiles((128, 64, 8, 3), (64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2)),
    256: _tiles((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 2)),
}
_BIAS = _tiles((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))
# Products in float32 proper are sums of a thread's own, which holds its part of both operands.
_EXACT = _tiles((32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2))


def forward_tile(params: FwdParams) -> Tile:
    """The tile of a forward config."""
    return Tile(params.q_blocksize, params.kv_blocksize, params.num_warps, params.num_stages)  # type: ignore[arg-type]


def keys_tile(params: BwdParams) -> Tile:
    """The tile of the kernel of key and value gradients in a backward config."""
    return Tile(params.q_blocksize, params.kv_blocksize, params.num_warps, params.num_stages)  # type: ignore[arg-type]


def queries_tile(params: BwdParams) -> Tile:
    """The tile of the kernel of query gradients in a backward config."""
    return Tile(params.blocksize_m, params.blocksize_n, params.num_warps_mn, params.num_stages_mn)  # type: ignore[arg-type]


def forward_config(tile: Tile) -> AttentionConfig:
    """A config of the Triton forward kernel."""
    fwd = FwdParams(q_blocksize=tile.q, kv_blocksize=tile.kv, num_warps=tile.warps, num_stages=tile.stages)
    return AttentionConfig(backend="triton", fwd=fwd)


def backward_config(keys: Tile, queries: Tile) -> AttentionConfig:
    """A config of the Triton backward kernels."""
    bwd = BwdParams(
        q_blocksize=keys.q, kv_blocksize=keys.kv, num_warps=keys.warps, num_stages=keys.stages,
        blocksize_m=queries.q, blocksize_n=queries.kv, num_warps_mn=queries.warps, num_stages_mn=queries.stages,
    )  # fmt: skip
    return AttentionConfig(backend="triton", bwd=bwd)


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes of shared memory, and registers of a thread for sums and scores."""

    shared: int
    registers: float


@dataclasses.dataclass(frozen=True)
class Room:
    """What a call leaves room for: the sizes that decide about shared memory and registers of a tile."""

    d: int
    e: int
    itemsize: int
    bias: int
    mask: int
    dropout: int
    exact: bool
    shared: int

    @classmethod
    def of(cls, inv: Invocation) -> Room:
        """The room of a call."""
        query, value, bias, mask = (inv.arguments[name] for name in ("query", "value", "bias", "mask"))
        statics = inv.kwargs
        return cls.of_operands(
            query, value, bias, mask, statics["dropout_rate"], statics["precision"], inv.platform
        )  # fmt: skip

    @classmethod
    def of_operands(
        cls, query: Any, value: Any, bias: Any, mask: Any, dropout_rate: float, precision: Any, platform: str | None
    ) -> Room:
        """The room of a call with these operands."""
        itemsize = np.dtype(query.dtype).itemsize
        dense = [x is not None and x.shape[2] > 1 and x.shape[3] > 1 for x in (bias, mask)]
        return cls(
            d=width(query.shape[3]),
            e=width(value.shape[3]),
            itemsize=itemsize,
            bias=np.dtype(bias.dtype).itemsize if dense[0] else 0,
            mask=1 if dense[1] else 0,
            dropout=1 if dropout_rate else 0,
            exact=itemsize == 4 and dot_precision(precision) == "ieee",
            shared=shared_memory(platform),
        )

    @property
    def is_wide(self) -> bool:
        """Whether a head is wider than what registers have ample room for."""
        return max(self.d, self.e) > 128

    def forward(self, tile: Tile) -> Needs:
        """What a tile of the forward kernel needs."""
        shared = self.itemsize * (tile.q * self.d + tile.stages * tile.kv * (self.d + self.e))
        registers = (tile.q * self.e + 1.5 * tile.q * tile.kv) / (32 * tile.warps)
        return Needs(shared + self._scores(tile), registers)

    def keys(self, tile: Tile) -> Needs:
        """What a tile of the kernel of key and value gradients needs."""
        loop = tile.stages * tile.q * (self.d + self.e)
        shared = self.itemsize * (tile.kv * (self.d + self.e) + loop) + 8 * (tile.stages - 1) * tile.q
        sums = max(self.d, self.e) if self.is_wide else self.d + self.e  # of wide heads one gradient at a time
        registers = (tile.kv * sums + 2 * tile.kv * tile.q) / (32 * tile.warps)
        return Needs(shared + self._scores(tile), registers)

    def queries(self, tile: Tile) -> Needs:
        """What a tile of the kernel of query gradients needs."""
        shared = self.itemsize * (tile.q + tile.stages * tile.kv) * (self.d + self.e)
        registers = (tile.q * self.d + 2 * tile.q * tile.kv) / (32 * tile.warps)
        return Needs(shared + self._scores(tile), registers)

    def bias_gradient(self, tile: Tile) -> Needs:
        """What a tile of the kernel of a bias's gradient needs: all of its operands are under way."""
        shared = self.itemsize * tile.stages * (tile.q + tile.kv) * (self.d + self.e)
        return Needs(shared + self._scores(tile), 3 * tile.q * tile.kv / (32 * tile.warps))

    def _scores(self, tile: Tile) -> int:
        """Shared memory of a bias's tiles and a mask's bits that are under way, and of dropout's bits."""
        return int(((self.bias + self.mask / 8) * (tile.stages - 1) + self.dropout) * tile.q * tile.kv)

    def fault(self, tile: Tile, needs: Callable[[Tile], Needs]) -> str | None:
        """Why a tile has no room, by one of the three formulas; `None` where it has."""
        if fault := _malformed(tile):
            return fault
        found = needs(tile)
        if found.shared > self.shared:
            return f"{tile} needs {found.shared} bytes of shared memory, this device has {self.shared}"
        most = min(_MOST_REGISTERS, _ALL_REGISTERS // (32 * tile.warps))
        if found.registers > most:
            return (
                f"{tile} needs {found.registers:.0f} registers of a thread for sums and scores, and has {most}: take "
                "fewer rows, or with few warps more of them"
            )
        return None


def _malformed(tile: Tile) -> str | None:
    for name, value in (("q", tile.q), ("kv", tile.kv), ("warps", tile.warps)):
        if value & (value - 1):
            return f"{name} of {tile} is {value}; Triton takes powers of two"
    if min(tile.q, tile.kv) < 16 or max(tile.q, tile.kv) > MOST_ROWS:
        return f"{tile} has a side outside of 16 to {MOST_ROWS} rows"
    return None


@functools.cache
def shared_memory(platform: str | None) -> int:
    """Bytes of shared memory that a program may use on the device that a call is for; an H100's where none is seen."""
    if platform_kind(platform) != "gpu":
        return _HOPPER_SHARED
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return _HOPPER_SHARED
    return int(getattr(device, "shared_memory_per_block_optin", _HOPPER_SHARED))


def _fitting(table: dict[int, tuple[Tile, ...]], room: Room, needs: Any, q_len: int, kv_len: int) -> list[Tile]:
    """The tiles of a table that a call has room for, cut to its lengths, the best first; one at least."""
    of_width = _EXACT if room.exact else table[min(256, max(64, room.d, room.e))]
    cut = [dataclasses.replace(t, q=_cut(t.q, q_len), kv=_cut(t.kv, kv_len)) for t in of_width]
    # No room for any of them, in float32 say: fewer rows, until there is.
    smaller = [Tile(q, kv, 4, stages) for q, kv in ((64, 32), (32, 32), (32, 16), (16, 16)) for stages in (2, 1)]
    smaller = [dataclasses.replace(t, q=_cut(t.q, q_len), kv=_cut(t.kv, kv_len)) for t in smaller]
    good = list(dict.fromkeys(t for t in cut if room.fault(t, needs) is None))
    return good or [t for t in smaller if room.fault(t, needs) is None][:2] or smaller[-1:]


def _cut(rows: int, length: int) -> int:
    """Rows of a tile, no more than the power of two that holds a length."""
    return min(rows, width(length))


def forward_tiles(inv: Invocation) -> list[Tile]:
    """Tiles of the forward kernel for a call, the best first."""
    room = Room.of(inv)
    return _fitting(_FORWARD, room, room.forward, *_lengths(inv))


def backward_tiles(inv: Invocation) -> list[tuple[Tile, Tile]]:
    """Pairs of tiles of the two backward kernels, those of the best first; their times add up."""
    room = Room.of(inv)
    keys = _fitting(_KEYS, room, room.keys, *_lengths(inv))
    queries = _fitting(_QUERIES, room, room.queries, *_lengths(inv))
    pairs = sorted((i + j, i, j) for i in range(len(keys)) for j in range(len(queries)))
    return [(keys[i], queries[j]) for _, i, j in pairs]


def bias_tile(room: Room) -> Tile:
    """The tile of the kernel of a bias's gradient: the largest that a call has room for."""
    fitting = [t for t in (_EXACT if room.exact else _BIAS) if room.fault(t, room.bias_gradient) is None]
    return [*fitting, _BIAS[-1]][0]


def _lengths(inv: Invocation) -> tuple[int, int]:
    return inv.arguments["query"].shape[1], inv.arguments["key"].shape[1]


def illegal_forward(inv: Invocation, params: FwdParams | None) -> str | None:
    """Why the forward kernel cannot run with some parameters; `None` where it can."""
    if params is None or (missing := _missing(params, FORWARD_FIELDS)):
        return "fwd is missing" if params is None else missing
    room = Room.of(inv)
    return room.fault(forward_tile(params), room.forward)


def illegal_backward(inv: Invocation, params: BwdParams | None) -> str | None:
    """The same of the backward kernels."""
    if params is None or (missing := _missing(params, BACKWARD_FIELDS)):
        return "bwd is missing" if params is None else missing
    room = Room.of(inv)
    fault = room.fault(keys_tile(params), room.keys) or room.fault(queries_tile(params), room.queries)
    return fault or (room.fault(bias_tile(room), room.bias_gradient) if inv.arguments["bias"] is not None else None)


def _missing(params: Any, names: Sequence[str]) -> str | None:
    missing = [name for name in names if getattr(params, name, None) is None]
    return f"{', '.join(missing)} missing in {params}" if missing else None


def most(candidates: list[Any], others: int) -> list[Any]:
    """As many of the first candidates as are compiled beside some others."""
    return candidates[: _MOST_CANDIDATES - others]
