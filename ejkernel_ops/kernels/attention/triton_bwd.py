"""The backward kernels of attention in Triton: queries, keys and values, and bias, each in one kernel of its own.

No two programs add to the same number, so gradients are the same bits in each run. The first one leaves two numbers
of each query for the others, both `(batch, heads, q_len)`: the log-sum-exp in units of rows, `+inf` for queries that
see nothing, and `delta`, the mean of the gradient of the probabilities.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# A constant has the attributes of its value, and Triton unrolls what Python could not iterate over.

import triton
import triton.language as tl

from .triton_tile import (
    INF,
    block_range,
    in_units,
    kept,
    key_limits,
    load_rows,
    load_tile,
    logits,
    mask_ahead,
    mask_words,
    offset_and_length,
    phase_of,
    probabilities,
    program,
    query_limits,
    seen_keys,
    shown,
    visible_keys,
    visible_queries,
)


@triton.jit
def attention_backward_q(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, offset_ptr, q_ids_ptr, kv_ids_ptr, lengths_ptr, seed_ptr, ranges_ptr,
    hidden_ptr, dout_ptr, out_ptr, lse_ptr, dlse_ptr, dq_ptr, row_lse_ptr, delta_ptr, spec: tl.constexpr,
):  # fmt: skip
    """Gradients of queries: one program for each block of queries of a head, tiles of queries by keys.

    Takes the log-sum-exp and its cotangent `(batch, q_len, heads)`.
    """
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
    sum_at = (batch * spec.heads + head) * spec.q_len + rows

    offset, kv_len = offset_and_length(offset_ptr, lengths_ptr, batch, spec)
    last_row = tl.minimum(first_row + block_q, spec.q_len) - 1
    begin, end, inner_begin, inner_end = key_limits(first_row, last_row, offset, kv_len, spec)
    ranges_ptr += batch * spec.range_strides[0] + head * spec.range_strides[1] + block * spec.range_strides[2]
    first, inner, outer, last = block_range(begin, end, inner_begin, inner_end, ranges_ptr, block_kv, spec)

    given = tl.load(lse_ptr + row_at, mask=rows < spec.q_len, other=-INF)
    live = rows < spec.q_len
    if spec.dead_rows:  # what they hold must reach nothing
        live = given > -INF
    q_at = q_ptr + row_at[:, None] * spec.head_dim + d[None, :]
    q = tl.load(q_at, mask=live[:, None] & (d < spec.head_dim)[None, :], other=0.0)
    dout_at = dout_ptr + row_at[:, None] * spec.v_dim + e[None, :]
    dout = tl.load(dout_at, mask=live[:, None] & (e < spec.v_dim)[None, :], other=0.0)
    out_at = out_ptr + row_at[:, None] * spec.v_dim + e[None, :]
    out = tl.load(out_at, mask=live[:, None] & (e < spec.v_dim)[None, :], other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if spec.has_dlse:
        delta -= tl.load(dlse_ptr + row_at, mask=live, other=0.0)
    lse = tl.where(given > -INF, in_units(given, spec), INF)
    tl.store(row_lse_ptr + sum_at, lse, mask=rows < spec.q_len)
    tl.store(delta_ptr + sum_at, delta, mask=rows < spec.q_len)
    k_ptr += (batch * spec.kv_len * spec.kv_heads + kv_head) * spec.head_dim
    v_ptr += (batch * spec.kv_len * spec.kv_heads + kv_head) * spec.v_dim
    bias_ptr += batch * spec.bias_strides[0] + head * spec.bias_strides[1]
    mask_ptr += batch * spec.mask_strides[0] + head * spec.mask_strides[1]
    q_ids = rows
    if spec.has_ids:
        q_ids = tl.load(q_ids_ptr + batch * spec.q_len + rows, mask=rows < spec.q_len, other=-1)

    dq = tl.zeros([block_q, block_d], tl.float32)
    for phase in tl.static_range(3):
        if spec.want_dq and spec.key_phases[phase]:
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
                v_at = v_ptr + cols[None, :] * (spec.kv_heads * spec.v_dim) + e[:, None]
                v = load_tile(v_at, e[:, None], unseen[None, :], spec.v_dim, end, spec.padded_e, phase != 1)
                if spec.has_mask:
                    ahead = mask_ahead(mask_ptr, ranges_ptr, rows, spec.q_len, j + 1, spec.kv_len, spec.ragged_q,
                                       block_kv, spec)  # fmt: skip
                products = tl.dot(q, k, input_precision=spec.precision)
                scores, slope = logits(products, bias_ptr, rows[:, None], cols[None, :], phase != 1 or spec.ragged_q,
                                       spec)  # fmt: skip
                if spec.has_mask:
                    if phase != 1 or not whole:
                        scores = shown(scores, words, j, block_kv)
                    words, whole = ahead
                probs = probabilities(scores, lse[:, None], spec)
                if phase != 1:
                    seen = visible_keys(rows, j * block_kv, offset, end, q_ids, kv_ids, spec)
                    probs = tl.where(seen, probs, 0.0)
                dprobs = tl.dot(dout, v, input_precision=spec.precision)
                if spec.threshold > 0:
                    keep = kept(seed_ptr + batch * 3, head, first_row, j * block_kv, spec)
                    dprobs = tl.where(keep, dprobs * (1.0 / spec.keep), 0.0)
                dscores = probs * (dprobs - delta[:, None]) * slope
                dq = tl.dot(dscores.to(k.dtype), tl.trans(k), dq, input_precision=spec.precision)

    if spec.want_dq:
        dq_at = dq_ptr + row_at[:, None] * spec.head_dim + d[None, :]
        stored = (rows < spec.q_len)[:, None] & (d < spec.head_dim)[None, :]
        tl.store(dq_at, (dq * spec.scale).to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit
def attention_backward_kv(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, offset_ptr, q_ids_ptr, kv_ids_ptr, lengths_ptr, seed_ptr, ranges_ptr,
    hidden_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, spec: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values: one program for each block of keys of a key head, tiles of keys by queries."""
    block_q: tl.constexpr = spec.block_q
    block_kv: tl.constexpr = spec.block_kv
    block_d: tl.constexpr = spec.block_d
    block_e: tl.constexpr = spec.block_e
    num_blocks: tl.constexpr = (spec.kv_len + block_kv - 1) // block_kv
    group: tl.constexpr = spec.heads // spec.kv_heads
    block, kv_head, batch = program(num_blocks, spec.kv_heads, spec)
    first_col = block * block_kv
    cols = first_col + tl.arange(0, block_kv)
    d, e = tl.arange(0, block_d), tl.arange(0, block_e)
    col_at = (batch * spec.kv_len + cols) * spec.kv_heads + kv_head

    offset, kv_len = offset_and_length(offset_ptr, lengths_ptr, batch, spec)
    last_col = tl.minimum(first_col + block_kv, kv_len) - 1
    begin, end, inner_begin, inner_end = query_limits(first_col, last_col, offset, spec)
    if spec.has_lengths:
        end = tl.where(first_col < kv_len, end, 0)
    ranges_ptr += batch * spec.range_strides[0] + kv_head * spec.range_strides[1] + block * spec.range_strides[2]
    first, inner, outer, last = block_range(begin, end, inner_begin, inner_end, ranges_ptr, block_q, spec)

    # Keys that no query sees may hold anything: they are not loaded.
    seen = cols < kv_len
    if spec.right >= 0:
        seen = seen & (cols <= spec.q_len - 1 + offset + spec.right)
    if spec.left >= 0:
        seen = seen & (cols >= offset - spec.left)
    kv_ids = cols
    if spec.has_ids:
        kv_ids = tl.load(kv_ids_ptr + batch * spec.kv_len + cols, mask=cols < spec.kv_len, other=-1)
        seen = seen & (kv_ids >= 0)
    if spec.has_mask:
        seen = seen & (seen_keys(hidden_ptr, cols, batch, kv_head, spec) < spec.kv_len)
    k_at = k_ptr + col_at[:, None] * spec.head_dim + d[None, :]
    k = tl.load(k_at, mask=seen[:, None] & (d < spec.head_dim)[None, :], other=0.0)
    v_at = v_ptr + col_at[:, None] * spec.v_dim + e[None, :]
    v = tl.load(v_at, mask=seen[:, None] & (e < spec.v_dim)[None, :], other=0.0)

    dk = tl.zeros([block_kv, block_d], tl.float32)
    dv = tl.zeros([block_kv, block_e], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        q_head = q_ptr + (batch * spec.q_len * spec.heads + head) * spec.head_dim
        dout_head = dout_ptr + (batch * spec.q_len * spec.heads + head) * spec.v_dim
        sums = (batch * spec.heads + head) * spec.q_len
        bias_head = bias_ptr + batch * spec.bias_strides[0] + head * spec.bias_strides[1]
        mask_head = mask_ptr + batch * spec.mask_strides[0] + head * spec.mask_strides[1]
        for phase in tl.static_range(3):
            if spec.query_phases[phase]:
                lower, upper = phase_of(phase, first, inner, outer, last)
                if spec.has_mask:
                    words, whole = mask_ahead(mask_head, ranges_ptr, cols, spec.kv_len, lower, spec.q_len,
                                              spec.ragged_kv, block_q, spec)  # fmt: skip
                for i in range(lower, upper):
                    rows = i * block_q + tl.arange(0, block_q)
                    lse = load_rows(lse_ptr + sums + rows, rows, spec.q_len, phase != 1 and spec.ragged_q)
                    unseen = rows
                    if phase != 1 and spec.dead_rows:  # what they hold must reach nothing
                        unseen = tl.where(lse == INF, spec.q_len, rows)
                    q_at = q_head + rows[None, :] * (spec.heads * spec.head_dim) + d[:, None]
                    q = load_tile(q_at, d[:, None], unseen[None, :], spec.head_dim, spec.q_len,
                                  spec.padded_d, phase != 1 and (spec.ragged_q or spec.dead_rows))  # fmt: skip
                    if spec.has_mask:
                        ahead = mask_ahead(mask_head, ranges_ptr, cols, spec.kv_len, i + 1, spec.q_len,
                                           spec.ragged_kv, block_q, spec)  # fmt: skip
                    products = tl.dot(k, q, input_precision=spec.precision)
                    scores, slope = logits(products, bias_head, rows[None, :], cols[:, None],
                                           phase != 1 or spec.ragged_kv, spec)  # fmt: skip
                    if spec.has_mask:
                        if phase != 1 or not whole:
                            scores = shown(scores, words, i, block_q)
                        words, whole = ahead
                    probs = probabilities(scores, lse[None, :], spec)
                    if phase != 1:
                        q_ids = rows
                        if spec.has_ids:
                            q_ids = tl.load(q_ids_ptr + batch * spec.q_len + rows, mask=rows < spec.q_len, other=-1)
                        tile = visible_queries(cols, i * block_q, offset, kv_len, q_ids, kv_ids, spec)
                        probs = tl.where(tile, probs, 0.0)
                    dout_at = dout_head + rows[:, None] * (spec.heads * spec.v_dim) + e[None, :]
                    dout = load_tile(dout_at, unseen[:, None], e[None, :], spec.q_len, spec.v_dim,
                                     phase != 1 and (spec.ragged_q or spec.dead_rows), spec.padded_e)  # fmt: skip
                    weights = probs
                    if spec.threshold > 0:
                        keep = kept(seed_ptr + batch * 3, head, i * block_q, first_col, spec)
                        keep = tl.trans(keep)
                        weights = tl.where(keep, probs, 0.0)
                    if spec.want_dv:
                        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=spec.precision)
                    if spec.want_dk:
                        dprobs = tl.dot(v, tl.trans(dout), input_precision=spec.precision)
                        if spec.threshold > 0:
                            dprobs = tl.where(keep, dprobs * (1.0 / spec.keep), 0.0)
                        # Loaded no earlier than it is used: registers are short here.
                        delta = load_rows(delta_ptr + sums + rows, rows, spec.q_len, phase != 1 and spec.ragged_q)
                        dscores = probs * (dprobs - delta[None, :]) * slope
                        dk = tl.dot(dscores.to(q.dtype), tl.trans(q), dk, input_precision=spec.precision)

    stored = (cols < spec.kv_len)[:, None]
    if spec.want_dk:
        # Of a key that nobody sees the products with zeros may be infinite.
        dk = tl.where(seen[:, None], dk * spec.scale, 0.0).to(dk_ptr.dtype.element_ty)
        tl.store(dk_ptr + col_at[:, None] * spec.head_dim + d[None, :], dk, mask=stored & (d < spec.head_dim)[None, :])
    if spec.want_dv:
        dv = tl.where(seen[:, None], dv * (1.0 / spec.keep), 0.0).to(dv_ptr.dtype.element_ty)
        tl.store(dv_ptr + col_at[:, None] * spec.v_dim + e[None, :], dv, mask=stored & (e < spec.v_dim)[None, :])


