"""The forward kernel of attention in Triton: one program for each block of queries of a head.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# A constant has the attributes of its value, and Triton unrolls what Python could not iterate over.

import triton
import triton.language as tl

from .triton_tile import (
    INF,
    LN2,
    block_range,
    kept,
    key_limits,
    load_tile,
    logits,
    mask_ahead,
    offset_and_length,
    phase_of,
    program,
    seen_keys,
    shown,
    visible_keys,
)


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, offset_ptr, q_ids_ptr, kv_ids_ptr, lengths_ptr, sinks_ptr, seed_ptr,
    ranges_ptr, hidden_ptr, out_ptr, lse_ptr, spec: tl.constexpr,
):  # fmt: skip
    """Output `(batch, q_len, heads, v_dim)` and log-sum-exp `(batch, q_len, heads)`."""
    block_q: tl.constexpr = spec.block_q
    block_kv: tl.constexpr = spec.block_kv
    block_d: tl.constexpr = spec.block_d
    block_e: tl.constexpr = spec.block_e
    num_blocks: tl.constexpr = (spec.q_len + block_q - 1) // block_q
    block, head, batch = program(num_blocks, spec.heads, spec)
    if spec.right >= 0:  # the last queries see most: they start first
        block = num_blocks - 1 - block
    kv_head = head // (spec.heads // spec.kv_heads)
    first_row = block * block_q
    rows = first_row + tl.arange(0, block_q)
    d, e = tl.arange(0, block_d), tl.arange(0, block_e)
    row_at = (batch * spec.q_len + rows) * spec.heads + head

    offset, kv_len = offset_and_length(offset_ptr, lengths_ptr, batch, spec)
    last_row = tl.minimum(first_row + block_q, spec.q_len) - 1
    begin, end, inner_begin, inner_end = key_limits(first_row, last_row, offset, kv_len, spec)
    ranges_ptr += batch * spec.range_strides[0] + head * spec.range_strides[1] + block * spec.range_strides[2]
    first, inner, outer, last = block_range(begin, end, inner_begin, inner_end, ranges_ptr, block_kv, spec)

    q_at = q_ptr + row_at[:, None] * spec.head_dim + d[None, :]
    q = load_tile(q_at, rows[:, None], d[None, :], spec.q_len, spec.head_dim, spec.q_len % block_q != 0,
                  spec.padded_d)  # fmt: skip
    k_ptr += (batch * spec.kv_len * spec.kv_heads + kv_head) * spec.head_dim
    v_ptr += (batch * spec.kv_len * spec.kv_heads + kv_head) * spec.v_dim
    bias_ptr += batch * spec.bias_strides[0] + head * spec.bias_strides[1]
    mask_ptr += batch * spec.mask_strides[0] + head * spec.mask_strides[1]
    q_ids = rows
    if spec.has_ids:
        q_ids = tl.load(q_ids_ptr + batch * spec.q_len + rows, mask=rows < spec.q_len, other=-1)

    acc = tl.zeros([block_q, block_e], tl.float32)
    top = tl.full([block_q], -INF, tl.float32)
    total = tl.zeros([block_q], tl.float32)
    for phase in tl.static_range(3):
        if spec.key_phases[phase]:
            lower, upper = phase_of(phase, first, inner, outer, last)
            if spec.has_mask:
                words, whole = mask_ahead(mask_ptr, ranges_ptr, rows, spec.q_len, lower, spec.kv_len, spec.ragged_q,
                                          block_kv, spec)  # fmt: skip
            for j in range(lower, upper):
                cols = j * block_kv + tl.arange(0, block_kv)
                # Keys that no query of the block sees may hold anything: they are not loaded.
                unseen, kv_ids = cols, cols
                if phase != 1 and spec.left >= 0:
                    unseen = tl.where(cols < begin, spec.kv_len, unseen)
                if phase != 1 and spec.has_mask:
                    unseen = seen_keys(hidden_ptr, unseen, batch, kv_head, spec)
                if phase != 1 and spec.has_ids:
                    kv_ids = tl.load(kv_ids_ptr + batch * spec.kv_len + cols, mask=cols < end, other=-1)
                    unseen = tl.where(kv_ids < 0, spec.kv_len, unseen)
                k_at = k_ptr + cols[None, :] * (spec.kv_heads * spec.head_dim) + d[:, None]
                k = load_tile(k_at, d[:, None], unseen[None, :], spec.head_dim, end, spec.padded_d, phase != 1)
                if spec.has_mask:
                    ahead = mask_ahead(mask_ptr, ranges_ptr, rows, spec.q_len, j + 1, spec.kv_len, spec.ragged_q,
                                       block_kv, spec)  # fmt: skip
                products = tl.dot(q, k, input_precision=spec.precision)
                scores, _slope = logits(products, bias_ptr, rows[:, None], cols[None, :], phase != 1 or spec.ragged_q,
                                        spec)  # fmt: skip
                if phase != 1:
                    seen = visible_keys(rows, j * block_kv, offset, end, q_ids, kv_ids, spec)
                    scores = tl.where(seen, scores, -INF)
                if spec.has_mask:
                    if phase != 1 or not whole:
                        scores = shown(scores, words, j, block_kv)
                    words, whole = ahead
                new = tl.maximum(top, tl.max(scores, 1) * spec.factor)
                finite = new
                if phase != 1 or spec.has_mask or spec.has_bias:  # of a row that has seen nothing yet
                    finite = tl.where(new == -INF, 0.0, new)
                probs = tl.exp2((scores * spec.factor - finite[:, None]) * spec.base)
                fade = tl.exp2((top - finite) * spec.base)
                total = total * fade + tl.sum(probs, 1)
                if spec.threshold > 0:
                    keep = kept(seed_ptr + batch * 3, head, first_row, j * block_kv, spec)
                    probs = tl.where(keep, probs, 0.0)
                acc = acc * fade[:, None]
                v_at = v_ptr + cols[:, None] * (spec.kv_heads * spec.v_dim) + e[None, :]
                v = load_tile(v_at, unseen[:, None], e[None, :], end, spec.v_dim, phase != 1, spec.padded_e)
                acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=spec.precision)
                top = new

    if spec.has_sinks:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * spec.unit
        new = tl.maximum(top, sink)
        finite = tl.where(new == -INF, 0.0, new)
        fade = tl.exp2((top - finite) * spec.base)
        acc, total, top = acc * fade[:, None], total * fade + tl.exp2((sink - finite) * spec.base), new
    empty = total == 0
    safe = tl.where(empty, 1.0, total)
    acc = acc * (1.0 / (safe * spec.keep))[:, None]
    out_at = out_ptr + row_at[:, None] * spec.v_dim + e[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(rows < spec.q_len)[:, None] & (e < spec.v_dim)[None, :])
    lse = tl.where(empty, -INF, top * (1.0 / spec.unit) + tl.log2(safe) * LN2)
    tl.store(lse_ptr + row_at, lse, mask=rows < spec.q_len)
