"""The kernel of rotary position embedding in Triton, of either direction: each number read and written once.

Source: RoFormer, Su et al. 2021, arXiv:2104.09864.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def turn(x_ptr, table_ptr, out_ptr, spec: tl.constexpr):
    """Turns the pairs of a tile of heads; the table has cosines, then sines, `(2, tokens, pairs)`."""
    block_m: tl.constexpr = spec.block_m
    block_pairs: tl.constexpr = spec.block_pairs
    block_rest: tl.constexpr = spec.block_rest
    step: tl.constexpr = spec.step
    gap: tl.constexpr = spec.gap
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    pairs = tl.arange(0, block_pairs)
    inside = (rows < spec.rows)[:, None] & (pairs < spec.pairs)[None, :]
    angles = (rows // spec.heads % spec.tokens)[:, None] * spec.pairs + pairs[None, :]
    cos = tl.load(table_ptr + angles, inside, 0.0)
    sin = tl.load(table_ptr + spec.tokens * spec.pairs + angles, inside, 0.0)
    if spec.back:
        sin = -sin
    at = rows.to(tl.int64)[:, None] * spec.head_dim
    first_at = at + pairs[None, :] * step
    first = tl.load(x_ptr + first_at, inside, 0.0).to(tl.float32)
    second = tl.load(x_ptr + first_at + gap, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + first_at, first * cos - second * sin, inside)
    tl.store(out_ptr + first_at + gap, second * cos + first * sin, inside)
    if spec.head_dim > 2 * spec.pairs:
        rest = 2 * spec.pairs + tl.arange(0, block_rest)
        inside = (rows < spec.rows)[:, None] & (rest < spec.head_dim)[None, :]
        tl.store(out_ptr + at + rest[None, :], tl.load(x_ptr + at + rest[None, :], inside, 0.0), inside)
