"""Where a compiled step's time goes: its kernels and the gaps between them, by the device's record."""

from __future__ import annotations

import collections
import dataclasses
import glob
import re
import tempfile
from collections.abc import Callable

import jax

_KINDS = (  # the first that is found in a kernel's name
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("products", ("gemm", "cutlass", "nvjet", "dot", "xmma")),
    ("ours", ("ejkernel", "norm_", "activation_", "rows_of_logits", "turn")),
    ("copies", ("memcpy", "memset", "copy", "transpose")),
    ("reductions", ("reduce",)),
    ("elementwise", ("fusion", "wrapped", "convert", "loop")),
)


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel's name without its number, its milliseconds and its launches in a step."""

    name: str
    ms: float
    count: float

    @property
    def kind(self) -> str:
        """What it is about, by its name."""
        return next((kind for kind, parts in _KINDS if any(p in self.name.lower() for p in parts)), "other")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where a step's time goes.

    Args:
        kernels: the longest first; those that overlap each count.
        gaps: idle time of the device by the kernel that followed, the longest first.
        span_ms: from the first kernel of all steps to the end of the last, by step.
    """

    kernels: list[KernelTime]
    gaps: list[KernelTime]
    span_ms: float

    @property
    def kernel_ms(self) -> float:
        """The sum of all kernels' times."""
        return sum(kernel.ms for kernel in self.kernels)

    @property
    def idle_ms(self) -> float:
        """The time in which the device had nothing to do."""
        return sum(gap.ms for gap in self.gaps)

    @property
    def by_kind(self) -> dict[str, float]:
        """Milliseconds of a step by kind, the longest first."""
        total = collections.Counter()
        for kernel in self.kernels:
            total[kernel.kind] += kernel.ms
        return dict(total.most_common())


KINDS = (*(kind for kind, _ in _KINDS), "other")


def profiled(run: Callable[[], object], steps: int) -> Profile:
    """The profile of a function that runs some steps."""
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = ProfileData.from_file(path)
    ms, count, events = collections.Counter(), collections.Counter(), []
    for plane in (p for p in data.planes if "GPU" in p.name):
        for line in (line for line in plane.lines if "Stream" in line.name):
            for event in line.events:
                name = re.sub(r"[_.]?\d+$", "", event.name.split("<")[0])[:60]
                ms[name] += event.duration_ns / 1e6 / steps
                count[name] += 1 / steps
                events.append((event.start_ns, event.start_ns + event.duration_ns, name))
    found = [KernelTime(name, time, count[name]) for name, time in ms.most_common()]
    span = (max(stop for _, stop, _ in events) - min(start for start, *_ in events)) / 1e6 / steps
    return Profile(found, gaps(events, steps), span)


def gaps(events: list[tuple[int, int, str]], steps: int) -> list[KernelTime]:
    """Idle time of the device by the kernel that followed, the longest first; of overlapping kernels none."""
    ms, count, end = collections.Counter(), collections.Counter(), None
    for start, stop, name in sorted(events):
        if end is not None and start > end:
            ms[name] += (start - end) / 1e6 / steps
            count[name] += 1 / steps
        end = stop if end is None else max(end, stop)
    return [KernelTime(name, time, count[name]) for name, time in ms.most_common()]
