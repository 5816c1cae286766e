"""Timing: candidates take turns, so that a drift of the machine meets all of them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh

_SAMPLE_S = 1e-3  # a sample lasts at least this long, so that the clock and the dispatch do not count
BUSY = 0.2  # a spread above this says that something else runs
_SESSION = 5  # rounds under one profiler: between sessions the deadline is looked at, and the order turns round

Run = Callable[[], Any]


def benchmark(fn: Callable, *args: Any, num_iters: int = 10, num_warmup: int = 3, **kwargs: Any) -> float:
    """Median wall-clock time of a call, results waited for.

    Args:
        fn: the function; jit it first if its programs are to be measured, not its dispatch.
        *args: its arguments.
        num_iters: samples.
        num_warmup: calls before the first sample.
        **kwargs: its keyword arguments.

    Returns:
        Milliseconds.

    Raises:
        ValueError: fewer than one sample, or a negative number of warm-up calls.

    Example:
        >>> benchmark(lambda x: x + 1, 1.0, num_iters=3) >= 0
        True
    """
    if num_iters < 1 or num_warmup < 0:
        raise ValueError(f"num_iters is {num_iters} and num_warmup {num_warmup}; expected at least 1 and 0")
    for _ in range(num_warmup):
        jax.block_until_ready(fn(*args, **kwargs))
    return statistics.median(_sample(lambda: fn(*args, **kwargs), 1) for _ in range(num_iters)) * 1e3


def inside_trace() -> bool:
    """Whether a program is being traced, so that nothing that is called now runs now."""
    return isinstance(jnp.zeros(()), Tracer)


def on_one_device() -> contextlib.AbstractContextManager:
    """Context in which arrays are on one device of this process, whatever mesh is set.

    Under `jax.set_mesh` they would be on all devices of the mesh, of other processes too, and so would what is timed.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(Mesh(np.array(jax.local_devices()[:1]), ("alone",), axis_types=(AxisType.Auto,)))


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median."""
    if len(samples) < 4:
        return (max(samples) - min(samples)) / 2 / statistics.median(samples)
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle


def _sample(run: Run, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def repeats_for(seconds: float) -> int:
    """How many calls make a sample long enough."""
    return max(1, min(100, round(_SAMPLE_S / max(seconds, 1e-7))))


def interleaved(runs: Sequence[Run], rounds: int, deadline: float | None = None) -> list[list[float]]:
    """Times functions in turns by the wall clock.

    Args:
        runs: functions without arguments, compiled and warm.
        rounds: samples of each.
        deadline: `time.monotonic()` after which no further round starts.

    Returns:
        For each function its samples in milliseconds, at least one; sample `i` of all is of one round.
    """
    repeats = [repeats_for(_sample(run, 1)) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        if turn and deadline is not None and time.monotonic() > deadline:
            break
        for times, run, count in zip(samples, runs, repeats):
            times.append(_sample(run, count) * 1e3)
    return samples


class NoDeviceTime(Exception):
    """The profiler of the device cannot be used, or its records do not fit what was run."""


def device_times(runs: Sequence[Run], rounds: int, deadline: float | None = None) -> list[list[float]]:
    """Times functions in turns by the device's own record (CUPTI): the sum of each function's kernels.

    Neither dispatch nor gaps count. The profiler takes one user at a time, so this fails beside another one.

    Args:
        runs: functions without arguments, compiled and warm.
        rounds: samples of each.
        deadline: `time.monotonic()` after which no further session starts.

    Returns:
        As `interleaved`.

    Raises:
        NoDeviceTime: no profiler here, or records that do not fit.

    Source:
        `jax.experimental.mosaic.gpu.profiler`.
    """
    samples: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for start in range(0, rounds, _SESSION):
        if start and deadline is not None and time.monotonic() > deadline:
            break
        count = min(_SESSION, rounds - start)
        for turn, ms in enumerate(_Session([runs[i] for i in order], count).times()):
            samples[order[turn % len(order)]].append(ms)
        order.reverse()
    return samples


class _Session:
    """Some rounds under one profiler. Looks jitted, which is what the profiler asks of what it calls as it is.

    A marker is run before each function: its kernel tells in the record where the next one's begin, for how many
    there are can change from one run to the next.
    """

    def __init__(self, runs: Sequence[Run], rounds: int):
        self.runs, self.rounds, self.calls, self.marker = runs, rounds, 0, jnp.zeros((), jnp.uint8)
        self.ran = False  # whether all that was to be timed has run

    def trace(self) -> None: ...

    def lower(self) -> None: ...

    def __call__(self) -> None:
        self.calls, self.ran = self.calls + 1, False
        for _ in range(1 if self.calls == 1 else self.rounds):  # the profiler's first call is its warm-up
            for run in self.runs:
                _mark(self.marker)
                out = run()
        jax.block_until_ready(out)  # returning it would keep it alive
        self.ran = True

    def times(self) -> list[float]:
        """Milliseconds of each run, in the order in which they ran."""
        times: list[float] = []
        for name, ms in _records(self):
            if _MARK in name:
                times.append(0.0)
            elif times:
                times[-1] += ms
        if len(times) != self.rounds * len(self.runs) or not all(times):
            raise NoDeviceTime(f"{len(times)} runs were recorded, {self.rounds * len(self.runs)} expected")
        return times


_MARK = "popcnt"  # part of the name of the marker's kernel, and of no other that one would tune
_mark = jax.jit(jax.lax.population_count)


def _records(session: _Session) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel."""
    try:
        from jax.experimental.mosaic.gpu import profiler

        return profiler.measure(session, aggregate=False)()[1] or []  # type: ignore[arg-type]
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        if session.calls and not session.ran:  # what failed is a candidate, not the profiler
            raise
        raise NoDeviceTime(f"{type(error).__name__}: {error}") from None
