"""Timing: candidates take turns, so that a drift of the machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

_SAMPLE_S = 1e-3  # a sample lasts at least this long, so that the clock and the dispatch do not count


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


def _sample(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def repeats_for(seconds: float) -> int:
    """How many calls make a sample long enough."""
    return max(1, min(100, round(_SAMPLE_S / max(seconds, 1e-7))))


def interleaved(runs: Sequence[Callable[[], Any]], rounds: int, deadline: float | None = None) -> list[list[float]]:
    """Times functions in turns.

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


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median."""
    if len(samples) < 4:
        return (max(samples) - min(samples)) / 2 / statistics.median(samples)
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle
