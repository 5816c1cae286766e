"""Attention on Triton: the operands as its kernels take them, and their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...triton_call import triton_call
from .arrange import unseen_by_mask
from .triton_spec import TritonSpec, spec_of
from .xla import Statics

_LOG2E = 1.4426950408889634
_NO_ID = 2**31 - 1


def forward(arrays: tuple, statics: Statics, params: Any) -> tuple[jax.Array, jax.Array]:
    """Output `(batch, q_len, heads, v_dim)` and log-sum-exp `(batch, q_len, heads)`.

    `arrays` are the operands of attention from `query` to `dropout_seed`, `params` a `FwdParams`.
    """
    from .triton_fwd import attention_forward

    spec = spec_of(arrays, statics, (params.q_blocksize, params.kv_blocksize))
    query, key, value, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed = _visible_keys(arrays)
    batch, q_len, heads, _ = query.shape
    ranges = block_ranges(q_ids, kv_ids, spec.block_q, spec.block_kv)
    return tuple(
        triton_call(
            attention_forward, query, key, value,
            *_given(query, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed, ranges),
            out_types=[
                jax.ShapeDtypeStruct((batch, q_len, heads, spec.v_dim), query.dtype),
                jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
            ],
            grid=(-(-q_len // spec.block_q) * heads * batch,), num_warps=params.num_warps,
            num_stages=params.num_stages, name="flash_attention", spec=spec,
        )
    )  # type: ignore[return-value]  # fmt: skip


def backward(arrays: tuple, out: Any, lse: Any, dout: Any, dlse: Any, needs: tuple, statics: Statics, params: Any):
    """Gradients of query, key, value, bias and sinks, each `None` where `needs` is false; `params` a `BwdParams`."""
    spec = spec_of(arrays, statics, (params.q_blocksize, params.kv_blocksize))
    lse2, delta = _row_sums(out, lse, dout, dlse)
    query, key, value, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed = _visible_keys(arrays)
    need_q, need_k, need_v, need_bias, need_sinks = needs
    optional = _given(query, bias, mask, q_offset, q_ids, kv_ids, kv_lengths, seed)
    dq = dk = dv = dbias = dsinks = None
    if need_k or need_v:
        launch = dict(num_warps=params.num_warps, num_stages=params.num_stages)
        dk, dv = _keys(
            query, key, value, optional, (dout, lse2, delta), (q_ids, kv_ids), (need_k, need_v), spec, launch
        )
    if need_q:
        launch = dict(num_warps=params.num_warps_mn, num_stages=params.num_stages_mn)
        tiles = dataclasses.replace(spec, block_q=params.blocksize_m, block_kv=params.blocksize_n)
        dq = _queries(query, key, value, optional, (dout, lse2, delta), (q_ids, kv_ids), tiles, launch)
    if need_bias:
        dbias = _bias(query, key, value, bias, optional, (dout, lse2, delta), spec)
    if need_sinks:
        probs = jnp.exp2(sinks.astype(jnp.float32)[None, :, None] * _LOG2E - lse2)
        dsinks = -(probs * delta).sum((0, 2))
    return dq, dk, dv, dbias, dsinks


def _keys(query, key, value, optional, rows, ids, needs, spec: TritonSpec, launch: dict) -> list[jax.Array | None]:
    """Gradients of keys and values, by one kernel; of wide heads by one each, for registers hold one sum only."""
    from .triton_bwd import attention_backward_kv

    ranges = block_ranges(ids[1], ids[0], spec.block_kv, spec.block_q)
    batch, kv_len, kv_heads, _ = key.shape

    def run(want_dk: bool, want_dv: bool) -> list[jax.Array]:
        wanted = ((key, want_dk), (value, want_dv))
        return triton_call(
            attention_backward_kv, query, key, value, *optional, *_given(query, ranges), *rows,
            out_types=[jax.ShapeDtypeStruct(x.shape if want else (1,), x.dtype) for x, want in wanted],
            grid=(-(-kv_len // spec.block_kv) * kv_heads * batch,), name="flash_attention_bwd_kv",
            spec=dataclasses.replace(spec, want_dk=want_dk, want_dv=want_dv), **launch,
        )  # fmt: skip

    if all(needs) and not spec.is_wide:
        return list(run(True, True))
    return [run(True, False)[0] if needs[0] else None, run(False, True)[1] if needs[1] else None]


def _queries(query, key, value, optional, rows, ids, spec: TritonSpec, launch: dict) -> jax.Array:
    from .triton_bwd import attention_backward_q

    ranges = block_ranges(*ids, spec.block_q, spec.block_kv)
    batch, q_len, heads, _ = query.shape
    return triton_call(
        attention_backward_q, query, key, value, *optional, *_given(query, ranges), *rows,
        out_types=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        grid=(-(-q_len // spec.block_q) * heads * batch,), name="flash_attention_bwd_q", spec=spec, **launch,
    )[0]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """How programs share the gradient of a bias, by `(batch, head, query, key)`.

    `tiles` is how many programs there are along each, `each` how many examples, heads and blocks one of them sums
    over, `shape` what they write.
    """

    tiles: tuple[int, int, int, int]
    each: tuple[int, int, int, int]
    shape: tuple[int, int, int, int]


def _bias(query, key, value, bias, optional, rows, spec: TritonSpec) -> jax.Array:
    """The gradient of a bias in float32, summed over the axes that it broadcasts.

    A program that sums over a length takes one head of one example: there are too few otherwise.
    """
    from .triton_bwd import attention_backward_bias

    spec = dataclasses.replace(spec, block_q=64, block_kv=64)
    full = (query.shape[0], query.shape[2], spec.q_len, spec.kv_len)
    blocks = (*full[:2], -(-spec.q_len // 64), -(-spec.kv_len // 64))
    long = [n > 1 or size == 1 for n, size in zip(bias.shape, full)]
    if not (long[2] and long[3]):
        long[:2] = True, True
    sums = BiasSums(
        tiles=tuple(n if whole else 1 for n, whole in zip(blocks, long)),
        each=tuple(1 if whole else n for n, whole in zip(blocks, long)),
        shape=tuple(n if whole else 1 for n, whole in zip(full, long)),
    )  # type: ignore[arg-type]
    grid = sums.tiles[0] * sums.tiles[1] * sums.tiles[2] * sums.tiles[3]
    (parts,) = triton_call(
        attention_backward_bias, query, key, value, *optional, *rows,
        out_types=[jax.ShapeDtypeStruct(sums.shape, jnp.float32)], grid=(grid,), num_warps=4, num_stages=2,
        name="flash_attention_bwd_bias", spec=spec, sums=sums,
    )  # fmt: skip
    axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1 and sums.shape[axis] > 1)
    return parts.sum(axes, keepdims=True) if axes else parts


def _row_sums(out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: Any) -> tuple[jax.Array, jax.Array]:
    """What the backward kernels need of each query, `(batch, heads, q_len)`."""
    live = lse > -jnp.inf
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    lse2, delta = jnp.where(live, lse * _LOG2E, jnp.inf), jnp.where(live, delta, 0.0)
    return lse2.transpose(0, 2, 1), delta.transpose(0, 2, 1)


def _visible_keys(arrays: tuple) -> tuple:
    """The operands, with keys that a mask hides from every query zeroed: what they hold must not reach a product."""
    query, key, value, bias, mask, *rest = arrays
    if mask is not None:
        unseen = unseen_by_mask(mask, key.shape[2])[..., None]
        key, value = (jnp.where(unseen, jnp.zeros_like(x), x) for x in (key, value))
    return query, key, value, bias, mask, *rest


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
        between them may hold none), and first and end of some that are of the same, one segment, as it is.
    """
    if ids is None:
        return None
    low, high, whole = _block_limits(ids, block)
    other_low, other_high, other_whole = (x[:, None] for x in _block_limits(other_ids, other_block))
    low, high, whole = (x[:, :, None] for x in (low, high, whole))
    meets = (low <= other_high) & (other_low <= high)
    same = whole & other_whole & (low == other_low)
    count = meets.shape[-1]
    some, all_of = meets.any(-1), same.any(-1)
    first = jnp.where(some, jnp.argmax(meets, -1), 0)
    last = jnp.where(some, count - jnp.argmax(meets[..., ::-1], -1), 0)
    inner = jnp.where(all_of, jnp.argmax(same, -1), 0)
    run = same | (jnp.arange(count) < inner[..., None])  # up to the first block after them that is of another segment
    outer = jnp.where(all_of, jnp.where(run.all(-1), count, jnp.argmin(run, -1)), 0)
    return jnp.stack([first, last, inner, outer], -1).astype(jnp.int32)


def _block_limits(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Least and greatest id of each block, negative ones left out, and whether it is of one segment as a whole."""
    batch, length = ids.shape
    blocks = jnp.pad(ids, ((0, 0), (0, -length % block)), constant_values=-1).reshape(batch, -1, block)
    low = jnp.where(blocks < 0, _NO_ID, blocks).min(-1)
    high = blocks.max(-1)
    return low, high, (blocks.min(-1) == high) & (high >= 0)
