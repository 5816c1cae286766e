"""What a failure of a candidate was, and which of several failed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from ..errors import TuningError
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


def alive_samples(bench: Any, sampled: Any, configs: Sequence[Any], rounds: int, deadline: float | None) -> Any:
    """Samples of configs, of which some may fail: those get infinite times, and a trial in `bench.lost`.

    `sampled(configs, rounds, deadline)` gives samples, or as a trial how the first config fails.

    Raises:
        TuningError: they fail together, but none does alone.
    """
    found = sampled(configs, rounds, deadline)
    if not isinstance(found, Trial):
        return found
    if len(configs) == 1:
        bench.lost.append(dataclasses.replace(found, reason=f"when it was timed: {found.reason}"))
        return [[math.inf] * rounds]
    dead = {cfg for cfg in configs if alive_samples(bench, sampled, [cfg], 1, deadline) == [[math.inf]]}
    if not dead:
        raise TuningError(f"{len(configs)} configs of {bench.inv!r} run alone, but not together: {found.reason}")
    alive = [cfg for cfg in configs if cfg not in dead]
    times = dict(zip(alive, alive_samples(bench, sampled, alive, rounds, deadline))) if alive else {}
    count = len(next(iter(times.values()), [0.0]))
    return [times.get(cfg, [math.inf] * count) for cfg in configs]
