"""Attention on Triton: the operands as its kernels take them, and their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...triton_call import triton_call
from .arrange import unseen_by_mask
from .tiles import Room, Tile, bias_tile
from .triton_spec import LOG2E, TritonSpec, spec_of
from .xla import Statics

_NO_ID = 2**31 - 1


def forward(arrays: tuple, statics: Statics, params: Any) -> tuple[jax.Array, jax.Array]:
    """Output `(batch, q_len, heads, v_dim)` and log-sum-exp `(batch, q_len, heads)`.

    `arrays` are the operands of attention from `query` to `dropout_seed`, `params` a `FwdParams`.
    """
    from .triton_fwd import attention_forward

    spec = spec_of(arrays, statics, (params.q_blocksize, params.kv_blocksize))
    query, key, value, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed = arrays
    batch, q_len, heads, _ = query.shape
    ranges = block_ranges(q_ids, kv_ids, spec.block_q, spec.block_kv)
    out, lse = triton_call(
        attention_forward, query, key, value,
        *_given(query, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed, ranges, _hidden(mask, key)),
        out_types=[
            jax.ShapeDtypeStruct((batch, q_len, heads, spec.v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
        ],
        grid=(-(-q_len // spec.block_q) * heads * batch,), num_warps=params.num_warps, num_stages=params.num_stages,
        name="flash_attention", spec=spec,
    )  # fmt: skip
    return out, lse


@dataclasses.dataclass(frozen=True)
class _Backward:
    """What all backward kernels take."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    optional: list[Any]
    ids: tuple[Any, Any]
    hidden: jax.Array
    dout: jax.Array


def backward(arrays: tuple, out: Any, lse: Any, dout: Any, dlse: Any, needs: tuple, statics: Statics, params: Any):
    """Gradients of query, key, value, bias and sinks, each `None` where `needs` is false; `params` a `BwdParams`."""
    spec = spec_of(arrays, statics, (params.q_blocksize, params.kv_blocksize))
    query, key, value, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed = arrays
    need_q, need_k, need_v, need_bias, need_sinks = needs
    optional = _given(query, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, seed)
    (hidden,) = _given(query, _hidden(mask, key))
    x = _Backward(query, key, value, optional, (q_ids, kv_ids), hidden, dout)
    tiles = dataclasses.replace(
        spec, block_q=params.blocksize_m, block_kv=params.blocksize_n, has_dlse=dlse is not None, want_dq=need_q
    )
    dq, lse2, delta = _queries(x, (out, lse, *_given(query, dlse)), tiles, params)
    dk = dv = dbias = dsinks = None
    if need_k or need_v:
        dk, dv = _keys(x, (lse2, delta), (need_k, need_v), spec, params)
    if need_bias:
        room = Room.of_operands(query, value, bias, mask, statics.dropout_rate, statics.precision, None)
        dbias = _bias(x, bias, (lse2, delta), spec, bias_tile(room))
    if need_sinks:
        probs = jnp.exp2(sinks.astype(jnp.float32)[None, :, None] * LOG2E - lse2)
        dsinks = -(probs * delta).sum((0, 2))
    return dq if need_q else None, dk, dv, dbias, dsinks


