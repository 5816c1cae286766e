"""What the ops share of Triton: which devices and types its kernels take, and operands that are not there."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.invocation import Invocation

_OLDEST = (8, 0)  # before it bfloat16 has no tensor cores
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
INT32 = 2**31


def unfit_device(inv: Invocation) -> str | None:
    """Why no Triton kernel of ours runs on the device of a call; `None` where they do."""
    if inv.platform == "rocm":
        return "the Triton kernels are for NVIDIA GPUs"
    if (capability := _capability()) is not None and capability < _OLDEST:
        return f"the Triton kernels need compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
    return None


def unfit_arrays(inv: Invocation, names: Sequence[str]) -> str | None:
    """Why Triton cannot take some arguments of a call, of those that are given; `None` where it can."""
    for name in names:
        x = inv.arguments.get(name)
        if x is None:
            continue
        if x.dtype not in FLOATS:
            return f"Triton takes bfloat16, float16 and float32, {name} is {x.dtype}"
        if 0 in x.shape:
            return f"{name} is empty"
    return None


@functools.cache
def _capability() -> tuple[int, ...] | None:
    """Compute capability of this process's GPU; `None` where there is none to ask."""
    try:
        text = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "")
    except RuntimeError:
        return None
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+\.\d+", text) else None


def given(like: jax.Array, *optional: Any) -> list[Any]:
    """Operands, with some array in place of those that are not given: the kernels do not read them."""
    return [like if x is None else x for x in optional]


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def missing(params: Any, names: Sequence[str], what: str) -> str | None:
    """Which of the parameters that a kernel needs are not given, or are no powers of two as its tiles need."""
    if params is None:
        return f"{what} is missing"
    if absent := [name for name in names if getattr(params, name, None) is None]:
        return f"{', '.join(absent)} missing in {params}"
    odd = [f"{name}={n}" for name in names if (n := getattr(params, name)) & (n - 1)]
    return f"{', '.join(odd)}; Triton takes powers of two" if odd else None
