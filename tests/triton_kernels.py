"""Triton kernels that tests launch, on a GPU or through the interpreter."""

import triton
import triton.language as tl

TWO: tl.constexpr = tl.constexpr(2)


@triton.jit
def scale(x_ptr, size, out_ptr, STRIDE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Doubles each `STRIDE`-th block, into `out_ptr` or far from it."""
    at = tl.program_id(0) * STRIDE * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size)
    tl.store(out_ptr + at.to(tl.int64) + SHIFT, 2.0 * x, mask=at < size)


@triton.jit
def add(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """`x + y`, reading `SHIFT` elements further on."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + SHIFT, mask=at < SIZE, other=0.0)
    y = tl.load(y_ptr + at + SHIFT, mask=at < SIZE, other=0.0)
    tl.store(out_ptr + at, x + y, mask=at < SIZE)


@triton.jit
def copy(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores what it should not have loaded, too."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < SIZE))


@triton.jit
def write_then_read(x_ptr, out_ptr, seen_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes ones, then reads the operand."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1.0, mask=at < SIZE)
    tl.store(seen_ptr + at, tl.load(x_ptr + at, mask=at < SIZE), mask=at < SIZE)


@triton.jit
def store_at(out_ptr, INDEX: tl.constexpr):
    """Stores one number."""
    tl.store(out_ptr + INDEX, 1.0)


@triton.jit
def store_to_operand(x_ptr, out_ptr):
    """What no JAX program may do."""
    tl.store(x_ptr, 1.0)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    """`a @ b.T` of two square tiles."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    out = tl.dot(a, tl.trans(b), tl.zeros([N, N], tl.float32), input_precision=PRECISION)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty))


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, less_ptr, sum_ptr, max_ptr, N: tl.constexpr):
    """Elementwise operations and reductions, in the type of the operands."""
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.where(x < y, x * y - x, (x + y).to(tl.float32).to(x.dtype)))
    tl.store(less_ptr + at, x < y)
    tl.store(sum_ptr, tl.sum(x, 0))
    tl.store(max_ptr, tl.max(y))


@triton.jit
def top_two(x):
    """Largest value, and largest of the rest."""
    top = tl.max(x, 1)
    return top, tl.max(tl.where(x == top[:, None], -float("inf"), x), axis=1)


@triton.jit
def row_tops(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A helper that returns a tuple; NaN is no maximum."""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    first, second = top_two(tl.load(x_ptr + r[:, None] * COLS + c[None, :]))
    tl.store(out_ptr + r, first)
    tl.store(out_ptr + ROWS + r, second)


@triton.jit
def members(x_ptr, out_ptr, N: tl.constexpr):
    """What values can do themselves, and Python's `min` and `max`."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    tl.store(out_ptr, (x.T * x).sum())
    tl.store(out_ptr + 1, max(x.min(), min(x.max(), 0.5)))
    tl.store(out_ptr + 2, tl.sum(tl.full([min(N, 8)], 1.0, tl.float32)))


@triton.jit
def philox(seed_ptr, out_ptr, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Random bits of four words for each of `N` counters."""
    c0 = tl.arange(0, N).to(tl.uint32)
    c1, c2, c3 = c0 * 0, c0 * 0, c0 * 0
    k0, k1 = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    for _ in tl.static_range(ROUNDS):
        hi0, lo0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        hi1, lo1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [4 * N])
    tl.store(out_ptr + tl.arange(0, 4 * N), words)


@triton.jit
def loops(bounds_ptr, x_ptr, out_ptr, STAGES: tl.constexpr):
    """Sums `x[lo:hi]` three times over: in a pipelined, a plain and a `while` loop."""
    tl.static_assert(STAGES > 0)
    lo, hi = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    total = 0.0
    for i in tl.range(lo, hi, num_stages=STAGES):
        total += tl.load(x_ptr + i.to(tl.int64))
    for i in range(tl.maximum(lo, 0), tl.minimum(hi, 1 << 20), TWO):
        total += tl.load(x_ptr + i)
        if i + 1 < hi:
            total += tl.load(x_ptr + i + 1)
    while lo < hi:
        total += tl.load(x_ptr + lo)
        lo += 1
    tl.store(out_ptr, total)


@triton.jit
def count(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    """A histogram by atomic additions; for one program."""
    tl.store(out_ptr + tl.arange(0, BINS), tl.zeros([BINS], tl.float32))
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.atomic_add(out_ptr + x, tl.full([N], 1.0, tl.float32), mask=x >= 0)


@triton.jit
def block_condition(x_ptr, out_ptr, N: tl.constexpr):
    """No Triton: a block decides a branch."""
    x = tl.load(x_ptr + tl.arange(0, N))
    if x > 0:
        tl.store(out_ptr + tl.arange(0, N), x)


@triton.jit
def if_bit(x_ptr, words_ptr, bits_ptr, out_ptr, TEXT: tl.constexpr, N: tl.constexpr):
    """Inline assembly of three operands."""
    at = tl.arange(0, N)
    x, word, bit = tl.load(x_ptr + at), tl.load(words_ptr + at), tl.load(bits_ptr + at)
    out = tl.inline_asm_elementwise(TEXT, "=f,f,r,r", [x, word, bit], tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + at, out)
