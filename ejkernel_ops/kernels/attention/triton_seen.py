"""What masks and segment ids show, as the Triton kernels of attention take it: bits, hidden keys, ranges of blocks.

A tile is of `rows` by `columns`: queries by keys, or keys by queries. Of a mask the kernels read one bit for each
number of a tile instead of a byte, skip the blocks that it hides, and look for hidden keys in few blocks only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

_NO_ID = 2**31 - 1
_BITS = 32
MOST_ROWS = 256  # of a tile, to whose end there are words


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a kernel takes, `None` where nothing is hidden; axes of length 1 broadcast.

    `words` are `(batch, head, query, key)` uint32 with one of the lengths in words: bit `i` of word `w` is for column
    `32 w + i`. `hidden` `(batch, key head, kv_len)` marks keys that the mask hides from every query of a key head.
    `ranges` are those of `block_ranges`. `fields` of a `TritonSpec` tell how they lie.
    """

    words: jax.Array | None
    hidden: jax.Array | None
    ranges: jax.Array | None
    fields: dict[str, Any]

    def without_ranges(self) -> Seen:
        """The same for a kernel that skips nothing."""
        return dataclasses.replace(self, ranges=None, fields=self.fields | _layout_of_ranges(None))


def keys_seen(arrays: tuple, blocks: tuple[int, int]) -> Seen:
    """What tiles of queries by keys take, from the operands of attention; `blocks` are rows of queries and of keys."""
    query, key, _, _, mask, _, q_ids, kv_ids, *_ = arrays
    words = hidden = every = None
    parts: list[Any] = [] if q_ids is None else [_by_ids(q_ids, kv_ids, *blocks)]
    if mask is not None:
        words = packed(mask, 3)
        kv_heads = key.shape[2] if mask.shape[1] > 1 else 1
        anywhere = jax.lax.reduce(_by_group(words, kv_heads), jnp.uint32(0), jax.lax.bitwise_or, (2, 3))
        bits = (anywhere[..., None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & 1
        hidden = bits.reshape(*bits.shape[:2], -1)[:, :, : mask.shape[3]] == 0
        whole = ~_blocks(hidden, blocks[1], fill=False).any(3)
        whole = jnp.repeat(whole, query.shape[2] // key.shape[2] if kv_heads > 1 else 1, axis=1)
        some, every = _tiles(words.swapaxes(2, 3), key.shape[1], *blocks)
        parts.append((some, whole[:, :, None]))
    return _seen(words, 3, hidden, _ranges(parts, every, query.shape[1], key.shape[1], blocks))


def queries_seen(arrays: tuple, lse: jax.Array | None, blocks: tuple[int, int]) -> Seen:
    """The same for tiles of keys by queries, and programs that take all query heads of a key head.

    `lse` `(batch, q_len, heads)` is given where queries may see nothing: blocks of such are never seen as a whole.
    """
    query, key, _, _, mask, _, q_ids, kv_ids, *_ = arrays
    block_q, block_kv = blocks
    words = hidden = every = None
    parts: list[Any] = [] if q_ids is None else [_by_ids(kv_ids, q_ids, block_kv, block_q)]
    if mask is not None:
        words = packed(mask, 2)
        kv_heads = key.shape[2] if mask.shape[1] > 1 else 1
        hidden = ~_by_group((words != 0).any(2), kv_heads).any(2)
        some, every = (_by_group(x, kv_heads) for x in _tiles(words, query.shape[1], block_kv, block_q))
        every = every.all(2)
        parts.append((some.any(2), True))
    if lse is not None:
        dead = _by_group((lse == -jnp.inf).swapaxes(1, 2), key.shape[2]).any(2)
        parts.append((True, ~_blocks(dead, block_q, fill=False).any(3)[:, :, None]))
    return _seen(words, 2, hidden, _ranges(parts, every, key.shape[1], query.shape[1], (block_kv, block_q)))


def packed(mask: jax.Array, axis: int) -> jax.Array:
    """Bits of a mask `(batch, head, query, key)` along axis 2 or 3, as `Seen.words`; beyond its end they are 0."""
    count = mask.shape[axis]
    if count == 1:
        return jnp.where(mask, jnp.uint32(2**_BITS - 1), jnp.uint32(0))
    return _words(jnp.pad(mask, [(0, -count % MOST_ROWS if n == axis else 0) for n in range(4)]), axis)


def _words(bits: jax.Array, axis: int) -> jax.Array:
    """Numbers of the bits along an axis of four, the last ones filled up with 0."""
    bits = jnp.pad(bits, [(0, -bits.shape[axis] % _BITS if n == axis else 0) for n in range(4)])
    bits = bits.reshape(*bits.shape[:axis], -1, _BITS, *bits.shape[axis + 1 :])
    places = (jnp.uint32(1) << jnp.arange(_BITS, dtype=jnp.uint32)).reshape(-1, *[1] * (3 - axis))
    return jnp.where(bits, places, jnp.uint32(0)).sum(axis + 1, dtype=jnp.uint32)


def strides(x: jax.Array | None, axes: int = 4) -> tuple[int, ...]:
    """Steps in elements along the axes of an array, 0 along those that broadcast."""
    if x is None:
        return (0,) * axes
    return tuple(0 if n == 1 else math.prod(x.shape[axis + 1 :]) for axis, n in enumerate(x.shape))


def _seen(words: Any, axis: int, hidden: Any, ranges: Any) -> Seen:
    batch, head, *lengths = strides(words)
    of_words, of_rows = lengths if axis == 2 else lengths[::-1]
    fields = {
        "mask_strides": (batch, head, of_words, of_rows),
        "hidden_strides": strides(hidden, 3),
    }
    return Seen(words, hidden, ranges, fields | _layout_of_ranges(ranges))


def _layout_of_ranges(ranges: Any) -> dict[str, Any]:
    return {"range_strides": strides(ranges)[:3], "has_ranges": ranges is not None}


def block_ranges(meets: jax.Array, whole: jax.Array, every: jax.Array | None = None) -> jax.Array:
    """Which blocks of columns each block of rows may see.

    Args:
        meets: `(batch, head, row blocks, column blocks)` bool, whether a row sees a column.
        whole: which blocks of columns, of those that `meets` spans, need no more than the bits of a mask.
        every: which tiles a mask shows as a whole.

    Returns:
        `(batch, head, row blocks, 4)` int32: first and end of the blocks that `meets` names (those between them may
        hold nothing), and first and end of a run of `whole` ones, the first or the last run; the first is the number
        of blocks where there are none. With `every` its bits follow, 32 blocks of columns in a number.
    """
    count = meets.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    first = jnp.where(meets, index, count).min(-1)
    last = jnp.where(meets, index + 1, 0).max(-1)
    whole = whole & (index >= first[..., None]) & (index < last[..., None])
    inner = jnp.where(whole, index, count).min(-1)
    outer = jnp.where(whole | (index < inner[..., None]), count, index).min(-1)  # the first one after them that is not
    end = jnp.where(whole, index + 1, 0).max(-1)
    begin = jnp.where(whole | (index >= end[..., None]), 0, index + 1).max(-1)
    longer = end - begin > outer - inner
    inner, outer = jnp.where(longer, begin, inner), jnp.where(longer, end, outer)
    ranges = jnp.stack([first, last, inner, outer], -1)
    if every is None:
        return ranges
    bits = jax.lax.bitcast_convert_type(_words(jnp.broadcast_to(every, meets.shape), 3), jnp.int32)
    return jnp.concatenate([ranges, bits], -1)


def _ranges(parts: list[Any], every: Any, rows: int, columns: int, blocks: tuple[int, int]) -> jax.Array | None:
    if not parts:
        return None
    shape = (1, 1, -(-rows // blocks[0]), -(-columns // blocks[1]))
    meets = whole = jnp.ones(shape, bool)
    for part in parts:
        meets, whole = meets & part[0], whole & part[1]
    meets, whole = jnp.broadcast_arrays(meets, whole)
    return block_ranges(meets, whole, every)


def _by_ids(ids: jax.Array, other_ids: jax.Array, block: int, other_block: int) -> tuple[jax.Array, jax.Array]:
    """Which blocks have a segment id in common, perhaps, and which are of one segment, the same."""
    low, high, whole = (x[:, None, :, None] for x in _limits(ids, block))
    other_low, other_high, other_whole = (x[:, None, None, :] for x in _limits(other_ids, other_block))
    return (low <= other_high) & (other_low <= high), whole & other_whole & (low == other_low)


def _limits(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Least and greatest id of each block, negative ones left out, and whether it is of one segment as a whole."""
    blocks = _blocks(ids, block, fill=-1)
    low = jnp.where(blocks < 0, _NO_ID, blocks).min(-1)
    high = blocks.max(-1)
    return low, high, (blocks.min(-1) == high) & (high >= 0)


def _tiles(words: jax.Array, columns: int, block: int, other_block: int) -> tuple[jax.Array, jax.Array]:
    """Which tiles of words `(batch, head, columns // 32, rows)` have a bit, and which have all.

    Both `(batch, head, row blocks, column blocks)`.
    """
    each, most = max(1, other_block // _BITS), jnp.uint32(2**_BITS - 1)
    if other_block < _BITS and words.shape[2] > 1:
        halves = jnp.stack([words & 0xFFFF, words >> 16], 3)
        words, most = halves.reshape(*words.shape[:2], -1, words.shape[3]), jnp.uint32(0xFFFF)

    def by_columns(x: jax.Array) -> jax.Array:
        return _blocks(x.swapaxes(2, 3), each, fill=False)[..., :count, :]

    count = -(-columns // other_block)
    some = by_columns(_blocks(words != 0, block, fill=False).any(4))
    every = by_columns(_blocks(words == most, block, fill=True).all(4))
    return some.any(4), every.all(4)


def _blocks(x: jax.Array, block: int, fill: Any) -> jax.Array:
    """The last axis in blocks, the last of them filled up; one that broadcasts stays as it is."""
    length = x.shape[-1]
    if length == 1:
        return x[..., None]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % block)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, block)


def _by_group(x: jax.Array, kv_heads: int) -> jax.Array:
    """`(batch, head, ...)` to `(batch, key head, group, ...)`."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])
