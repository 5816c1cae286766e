"""What a Triton kernel of attention is compiled for: one hashable value, read by the kernels as constants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .triton_seen import strides
from .xla import Statics

_OPEN = 1 << 30  # a side of a window that is as good as open
LOG2E = math.log2(math.e)
_PRECISIONS = {
    "tf32": (None, "default", "fastest", "tensorfloat32", "TF32_TF32_F32", "DEFAULT"),
    "tf32x3": ("high", "bfloat16_3x", "TF32_TF32_F32_X3"),
    "ieee": ("highest", "float32", "F32_F32_F32"),
}
_WAYS = tuple(_PRECISIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonSpec:
    """Sizes and options of a call; window sides are -1 where they are open, causality is a right side of 0.

    `factor` scales what `logits` returns, products or with `transformed` logits, into units of which `exp2` takes
    `base` each: bits, but with a bias natural logarithms, for in bits the greatest biases are infinite. `threshold`
    is the least random word that dropout keeps, 0 without dropout. `has_ranges` is whether there are ranges of blocks
    to load, `dead_rows` whether there may be queries that see no key. Strides are in elements, 0 along axes that
    broadcast: of the bias by `(batch, head, query, key)`, the others as `triton_seen.py` makes them. `want_dq`,
    `want_dk` and `want_dv` are what backward kernels compute.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    block_d: int
    block_e: int
    block_q: int
    block_kv: int
    scale: float
    factor: float
    base: float
    transformed: bool
    soft_cap: float
    left: int
    right: int
    offset: int
    threshold: int
    keep: float
    precision: str
    has_offset: bool
    has_ids: bool
    has_lengths: bool
    has_sinks: bool
    has_bias: bool
    has_mask: bool
    dead_rows: bool
    has_ranges: bool = False
    has_dlse: bool = False
    want_dq: bool = True
    want_dk: bool = True
    want_dv: bool = True
    bias_strides: tuple[int, ...]
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    hidden_strides: tuple[int, ...] = (0, 0, 0)
    range_strides: tuple[int, ...] = (0, 0, 0)

    @property
    def is_wide(self) -> bool:
        """Whether registers hold the sums of one gradient of keys or values at most."""
        return max(self.block_d, self.block_e) > 128

    @property
    def unit(self) -> float:
        """Units of rows in a natural logarithm."""
        return LOG2E if self.base == 1.0 else 1.0

    @property
    def batch_first(self) -> bool:
        """Whether programs of all examples come together, for they read the same tile of a bias."""
        return self.has_bias and self.bias_strides[0] == 0 and self.bias_strides[2] > 0

    @property
    def padded_d(self) -> bool:
        """Whether tiles are wider than the head of queries and keys."""
        return self.block_d != self.head_dim

    @property
    def padded_e(self) -> bool:
        """Whether tiles are wider than the head of values."""
        return self.block_e != self.v_dim

    @property
    def ragged_q(self) -> bool:
        """Whether the last block of queries is not full."""
        return self.q_len % self.block_q != 0

    @property
    def ragged_kv(self) -> bool:
        """Whether the last block of keys is not full."""
        return self.kv_len % self.block_kv != 0

    @property
    def short_keys(self) -> bool:
        """Whether tiles at an edge may hold keys beyond the last one that positions alone do not hide."""
        hidden = self.right >= 0 and not self.has_offset and self.q_len + self.offset + self.right <= self.kv_len
        return self.has_lengths or (self.ragged_kv and not hidden)

    @property
    def key_phases(self) -> tuple[bool, bool, bool]:
        """Whether queries may meet key blocks at a first edge of what they see, between the edges, at a last one."""
        last = self.right >= 0 or self.has_ranges or self.has_lengths or self.ragged_kv
        return self.left >= 0 or self.has_ranges, True, last

    @property
    def query_phases(self) -> tuple[bool, bool, bool]:
        """The same of the query blocks that see some keys."""
        return self.right >= 0 or self.has_ranges, True, self.left >= 0 or self.has_ranges or self.ragged_q


def spec_of(arrays: tuple, statics: Statics, blocks: tuple[int, int]) -> TritonSpec:
    """The spec of a call from its operands and the sizes of its blocks of queries and of keys."""
    query, key, value, bias, mask, q_offset, q_ids, _, kv_lengths, sinks, _ = arrays
    window = statics.sliding_window or (_OPEN, 0 if statics.causal else _OPEN)
    left, right = (-1 if n >= _OPEN else n for n in window)
    if statics.causal:
        right = 0
    rate, cap = statics.dropout_rate, statics.logits_soft_cap
    scale = float(statics.softmax_scale)
    transformed = cap is not None or bias is not None or scale <= 0  # a product with `factor` must keep the order
    positions = left >= 0 or right >= 0
    offset = (statics.static_offset or 0) if positions else 0
    return TritonSpec(
        batch=query.shape[0],
        q_len=query.shape[1],
        kv_len=key.shape[1],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_dim=query.shape[3],
        v_dim=value.shape[3],
        block_d=width(query.shape[3]),
        block_e=width(value.shape[3]),
        block_q=blocks[0],
        block_kv=blocks[1],
        scale=scale,
        factor=(1.0 if transformed else scale) * (1.0 if bias is not None else LOG2E),
        base=1.0 if bias is None else LOG2E,
        transformed=transformed,
        soft_cap=float(cap or 0.0),
        left=left,
        right=right,
        offset=offset,
        threshold=min(int(rate * 2**32), 2**32 - 1) if rate else 0,
        keep=1.0 - rate,
        precision=dot_precision(statics.precision) or "tf32",
        has_offset=q_offset is not None and positions,
        has_ids=q_ids is not None,
        has_lengths=kv_lengths is not None,
        has_sinks=sinks is not None,
        has_bias=bias is not None,
        has_mask=mask is not None,
        dead_rows=_may_see_nothing(arrays, offset, left, positions),
        bias_strides=strides(bias),
    )


def dot_precision(precision: Any) -> str | None:
    """How Triton multiplies float32 numbers for a precision: `"tf32"`, `"tf32x3"`, `"ieee"`; `None`: it cannot."""
    if isinstance(precision, tuple):  # of the two operands: no less than either
        ways = [dot_precision(one) for one in precision]
        return None if None in ways else max(ways, key=_WAYS.index)
    return next((way for way in _WAYS if precision in _PRECISIONS[way]), None)


def width(dim: int) -> int:
    """Columns of a tile that holds a head: a power of two, as Triton's products need, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _may_see_nothing(arrays: tuple, offset: int, left: int, positions: bool) -> bool:
    """Whether there may be queries that see no key."""
    query, key, _, bias, mask, q_offset, q_ids, _, kv_lengths, _, _ = arrays
    if any(x is not None for x in (bias, mask, q_ids, kv_lengths)):
        return True
    beyond = left >= 0 and query.shape[1] - 1 + offset - left >= key.shape[1]
    return positions and (q_offset is not None or offset < 0 or beyond)