@triton.jit
def attention_backward_bias(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, offset_ptr, q_ids_ptr, kv_ids_ptr, lengths_ptr, seed_ptr, _ranges_ptr,
    hidden_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr, spec: tl.constexpr, sums: tl.constexpr,
):  # fmt: skip
    """Gradient of the bias: one program for each tile of it, or for each head where it broadcasts along a length.

    `sums` is a `BiasSums`: over how many examples, heads, blocks of queries and of keys each program sums.
    """
    block_q: tl.constexpr = spec.block_q
    block_kv: tl.constexpr = spec.block_kv
    pid = tl.program_id(0)
    block_j, block_i = pid % sums.tiles[3], pid // sums.tiles[3] % sums.tiles[2]
    part_h = pid // (sums.tiles[3] * sums.tiles[2]) % sums.tiles[1]
    part_b = pid // (sums.tiles[3] * sums.tiles[2] * sums.tiles[1])
    d, e = tl.arange(0, spec.block_d), tl.arange(0, spec.block_e)
    dbias = tl.zeros([block_q, block_kv], tl.float32)
    steps = sums.each[0] * sums.each[1] * sums.each[2] * sums.each[3]
    # The same tile in all steps: hidden in all, or in none.
    if sums.each[2] * sums.each[3] == 1 and not spec.has_offset:
        last_row = tl.minimum((block_i + 1) * block_q, spec.q_len) - 1
        begin, end, _begin, _end = key_limits(block_i * block_q, last_row, spec.offset, spec.kv_len, spec)
        steps = tl.where((block_j * block_kv < end) & ((block_j + 1) * block_kv > begin), steps, 0)
    for step in range(steps):
        j = block_j * sums.each[3] + step % sums.each[3]
        i = block_i * sums.each[2] + step // sums.each[3] % sums.each[2]
        head = (part_h * sums.each[1] + step // (sums.each[3] * sums.each[2]) % sums.each[1]).to(tl.int64)
        batch = (part_b * sums.each[0] + step // (sums.each[3] * sums.each[2] * sums.each[1])).to(tl.int64)
        kv_head = head // (spec.heads // spec.kv_heads)
        rows, cols = i * block_q + tl.arange(0, block_q), j * block_kv + tl.arange(0, block_kv)
        offset, kv_len = offset_and_length(offset_ptr, lengths_ptr, batch, spec)
        last = tl.minimum((i + 1) * block_q, spec.q_len) - 1
        _begin, end_seen, _inner_begin, _inner_end = key_limits(i * block_q, last, offset, kv_len, spec)
        q_ids, kv_ids, unseen = rows, cols, cols
        if spec.has_ids:
            q_ids = tl.load(q_ids_ptr + batch * spec.q_len + rows, mask=rows < spec.q_len, other=-1)
            kv_ids = tl.load(kv_ids_ptr + batch * spec.kv_len + cols, mask=cols < spec.kv_len, other=-1)
        if spec.has_mask:
            unseen = seen_keys(hidden_ptr, cols, batch, kv_head, spec)
        sum_at = (batch * spec.heads + head) * spec.q_len + rows
        lse = load_rows(lse_ptr + sum_at, rows, spec.q_len, spec.ragged_q)
        delta = load_rows(delta_ptr + sum_at, rows, spec.q_len, spec.ragged_q)
        row_at = (batch * spec.q_len + rows)[:, None] * spec.heads + head
        col_at = (batch * spec.kv_len + cols)[None, :] * spec.kv_heads + kv_head
        # Each number is of one query and one key: what the others hold, and need not be loaded, cannot reach it.
        q = load_tile(q_ptr + row_at * spec.head_dim + d[None, :], rows[:, None], d[None, :], spec.q_len, spec.head_dim,
                      spec.ragged_q, spec.padded_d)  # fmt: skip
        k = load_tile(k_ptr + col_at * spec.head_dim + d[:, None], d[:, None], unseen[None, :], spec.head_dim,
                      spec.kv_len, spec.padded_d, spec.ragged_kv or spec.has_mask)  # fmt: skip
        dout = load_tile(dout_ptr + row_at * spec.v_dim + e[None, :], rows[:, None], e[None, :], spec.q_len, spec.v_dim,
                         spec.ragged_q, spec.padded_e)  # fmt: skip
        v = load_tile(v_ptr + col_at * spec.v_dim + e[:, None], e[:, None], unseen[None, :], spec.v_dim, spec.kv_len,
                      spec.padded_e, spec.ragged_kv or spec.has_mask)  # fmt: skip
        products = tl.dot(q, k, input_precision=spec.precision)
        bias_head = bias_ptr + batch * spec.bias_strides[0] + head * spec.bias_strides[1]
        mask_head = mask_ptr + batch * spec.mask_strides[0] + head * spec.mask_strides[1]
        scores, _slope = logits(products, bias_head, rows[:, None], cols[None, :], spec.ragged_q or spec.ragged_kv,
                                spec)  # fmt: skip
        if spec.has_mask:
            words = mask_words(mask_head, rows, spec.q_len, j, spec.ragged_q, block_kv, spec)
            scores = shown(scores, words, j, block_kv)
        probs = probabilities(scores, lse[:, None], spec)
        seen = visible_keys(rows, j * block_kv, offset, end_seen, q_ids, kv_ids, spec)
        dprobs = tl.dot(dout, v, input_precision=spec.precision)
        if spec.threshold > 0:
            keep = kept(seed_ptr + batch * 3, head, i * block_q, j * block_kv, spec)
            dprobs = tl.where(keep, dprobs * (1.0 / spec.keep), 0.0)
        live = lse < INF
        if spec.ragged_q:
            live = live & (rows < spec.q_len)
        dbias += tl.where(seen & live[:, None], probs * (dprobs - delta[:, None]), 0.0)

    rows = block_i * block_q + tl.arange(0, block_q)
    cols = block_j * block_kv + tl.arange(0, block_kv)
    rows_out, cols_out = sums.shape[2], sums.shape[3]
    dtype = dbias_ptr.dtype.element_ty
    dbias_ptr += (part_b * sums.shape[1] + part_h).to(tl.int64) * rows_out * cols_out
    if rows_out == 1 and cols_out == 1:
        tl.store(dbias_ptr, tl.sum(dbias).to(dtype))
    elif rows_out == 1:
        tl.store(dbias_ptr + cols, tl.sum(dbias, 0).to(dtype), mask=cols < cols_out)
    elif cols_out == 1:
        tl.store(dbias_ptr + rows, tl.sum(dbias, 1).to(dtype), mask=rows < rows_out)
    else:
        dbias_at = dbias_ptr + rows.to(tl.int64)[:, None] * cols_out + cols[None, :]
        tl.store(dbias_at, dbias.to(dtype), mask=(rows < rows_out)[:, None] & (cols < cols_out)[None, :])
