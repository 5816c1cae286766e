"""Attention on Triton: the operands as its kernels take them, and their launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...triton_call import triton_call
from ..on_triton import given
from .tiles import Room, Tile, bias_tile
from .triton_seen import Seen, keys_seen, queries_seen
from .triton_spec import TritonSpec, spec_of
from .xla import Statics


def forward(arrays: tuple, statics: Statics, params: Any) -> tuple[jax.Array, jax.Array]:
    """Output `(batch, q_len, heads, v_dim)` and log-sum-exp `(batch, q_len, heads)`.

    `arrays` are the operands of attention from `query` to `dropout_seed`, `params` a `FwdParams`.
    """
    from .triton_fwd import attention_forward

    spec = spec_of(arrays, statics, (params.q_blocksize, params.kv_blocksize))
    query, key, value, bias, _, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed = arrays
    batch, q_len, heads, _ = query.shape
    seen = keys_seen(arrays, (spec.block_q, spec.block_kv))
    out, lse = triton_call(
        attention_forward, query, key, value,
        *given(query, bias, seen.words, q_offset, q_ids, kv_ids, kv_lengths, sinks, seed, seen.ranges, seen.hidden),
        out_types=[
            jax.ShapeDtypeStruct((batch, q_len, heads, spec.v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
        ],
        grid=(-(-q_len // spec.block_q) * heads * batch,), num_warps=params.num_warps, num_stages=params.num_stages,
        name="flash_attention", spec=dataclasses.replace(spec, **seen.fields),
    )  # fmt: skip
    return out, lse


@dataclasses.dataclass(frozen=True)
class _Backward:
    """What all backward kernels take."""

    arrays: tuple
    dout: jax.Array

    def operands(self, seen: Seen, *rows: Any) -> list[Any]:
        """The operands of a kernel that takes ranges of blocks or not, and some numbers of each query."""
        query, key, value, bias, _, q_offset, q_ids, kv_ids, kv_lengths, _, seed = self.arrays
        optional = bias, seen.words, q_offset, q_ids, kv_ids, kv_lengths, seed, seen.ranges, seen.hidden
        return [query, key, value, *given(query, *optional), self.dout, *rows]


def backward(arrays: tuple, out: Any, lse: Any, dout: Any, dlse: Any, needs: tuple, statics: Statics, params: Any):
    """Gradients of query, key, value, bias and sinks, each `None` where `needs` is false; `params` a `BwdParams`."""
    spec = spec_of(arrays, statics, (params.q_blocksize, params.kv_blocksize))
    query, _, value, bias, mask, *_, sinks, _ = arrays
    need_q, need_k, need_v, need_bias, need_sinks = needs
    x = _Backward(arrays, dout)
    tiles = dataclasses.replace(
        spec, block_q=params.blocksize_m, block_kv=params.blocksize_n, has_dlse=dlse is not None, want_dq=need_q
    )
    dq, row_lse, delta = _queries(x, (out, lse, *given(query, dlse)), tiles, params)
    dk = dv = dbias = dsinks = None
    if need_k or need_v:
        dk, dv = _keys(x, lse, (row_lse, delta), (need_k, need_v), spec, params)
    if need_bias:
        room = Room.of_operands(query, value, bias, mask, statics.dropout_rate, statics.precision, None)
        dbias = _bias(x, (row_lse, delta), spec, bias_tile(room))
    if need_sinks:
        probs = jnp.exp2((sinks.astype(jnp.float32)[None, :, None] * spec.unit - row_lse) * spec.base)
        dsinks = -(probs * delta).sum((0, 2))
    return dq if need_q else None, dk, dv, dbias, dsinks


def _queries(x: _Backward, rows: tuple, spec: TritonSpec, params: Any) -> list[jax.Array]:
    """Gradient of queries, and the two numbers of each query that the other kernels take."""
    from .triton_bwd import attention_backward_q

    query = x.arrays[0]
    batch, q_len, heads, _ = query.shape
    seen = keys_seen(x.arrays, (spec.block_q, spec.block_kv))
    sums = jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32)
    dq = jax.ShapeDtypeStruct(query.shape if spec.want_dq else (1,), query.dtype)
    return triton_call(
        attention_backward_q, *x.operands(seen, *rows), out_types=[dq, sums, sums],
        grid=(-(-q_len // spec.block_q) * heads * batch,), num_warps=params.num_warps_mn,
        num_stages=params.num_stages_mn, name="flash_attention_bwd_q", spec=dataclasses.replace(spec, **seen.fields),
    )  # fmt: skip


def _keys(
    x: _Backward, lse: jax.Array, sums: tuple, needs: tuple, spec: TritonSpec, params: Any
) -> list[jax.Array | None]:
    """Gradients of keys and values, by one kernel; of wide heads by one each, for registers hold one sum only."""
    from .triton_bwd import attention_backward_kv

    _, key, value, *_ = x.arrays
    batch, kv_len, kv_heads, _ = key.shape
    seen = queries_seen(x.arrays, lse if spec.dead_rows else None, (spec.block_q, spec.block_kv))

    def run(want_dk: bool, want_dv: bool) -> list[jax.Array]:
        wanted = ((key, want_dk), (value, want_dv))
        return triton_call(
            attention_backward_kv, *x.operands(seen, *sums),
            out_types=[jax.ShapeDtypeStruct(a.shape if want else (1,), a.dtype) for a, want in wanted],
            grid=(-(-kv_len // spec.block_kv) * kv_heads * batch,), num_warps=params.num_warps,
            num_stages=params.num_stages, name="flash_attention_bwd_kv",
            spec=dataclasses.replace(spec, want_dk=want_dk, want_dv=want_dv, **seen.fields),
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


def _bias(x: _Backward, sums_of_rows: tuple, spec: TritonSpec, tile: Tile) -> jax.Array:
    """The gradient of a bias, summed over the axes that it broadcasts: as the bias, or in float32 if XLA has to sum.

    A program that sums over a length takes one head of one example: there are too few otherwise.
    """
    from .triton_bwd import attention_backward_bias

    query, _, _, bias, *_ = x.arrays
    seen = keys_seen(x.arrays, (tile.q, tile.kv)).without_ranges()
    spec = dataclasses.replace(spec, block_q=tile.q, block_kv=tile.kv, **seen.fields)
    full = (query.shape[0], query.shape[2], spec.q_len, spec.kv_len)
    blocks = (*full[:2], -(-spec.q_len // tile.q), -(-spec.kv_len // tile.kv))
    long = [n > 1 or size == 1 for n, size in zip(bias.shape, full)]
    if not (long[2] and long[3]):
        long[:2] = True, True
    sums = BiasSums(
        tiles=tuple(n if whole else 1 for n, whole in zip(blocks, long)),
        each=tuple(1 if whole else n for n, whole in zip(blocks, long)),
        shape=tuple(n if whole else 1 for n, whole in zip(full, long)),
    )
    axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1 and sums.shape[axis] > 1)
    grid = sums.tiles[0] * sums.tiles[1] * sums.tiles[2] * sums.tiles[3]
    (parts,) = triton_call(
        attention_backward_bias, *x.operands(seen, *sums_of_rows),
        out_types=[jax.ShapeDtypeStruct(sums.shape, jnp.float32 if axes else bias.dtype)], grid=(grid,),
        num_warps=tile.warps, num_stages=tile.stages, name="flash_attention_bwd_bias", spec=spec, sums=sums,
    )  # fmt: skip
    return parts.sum(axes, keepdims=True) if axes else parts
