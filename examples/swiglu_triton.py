"""The Triton kernels of `own_kernel.py`. They are in a module of their own, which needs Triton; that one does not."""

import triton
import triton.language as tl


@triton.jit
def forward(gate_ptr, up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`silu(gate) * up` of one block, computed in float32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside).to(tl.float32)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward(gate_ptr, up_ptr, dout_ptr, dgate_ptr, dup_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Both gradients of one block: what the forward would have to keep is computed again."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dout * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, (dout * gate * sigmoid).to(dup_ptr.dtype.element_ty), mask=inside)