def _queries(x: _Backward, rows: tuple, spec: TritonSpec, params: Any) -> list[jax.Array]:
    """Gradient of queries, and the two numbers of each query that the other kernels take."""
    from .triton_bwd import attention_backward_q

    batch, q_len, heads, _ = x.query.shape
    ranges = block_ranges(*x.ids, spec.block_q, spec.block_kv)
    sums = jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32)
    dq = jax.ShapeDtypeStruct(x.query.shape if spec.want_dq else (1,), x.query.dtype)
    return triton_call(
        attention_backward_q, x.query, x.key, x.value, *x.optional, *_given(x.query, ranges), x.hidden, x.dout, *rows,
        out_types=[dq, sums, sums], grid=(-(-q_len // spec.block_q) * heads * batch,), num_warps=params.num_warps_mn,
        num_stages=params.num_stages_mn, name="flash_attention_bwd_q", spec=spec,
    )  # fmt: skip


def _keys(x: _Backward, sums: tuple, needs: tuple, spec: TritonSpec, params: Any) -> list[jax.Array | None]:
    """Gradients of keys and values, by one kernel; of wide heads by one each, for registers hold one sum only."""
    from .triton_bwd import attention_backward_kv

    batch, kv_len, kv_heads, _ = x.key.shape
    ranges = block_ranges(x.ids[1], x.ids[0], spec.block_kv, spec.block_q)

    def run(want_dk: bool, want_dv: bool) -> list[jax.Array]:
        wanted = ((x.key, want_dk), (x.value, want_dv))
        return triton_call(
            attention_backward_kv, x.query, x.key, x.value, *x.optional, *_given(x.query, ranges), x.hidden, x.dout,
            *sums, out_types=[jax.ShapeDtypeStruct(a.shape if want else (1,), a.dtype) for a, want in wanted],
            grid=(-(-kv_len // spec.block_kv) * kv_heads * batch,), num_warps=params.num_warps,
            num_stages=params.num_stages, name="flash_attention_bwd_kv",
            spec=dataclasses.replace(spec, want_dk=want_dk, want_dv=want_dv),
        )  # fmt: skip

    if all(needs) and not spec.is_wide:
        return list(run(True, True))
    return [run(True, False)[0] if needs[0] else None, run(False, True)[1] if needs[1] else None]


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """How programs share the gradient of a bias, by `(batch, head, query, key)`.

    `tiles` is how many programs there are along each, `each` how many examples, heads and blocks one of them sums
    over, `shape` what they write.
    """

    tiles: tuple[int, ...]
    each: tuple[int, ...]
    shape: tuple[int, ...]


def _bias(x: _Backward, bias: jax.Array, sums_of_rows: tuple, spec: TritonSpec, tile: Tile) -> jax.Array:
    """The gradient of a bias in float32, summed over the axes that it broadcasts.

    A program that sums over a length takes one head of one example: there are too few otherwise.
    """
    from .triton_bwd import attention_backward_bias

    spec = dataclasses.replace(spec, block_q=tile.q, block_kv=tile.kv)
    full = (x.query.shape[0], x.query.shape[2], spec.q_len, spec.kv_len)
    blocks = (*full[:2], -(-spec.q_len // tile.q), -(-spec.kv_len // tile.kv))
    long = [n > 1 or size == 1 for n, size in zip(bias.shape, full)]
    if not (long[2] and long[3]):
        long[:2] = True, True
    sums = BiasSums(
        tiles=tuple(n if whole else 1 for n, whole in zip(blocks, long)),
        each=tuple(1 if whole else n for n, whole in zip(blocks, long)),
        shape=tuple(n if whole else 1 for n, whole in zip(full, long)),
    )
    grid = sums.tiles[0] * sums.tiles[1] * sums.tiles[2] * sums.tiles[3]
    (parts,) = triton_call(
        attention_backward_bias, x.query, x.key, x.value, *x.optional, x.hidden, x.dout, *sums_of_rows,
        out_types=[jax.ShapeDtypeStruct(sums.shape, jnp.float32)], grid=(grid,), num_warps=tile.warps,
        num_stages=tile.stages, name="flash_attention_bwd_bias", spec=spec, sums=sums,
    )  # fmt: skip
    axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1 and sums.shape[axis] > 1)
    return parts.sum(axes, keepdims=True) if axes else parts


def _hidden(mask: jax.Array | None, key: jax.Array) -> jax.Array | None:
    """Flags of the keys that a mask hides from every query: what they hold must not reach a product."""
    return None if mask is None else unseen_by_mask(mask, key.shape[2])


def _given(query: jax.Array, *optional: Any) -> list[Any]:
    """Operands, with the query in place of those that are not given: the kernels do not read them."""
    return [query if x is None else x for x in optional]


def block_ranges(ids: Any, other_ids: Any, block: int, other_block: int) -> jax.Array | None:
    """Which blocks of the other side each block may see by segment ids.

    Args:
        ids: `(batch, length)` int32.
        other_ids: those of the other side.
        block: rows in a block.
        other_block: rows in a block of the other side.

    Returns:
        `(batch, blocks, 4)` int32: first and end of the blocks that hold an id that the block holds, too (those
        between them may hold none), and first and end of some that are of the same, one segment, as it is; the
        first is the number of blocks where there are none.
    """
    if ids is None:
        return None
    low, high, whole = (x[:, :, None] for x in _block_limits(ids, block))
    other_low, other_high, other_whole = (x[:, None] for x in _block_limits(other_ids, other_block))
    meets = (low <= other_high) & (other_low <= high)
    same = whole & other_whole & (low == other_low)
    count = meets.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    first = jnp.where(meets, index, count).min(-1)
    last = jnp.where(meets, index + 1, 0).max(-1)
    inner = jnp.where(same, index, count).min(-1)
    outer = jnp.where(same | (index < inner[..., None]), count, index).min(-1)  # the first one after them that is not
    return jnp.stack([first, last, inner, outer], -1)


def _block_limits(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Least and greatest id of each block, negative ones left out, and whether it is of one segment as a whole."""
    batch, length = ids.shape
    blocks = jnp.pad(ids, ((0, 0), (0, -length % block)), constant_values=-1).reshape(batch, -1, block)
    low = jnp.where(blocks < 0, _NO_ID, blocks).min(-1)
    high = blocks.max(-1)
    return low, high, (blocks.min(-1) == high) & (high >= 0)
