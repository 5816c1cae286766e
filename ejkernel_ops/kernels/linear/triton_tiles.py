"""The kernels of a linear map's activation in Triton: what products leave to do, each number read once.

No two programs add to the same number, so gradients are the same bits in each run.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from ...triton_assembly import RECIPROCAL, RECIPROCAL_OPERANDS


@triton.jit
def activation_forward(product_ptr, bias_ptr, out_ptr, spec: tl.constexpr):
    """The activation of a tile of products with their bias."""
    block_m: tl.constexpr = spec.block_m
    block_n: tl.constexpr = spec.block_n
    tiles: tl.constexpr = (spec.features + block_n - 1) // block_n
    columns = tl.program_id(0) % tiles * block_n + tl.arange(0, block_n)
    rows = tl.program_id(0) // tiles * block_m + tl.arange(0, block_m)
    inside = (rows < spec.rows)[:, None] & (columns < spec.features)[None, :]
    at = rows.to(tl.int64)[:, None] * spec.features + columns[None, :]
    x = _with_bias(tl.load(product_ptr + at, inside, 0.0), bias_ptr, columns, spec)
    tl.store(out_ptr + at, activation(x, spec), inside)


@triton.jit
def activation_backward(product_ptr, bias_ptr, dout_ptr, grad_ptr, dbias_ptr, spec: tl.constexpr):
    """The gradient of products, and what `span` rows add to that of the bias: `(spans, features)`."""
    block_m: tl.constexpr = spec.block_m
    block_n: tl.constexpr = spec.block_n
    tiles: tl.constexpr = (spec.features + block_n - 1) // block_n
    columns = tl.program_id(0) % tiles * block_n + tl.arange(0, block_n)
    span = tl.program_id(0) // tiles
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(span * spec.span, tl.minimum((span + 1) * spec.span, spec.rows), block_m):
        rows = start + tl.arange(0, block_m)
        inside = (rows < spec.rows)[:, None] & (columns < spec.features)[None, :]
        at = rows.to(tl.int64)[:, None] * spec.features + columns[None, :]
        x = _with_bias(tl.load(product_ptr + at, inside, 0.0), bias_ptr, columns, spec)
        grad = tl.load(dout_ptr + at, inside, 0.0).to(tl.float32) * derivative(x, spec)
        tl.store(grad_ptr + at, grad, inside)
        if spec.want_bias:
            total += tl.where(inside, grad, 0.0)
    if spec.want_bias:
        tl.store(dbias_ptr + span.to(tl.int64) * spec.features + columns, tl.sum(total, 0), columns < spec.features)


@triton.jit
def _with_bias(product, bias_ptr, columns, spec: tl.constexpr):
    """Products in float32, with their bias."""
    x = product.to(tl.float32)
    if spec.has_bias:
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
