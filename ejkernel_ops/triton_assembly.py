"""PTX in Triton kernels: each piece with what it computes in NumPy, where kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

# `x` where a word has a bit, else -inf. As a comparison and a `where`, LLVM makes vectors of truth values of the bits
# of many numbers, which are packed into integers and unpacked again: half as many instructions more.
IF_BIT: Any = tl.constexpr(
    "{ .reg .pred has; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.u32 has, bit, 0; selp.f32 $0, $1, 0fFF800000, has; }"
)
IF_BIT_OPERANDS: Any = tl.constexpr("=f,f,r,r")  # x, word, bit

# Two bfloat16 as float32. The compiler takes a pair apart first, and spends three instructions on two numbers.
BFLOAT16_PAIR: Any = tl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")
BFLOAT16_PAIR_OPERANDS: Any = tl.constexpr("=f,=f,r")

# `1 / x`, wrong by one unit in the last place at most. A division checks the size of its operands first.
RECIPROCAL: Any = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
RECIPROCAL_OPERANDS: Any = tl.constexpr("=f,f")

IN_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    IF_BIT.value: lambda x, word, bit: np.where(word & bit != 0, x, np.float32("-inf")),
    BFLOAT16_PAIR.value: lambda x: x.astype(np.float32),
    RECIPROCAL.value: np.reciprocal,
}
