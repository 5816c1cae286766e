"""The kernels of norms in Triton: rows are read once, and everything of them is computed in registers.

No two programs add to the same number, so gradients are the same bits in each run.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x_ptr, residual_ptr, scale_ptr, bias_ptr, normed_ptr, summed_ptr, mean_ptr, rstd_ptr, spec: tl.constexpr
):
    """Norm, sum with the residual, and statistics of some rows."""
    block_m: tl.constexpr = spec.block_m
    block_f: tl.constexpr = spec.block_f
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    columns = tl.arange(0, block_f)
    live, real = rows < spec.rows, columns < spec.features
    inside = live[:, None] & real[None, :]
    at = rows.to(tl.int64)[:, None] * spec.features
    x = _total(x_ptr, residual_ptr, summed_ptr, at + columns[None, :], inside, spec)
    if spec.has_residual:
        tl.store(summed_ptr + at + columns[None, :], x, inside)
    x = x.to(tl.float32)
    if spec.centred:  # differences from the first number have an exact mean where all numbers are equal
        first = _total(x_ptr, residual_ptr, summed_ptr, at, live[:, None], spec).to(tl.float32)
        mean = first + tl.sum(tl.where(inside, x - first, 0.0), 1, keep_dims=True) / spec.features
        tl.store(mean_ptr + rows[:, None], mean, live[:, None])
        x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / spec.features + spec.epsilon)
    tl.store(rstd_ptr + rows[:, None], rstd, live[:, None])
    normed = x * rstd
    if spec.has_scale:
        normed *= tl.load(scale_ptr + columns, real, 0.0).to(tl.float32)[None, :]
    if spec.has_bias:
        normed += tl.load(bias_ptr + columns, real, 0.0).to(tl.float32)[None, :]
    tl.store(normed_ptr + at + columns[None, :], normed, inside)


@triton.jit
def _total(x_ptr, residual_ptr, summed_ptr, at, inside, spec: tl.constexpr):
    """The numbers that are normed: with a residual the sum, as it is returned."""
    x = tl.load(x_ptr + at, inside, 0.0)
    if spec.has_residual:
        x = x.to(tl.float32) + tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
        x = x.to(summed_ptr.dtype.element_ty)
    return x


@triton.jit
def norm_backward(
    total_ptr, scale_ptr, mean_ptr, rstd_ptr, dnormed_ptr, dsummed_ptr, dtotal_ptr, dscale_ptr, dbias_ptr,
    spec: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows, and what they add to those of scale and bias: `(programs, features)`."""
    block_m: tl.constexpr = spec.block_m
    block_f: tl.constexpr = spec.block_f
    program = tl.program_id(0)
    columns = tl.arange(0, block_f)
    real = columns < spec.features
    weight = tl.full((1, block_f), 1.0, tl.float32)
    if spec.has_scale:
        weight = tl.load(scale_ptr + columns, real, 0.0).to(tl.float32)[None, :]
    dscale = tl.zeros((block_m, block_f), tl.float32)
    dbias = tl.zeros((block_m, block_f), tl.float32)
    for start in range(program * spec.span, tl.minimum((program + 1) * spec.span, spec.rows), block_m):
        rows = start + tl.arange(0, block_m)
        live = (rows < spec.rows)[:, None]
        inside = live & real[None, :]
        at = rows.to(tl.int64)[:, None] * spec.features + columns[None, :]
        away = tl.load(total_ptr + at, inside, 0.0).to(tl.float32)
        grad = tl.load(dnormed_ptr + at, inside, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows[:, None], live, 0.0)
        if spec.centred:
            away = tl.where(inside, away - tl.load(mean_ptr + rows[:, None], live, 0.0), 0.0)
        product = grad * away
        if spec.want_scale:
            dscale += product * rstd
        if spec.want_bias:
            dbias += grad
        if spec.want_rows:
            drstd = tl.sum(product * weight, 1, keep_dims=True)
            dtotal = grad * weight - away * (drstd * rstd / spec.features * rstd)
            if spec.centred:
                dtotal -= tl.sum(grad * weight, 1, keep_dims=True) / spec.features
            dtotal *= rstd
            if spec.has_dsummed:
                dtotal += tl.load(dsummed_ptr + at, inside, 0.0).to(tl.float32)
            tl.store(dtotal_ptr + at, dtotal, inside)
    if spec.want_scale:
        tl.store(dscale_ptr + program.to(tl.int64) * spec.features + columns, tl.sum(dscale, 0), real)
    if spec.want_bias:
        tl.store(dbias_ptr + program.to(tl.int64) * spec.features + columns, tl.sum(dbias, 0), real)
