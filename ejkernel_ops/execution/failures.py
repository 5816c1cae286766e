"""What a failure of a candidate was, from the error that it raised."""

from __future__ import annotations

import re
from typing import Any

from .trial import Trial

_SHARED = re.compile(r"shared memory|out of resource: shared|uses too much shared data", re.IGNORECASE)
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|failed to allocate", re.IGNORECASE)
# After these every later call of the process fails: the context of the device is gone.
_LOST = re.compile(
    r"CUDA_ERROR_(ILLEGAL_ADDRESS|LAUNCH_FAILED|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|ASSERT|HARDWARE_STACK_ERROR|"
    r"INVALID_PC|INVALID_ADDRESS_SPACE|LAUNCH_TIMEOUT|ECC_UNCORRECTABLE)|illegal memory access|"
    r"unspecified launch failure|misaligned address|device-side assert",
    re.IGNORECASE,
)


def first_line(error: BaseException) -> str:
    """An error as one line: the error itself would keep its arrays alive."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].endswith("Traceback (most recent call last):"):  # of a host callback: its end says more
        lines[0] = lines[-1]
    return f"{type(error).__name__}: {lines[0][:300]}"


def failed(cfg: Any, status: str, error: BaseException) -> Trial:
    """The trial of a config that raised an error; memory is told apart from the rest."""
    text = str(error)
    if _SHARED.search(text):
        status = "out_of_shared_memory"
    elif isinstance(error, MemoryError) or _MEMORY.search(text):
        status = "out_of_memory"
    return Trial(cfg, status, reason=first_line(error))


def lost_device(text: str) -> bool:
    """Whether an error's text says that the device cannot be used by this process any more."""
    return _LOST.search(text) is not None
