"""The kernels of activations of linear maps, gated or not, in Triton: what products leave to do, each number read once.

No two programs add to the same number, so gradients are the same bits in each run.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from ..triton_assembly import RECIPROCAL, RECIPROCAL_OPERANDS


@triton.jit
def activation_forward(product_ptr, bias_ptr, up_ptr, up_bias_ptr, out_ptr, spec: tl.constexpr):
    """The activation of a tile of products with their bias, times the other product of a gated map."""
    block_m: tl.constexpr = spec.block_m
    block_n: tl.constexpr = spec.block_n
    tiles: tl.constexpr = (spec.features + block_n - 1) // block_n
    columns = tl.program_id(0) % tiles * block_n + tl.arange(0, block_n)
    rows = tl.program_id(0) // tiles * block_m + tl.arange(0, block_m)
    inside = (rows < spec.rows)[:, None] & (columns < spec.features)[None, :]
    at = rows.to(tl.int64)[:, None] * spec.features + columns[None, :]
    x = _with_bias(tl.load(product_ptr + at, inside, 0.0), bias_ptr, columns, spec.has_bias, spec)
    out = activation(x, spec)
    if spec.gated:
        out *= _with_bias(tl.load(up_ptr + at, inside, 0.0), up_bias_ptr, columns, spec.has_up_bias, spec)
    tl.store(out_ptr + at, out, inside)


@triton.jit
def activation_backward(
    product_ptr, bias_ptr, up_ptr, up_bias_ptr, dout_ptr,
    grad_ptr, dup_ptr, out_ptr, dbias_ptr, dup_bias_ptr, spec: tl.constexpr,
):  # fmt: skip
    """The gradients of products, and what `span` rows add to those of the biases: `(spans, features)`.

    Where it is wanted, what the forward has made once more, so that nobody has to keep it.
    """
    block_m: tl.constexpr = spec.block_m
    block_n: tl.constexpr = spec.block_n
    tiles: tl.constexpr = (spec.features + block_n - 1) // block_n
    columns = tl.program_id(0) % tiles * block_n + tl.arange(0, block_n)
    span = tl.program_id(0) // tiles
    total = tl.zeros((block_m, block_n), tl.float32)
    up_total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(span * spec.span, tl.minimum((span + 1) * spec.span, spec.rows), block_m):
        rows = start + tl.arange(0, block_m)
        inside = (rows < spec.rows)[:, None] & (columns < spec.features)[None, :]
        at = rows.to(tl.int64)[:, None] * spec.features + columns[None, :]
        x = _with_bias(tl.load(product_ptr + at, inside, 0.0), bias_ptr, columns, spec.has_bias, spec)
        dout = tl.load(dout_ptr + at, inside, 0.0).to(tl.float32)
        grad = dout * derivative(x, spec)
        if spec.gated or spec.want_out:
            out = activation(x, spec)
        if spec.gated:
            up = _with_bias(tl.load(up_ptr + at, inside, 0.0), up_bias_ptr, columns, spec.has_up_bias, spec)
            grad *= up
            dup = dout * out
            out *= up
            tl.store(dup_ptr + at, dup, inside)
            if spec.want_up_bias:
                up_total += tl.where(inside, dup, 0.0)
        tl.store(grad_ptr + at, grad, inside)
        if spec.want_out:
            tl.store(out_ptr + at, out, inside)
        if spec.want_bias:
            total += tl.where(inside, grad, 0.0)
    at = span.to(tl.int64) * spec.features + columns
    if spec.want_bias:
        tl.store(dbias_ptr + at, tl.sum(total, 0), columns < spec.features)
    if spec.want_up_bias:
        tl.store(dup_bias_ptr + at, tl.sum(up_total, 0), columns < spec.features)


@triton.jit
def _with_bias(product, bias_ptr, columns, has_bias: tl.constexpr, spec: tl.constexpr):
    """Products in float32, with their bias."""
    x = product.to(tl.float32)
    if has_bias:
        x += tl.load(bias_ptr + columns, columns < spec.features, 0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def activation(x, spec: tl.constexpr):
    """An activation by its name in `ACTIVATIONS`."""
    name: tl.constexpr = spec.activation
    if name == "gelu":
        y = 0.5 * x * (1 + _tanh(_SQRT_2_PI * (x + _CUBIC * x * x * x)))
    elif name == "gelu_exact":
        y = 0.5 * x * (1 + tl.erf(x * _SQRT_HALF))
    elif name == "silu":
        y = x * _sigmoid(x)
    else:
        y = tl.where(x < 0, 0.0, x)  # NaN stays
        if name == "squared_relu":
            y *= y
    return y


@triton.jit
def derivative(x, spec: tl.constexpr):
    """The derivative of an activation."""
    name: tl.constexpr = spec.activation
    if name == "gelu":
        tanh = _tanh(_SQRT_2_PI * (x + _CUBIC * x * x * x))
        inner = _SQRT_2_PI * (1 + 3 * _CUBIC * x * x)
        y = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner
    elif name == "gelu_exact":
        y = 0.5 * (1 + tl.erf(x * _SQRT_HALF)) + x * tl.exp(-0.5 * x * x) * _NORMAL
    elif name == "silu":
        sigmoid = _sigmoid(x)
        y = sigmoid * (1 + x * (1 - sigmoid))
    elif name == "squared_relu":
        y = 2 * tl.where(x < 0, 0.0, x)
    else:
        y = tl.where(x > 0, 1.0, 0.0)
    return y


_SQRT_2_PI: tl.constexpr = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_NORMAL: tl.constexpr = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    return 1 - 2 * _reciprocal(1 + tl.exp(2 * x))


@triton.jit
def _sigmoid(x):
    return _reciprocal(1 + tl.exp(-x))


@triton.jit
def _reciprocal(x):
    """`1 / x`; a division would be most of these kernels' instructions."""
    return tl.inline_asm_elementwise(RECIPROCAL, RECIPROCAL_OPERANDS, [x], dtype=tl.float32, is_pure=True, pack=1)
