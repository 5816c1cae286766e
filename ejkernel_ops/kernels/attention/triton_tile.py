"""What the Triton kernels of attention share: the logits of a tile, what each query sees, and dropout's bits.

`rows` and `cols` are query and key numbers of a tile, one of them `[:, None]` and the other `[None, :]`, so that
the same code serves tiles of queries by keys and of keys by queries. `spec` is a `TritonSpec`: what it turns off is
not compiled.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# A constant has the attributes of its value, and Triton unrolls what Python could not iterate over.

import triton
import triton.language as tl

from ...triton_assembly import (
    BFLOAT16_PAIR,
    BFLOAT16_PAIR_OPERANDS,
    IF_BIT,
    IF_BIT_OPERANDS,
    RECIPROCAL,
    RECIPROCAL_OPERANDS,
)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LARGEST: tl.constexpr = tl.constexpr(3.0e38)  # size of a logit in base 2 that is not infinite
INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def load_tile(at, rows, cols, num_rows, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile, with zeros where `rows` or `cols` lie outside; a side that cannot is not checked."""
    if ROWS and COLS:
        return tl.load(at, mask=(rows < num_rows) & (cols < num_cols), other=0.0)
    elif ROWS:
        return tl.load(at, mask=rows < num_rows, other=0.0)
    elif COLS:
        return tl.load(at, mask=cols < num_cols, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_rows(at, rows, num_rows, CHECKED: tl.constexpr):
    """Numbers of some rows, with zeros where `rows` lie outside; not checked where they cannot."""
    if CHECKED:
        return tl.load(at, mask=rows < num_rows, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def bias_tile(at, rows, cols, CHECKED: tl.constexpr, spec: tl.constexpr):
    """A tile of a bias in float32, with zeros outside of the lengths; not checked where it cannot lie outside."""
    if CHECKED:
        bias = tl.load(at, mask=(rows < spec.q_len) & (cols < spec.kv_len), other=0)
    else:
        bias = tl.load(at)
    if bias.dtype == tl.bfloat16 and cols.shape[0] == 1:  # of keys by queries a thread holds no neighbours
        return tl.inline_asm_elementwise(
            BFLOAT16_PAIR, BFLOAT16_PAIR_OPERANDS, [bias], tl.float32, is_pure=True, pack=2
        )
    else:
        return bias.to(tl.float32)


@triton.jit
def program(num_blocks, heads, spec: tl.constexpr):
    """The block, head and example of this program."""
    pid = tl.program_id(0)
    if spec.batch_first:
        batch, pid = pid % spec.batch, pid // spec.batch
        return pid % num_blocks, (pid // num_blocks).to(tl.int64), batch.to(tl.int64)
    else:
        return pid % num_blocks, (pid // num_blocks % heads).to(tl.int64), (pid // (num_blocks * heads)).to(tl.int64)


@triton.jit
def in_units(x, spec: tl.constexpr):
    """Finite natural logarithms in the units of rows, finite too."""
    if spec.unit == 1.0:
        return x
    else:
        return tl.minimum(tl.maximum(x * spec.unit, -LARGEST), LARGEST)


@triton.jit
def logits(products, bias_ptr, rows, cols, CHECKED: tl.constexpr, spec: tl.constexpr):
    """What `factor` scales, products or logits, and the slope of the soft cap."""
    slope = 1.0
    if spec.soft_cap > 0:  # tanh(x) is 1 - 2 * low: far out 1 - 2 / inf or 1 - 2 / 1
        more = 1.0 + tl.exp2(products * (2.0 * LOG2E * spec.scale / spec.soft_cap))
        low = tl.inline_asm_elementwise(RECIPROCAL, RECIPROCAL_OPERANDS, [more], tl.float32, is_pure=True, pack=1)
        slope = 4.0 * (low - low * low)  # pyright: ignore[reportOperatorIssue]
        products = spec.soft_cap - 2.0 * spec.soft_cap * low
    elif spec.transformed:
        products = products * spec.scale
    if spec.has_bias:
        at = bias_ptr + rows.to(tl.int64) * spec.bias_strides[2] + cols * spec.bias_strides[3]
        products += bias_tile(at, rows, cols, CHECKED, spec)
    return products, slope


@triton.jit
def mask_words(mask_ptr, rows, num_rows, block, CHECKED: tl.constexpr, BLOCK: tl.constexpr, spec: tl.constexpr):
    """The words that hold the bits of a mask for `rows` by a block of columns, 32 columns in each."""
    at = mask_ptr + rows.to(tl.int64) * spec.mask_strides[3]
    at += (block * BLOCK // 32).to(tl.int64) * spec.mask_strides[2]
    words = (load_rows(at, rows, num_rows, CHECKED),)
    for i in tl.static_range(1, BLOCK // 32):
        words = words + (load_rows(at + i * spec.mask_strides[2], rows, num_rows, CHECKED),)  # noqa: RUF005
    return words


@triton.jit
def mask_ahead(
    mask_ptr, ranges_ptr, rows, num_rows, block, num_cols: tl.constexpr, CHECKED: tl.constexpr, BLOCK: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """The words of a block, or of the last one after it, and whether the mask hides nothing of the tile.

    Loops call it for the block after theirs. What the compiler loads ahead goes through shared memory, and then there
    is no room for as many programs.
    """
    block = tl.minimum(block, (num_cols - 1) // BLOCK)
    words = mask_words(mask_ptr, rows, num_rows, block, CHECKED, BLOCK, spec)
    return words, tl.load(ranges_ptr + 4 + block // 32) >> (block % 32) & 1 != 0


@triton.jit
def shown(scores, words, block, BLOCK: tl.constexpr):
    """Scores with `-inf` where the bits of a mask hide one, of a block of columns."""
    places = tl.arange(0, BLOCK)[None, :].to(tl.uint32)
    word = words[0][:, None]
    if BLOCK < 32:
        word = word >> (block * BLOCK % 32).to(tl.uint32)
    for i in tl.static_range(1, BLOCK // 32):
        word = tl.where(places // 32 == i, words[i][:, None], word)
    # A thread holds pairs of columns, 8 apart: of words shifted to its first pair it tests the same bits as others.
    word = word >> (places & 6)
    bits = tl.full([1, BLOCK], 1, tl.uint32) << (places & 25)
    return tl.inline_asm_elementwise(IF_BIT, IF_BIT_OPERANDS, [scores, word, bits], tl.float32, is_pure=True, pack=1)


@triton.jit
def at_most(limits, BLOCK: tl.constexpr):
    """Which columns `[0, BLOCK)` of a tile are no greater than a limit, or a limit of each row `(rows, 1)`."""
    places = tl.arange(0, BLOCK)[None, :]
    return (places & ~6) <= limits - (places & 6)  # of a thread's pairs of columns all but the first are constants


@triton.jit
def at_least(limits, BLOCK: tl.constexpr):
    """Which columns are no less, the same."""
    places = tl.arange(0, BLOCK)[None, :]
    return (places & ~6) >= limits - (places & 6)


@triton.jit
def visible_keys(rows, first_col, offset, kv_len, q_ids, kv_ids, spec: tl.constexpr):
    """Which keys of a tile of queries by keys at an edge each of its queries sees, but for the mask."""
    block_kv: tl.constexpr = spec.block_kv
    seen = tl.full([1, 1], True, tl.int1)
    limits = rows[:, None] + (offset - first_col)
    if spec.right >= 0:
        seen = seen & at_most(limits + spec.right, block_kv)
    if spec.left >= 0:
        seen = seen & at_least(limits - spec.left, block_kv)
    if spec.short_keys:
        seen = seen & at_most(kv_len - 1 - first_col, block_kv)
    if spec.has_ids:
        seen = seen & (q_ids[:, None] == kv_ids[None, :]) & (q_ids >= 0)[:, None]
    return seen


@triton.jit
def visible_queries(cols, first_row, offset, kv_len, q_ids, kv_ids, spec: tl.constexpr):
    """Which queries of a tile of keys by queries at an edge see each of its keys, the same."""
    block_q: tl.constexpr = spec.block_q
    seen = tl.full([1, 1], True, tl.int1)
    limits = cols[:, None] - (offset + first_row)
    if spec.right >= 0:
        seen = seen & at_least(limits - spec.right, block_q)
    if spec.left >= 0:
        seen = seen & at_most(limits + spec.left, block_q)
    if spec.short_keys:
        seen = seen & (cols < kv_len)[:, None]
    if spec.ragged_q:
        seen = seen & at_most(spec.q_len - 1 - first_row, block_q)
    if spec.has_ids:
        seen = seen & (q_ids[None, :] == kv_ids[:, None]) & (q_ids >= 0)[None, :]
    return seen


@triton.jit
def probabilities(scores, lse, spec: tl.constexpr):
    """Probabilities of a tile from scores and the log-sum-exp in units of rows, broadcast to it."""
    exponents = scores * spec.factor - lse
    if spec.has_bias:  # of great size the difference is off by more than it can be
        exponents = tl.minimum(exponents, 0.0)
    return tl.exp2(exponents * spec.base)


@triton.jit
def seen_keys(hidden_ptr, cols, batch, kv_head, spec: tl.constexpr):
    """Key numbers, with one past the last key in place of keys that the mask hides from every query."""
    at = hidden_ptr + batch * spec.hidden_strides[0] + kv_head * spec.hidden_strides[1] + cols * spec.hidden_strides[2]
    return tl.where(tl.load(at, mask=cols < spec.kv_len, other=0) != 0, spec.kv_len, cols)


@triton.jit
def offset_and_length(offset_ptr, lengths_ptr, batch, spec: tl.constexpr):
    """Position of the first query among the keys, and number of keys, of an example."""
    offset = spec.offset
    kv_len = spec.kv_len
    if spec.has_offset:
        offset = tl.load(offset_ptr + batch)
    if spec.has_lengths:
        kv_len = tl.minimum(tl.load(lengths_ptr + batch), spec.kv_len)
    return offset, kv_len


@triton.jit
def key_limits(first, last, offset, kv_len, spec: tl.constexpr):
    """Keys `[begin, end)` that some of the queries `first` to `last` see, and `[inner_begin, inner_end)` that all see.

    As far as window, causality and lengths go.
    """
    begin, end, inner_begin, inner_end = 0, kv_len, 0, kv_len
    if spec.right >= 0:
        end = tl.minimum(end, last + offset + spec.right + 1)
        inner_end = tl.minimum(inner_end, first + offset + spec.right + 1)
    if spec.left >= 0:
        begin = tl.maximum(begin, first + offset - spec.left)
        inner_begin = tl.maximum(inner_begin, last + offset - spec.left)
    return begin, tl.maximum(end, 0), inner_begin, tl.maximum(inner_end, 0)


@triton.jit
def query_limits(first, last, offset, spec: tl.constexpr):
    """The same for the queries that see some, and all, of the keys `first` to `last`."""
    begin, end, inner_begin, inner_end = 0, spec.q_len, 0, spec.q_len
    if spec.right >= 0:
        begin = tl.maximum(begin, first - offset - spec.right)
        inner_begin = tl.maximum(inner_begin, last - offset - spec.right)
    if spec.left >= 0:
        end = tl.minimum(end, last - offset + spec.left + 1)
        inner_end = tl.minimum(inner_end, first - offset + spec.left + 1)
    return begin, tl.maximum(end, 0), inner_begin, tl.maximum(inner_end, 0)


@triton.jit
def block_range(begin, end, inner_begin, inner_end, ranges_ptr, BLOCK: tl.constexpr, spec: tl.constexpr):
    """Blocks `[first, inner)` at an edge, `[inner, outer)` visible but for the mask, `[outer, last)` at an edge.

    Between the edges there is no key that a mask hides from every query, and in tiles of keys by queries no query that
    sees nothing: what they hold is loaded without a look.
    """
    first, last = begin // BLOCK, tl.cdiv(end, BLOCK)
    inner, outer = tl.cdiv(inner_begin, BLOCK), inner_end // BLOCK
    if spec.has_ranges:
        first, last = tl.maximum(first, tl.load(ranges_ptr)), tl.minimum(last, tl.load(ranges_ptr + 1))
        inner, outer = tl.maximum(inner, tl.load(ranges_ptr + 2)), tl.minimum(outer, tl.load(ranges_ptr + 3))
    last = tl.maximum(last, first)
    inner = tl.minimum(tl.maximum(inner, first), last)
    outer = tl.minimum(tl.maximum(outer, inner), last)
    return first, inner, outer, last


@triton.jit
def phase_of(phase: tl.constexpr, first, inner, outer, last):
    """The blocks of one of the three phases: at the first edge, between the edges, at the last one."""
    if phase == 0:
        return first, inner
    elif phase == 1:
        return inner, outer
    else:
        return outer, last


@triton.jit
def kept(seed_ptr, head, first_row, first_col, spec: tl.constexpr):
    """Which probabilities of a tile of queries by keys dropout keeps: `keep_bits` of `dropout.py`, bit for bit."""
    block_q: tl.constexpr = spec.block_q
    block_kv: tl.constexpr = spec.block_kv
    rows = (first_row + tl.arange(0, block_q)).to(tl.uint32)[:, None]
    quads = (first_col // 4 + tl.arange(0, block_kv // 4)).to(tl.uint32)[None, :]
    zeros = tl.zeros([block_q, block_kv // 4], tl.uint32)
    k0, k1, first_head = tl.load(seed_ptr), tl.load(seed_ptr + 1), tl.load(seed_ptr + 2)
    c0, c1, c2, c3 = quads + zeros, rows + zeros, head.to(tl.uint32) + first_head + zeros, zeros
    for _ in tl.static_range(10):
        hi0, lo0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        hi1, lo1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # word 2 a + b of a quad at [:, quad, a, b]
    return tl.reshape(words, [block_q, block_kv]) >= spec.threshold
