"""Triton kernels that tests launch; only imported where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, size, out_ptr, STRIDE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Doubles each `STRIDE`-th block, into `out_ptr` or far from it."""
    at = tl.program_id(0) * STRIDE * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size)
    tl.store(out_ptr + at.to(tl.int64) + SHIFT, 2.0 * x, mask=at < size)
