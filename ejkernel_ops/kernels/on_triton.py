"""What ops on rows share of Triton: the methods of a kernel, which devices and types there are, absent operands."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..core.invocation import Invocation
from ..core.spread import is_spread

_OLDEST = (8, 0)  # before it bfloat16 has no tensor cores
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
MOST_ROWS = 2**30  # with room for the rows of a program beyond the last
_MOST_PROGRAMS = 2**31 - 1
_MOST_NUMBERS = 64


class TritonRows:
    """Mixed into a kernel over rows before its base: the methods that choose configs of its Triton version.

    Attributes:
        launch: the module of its launches, with `unsupported(inv)` and `illegal(inv, cfg)`.
        prefers_xla: whether a call that nobody has tuned runs on XLA, which may fuse more than Triton has in a kernel.
    """

    launch: ClassVar[ModuleType]
    prefers_xla: ClassVar[bool] = False

    def triton_cfgs(self, inv: Invocation) -> list[Any]:
        """Configs to try, the best first."""
        raise NotImplementedError

    def unsupported(self, inv: Invocation, backend: str) -> str | None:
        """What a back end cannot honour."""
        return self.launch.unsupported(inv) if backend == "triton" else None

    def illegal(self, inv: Invocation, cfg: Any) -> str | None:
        """A tile that is missing, or that there is no room for."""
        if cfg.backend == "triton":
            return self.launch.illegal(inv, cfg)
        return super().illegal(inv, cfg)  # type: ignore[misc]

    def candidate_cfgs_triton(self, inv: Invocation) -> list[Any]:
        """Those to try."""
        return self.triton_cfgs(inv)

    def heuristic_cfg_triton(self, inv: Invocation) -> Any:
        """The best one."""
        return self.triton_cfgs(inv)[0]

    def heuristic_cfg_gpu(self: Any, inv: Invocation) -> Any:
        """Triton's, where it can do the call and no other device may have a part of it; else XLA's."""
        if self.prefers_xla or is_spread() or self.unsupported(inv, "triton") is not None:
            return self.heuristic_cfg(inv)
        return self.heuristic_cfg_triton(inv)


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


def too_long(programs: int) -> str | None:
    """Why so many programs cannot be launched; `None` where they can."""
    return None if programs <= _MOST_PROGRAMS else f"there would be {programs} programs, more than a GPU launches"


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


def params_of(cfg: Any, fields: Sequence[str], *, backward: bool) -> tuple[Any, str | None]:
    """The parameters of a direction in a config, and why its kernel cannot take them, if it cannot."""
    name = "bwd" if backward else "fwd"
    params = getattr(cfg, name)
    fault = missing(params, fields, name)
    if fault is None and backward and params.blocksize_k < params.blocksize_m:
        fault = f"blocksize_k is {params.blocksize_k}, less than one tile of {params.blocksize_m} rows"
    return params, fault


def too_many(numbers: int) -> str | None:
    """Why a thread cannot hold so many numbers of a tile; `None` where it can."""
    if numbers <= _MOST_NUMBERS:
        return None
    return f"a thread would hold {numbers} numbers of a tile, more than {_MOST_NUMBERS}: take fewer, or more warps"
