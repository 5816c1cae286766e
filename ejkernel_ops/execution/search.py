"""Searching the configs of one call: in which order they are tried, and how a race among them is decided.

Nothing here runs a kernel. `race` asks for samples, so that recorded or simulated times will do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..config.selection import why_illegal

# Halving: so many samples in all, then only what lies within this factor of the best goes on. The least of few samples
# counts, not their median: what disturbs a sample makes it longer.
_STAGES = ((2, 1.25), (5, 1.08))

_FEW, _FEW_GAIN = 5, 0.1  # a race that has had fewer last rounds than this takes no smaller gain

Sampler = Callable[[Sequence[Any], int], list[list[float]]]


def ordered(inv: Any, default: Any, candidates: Iterable[Any], hints: Iterable[Any] = ()) -> list[Any]:
    """The configs of a call, each once, the most promising first.

    Args:
        inv: the call; its kernel's `cost` predicts.
        default: the heuristic config, which always takes part.
        candidates: configs.
        hints: winners at neighbouring shapes, the nearest first.

    Returns:
        The heuristic, the hints, and the candidates: back ends in turns, whose costs need not compare, and in each by
        predicted cost, those without a prediction last.
    """
    by_backend: dict[Any, list[Any]] = {}
    for cfg in dict.fromkeys(candidates):
        by_backend.setdefault(getattr(cfg, "backend", None), []).append(cfg)
    queues = [sorted(configs, key=lambda cfg: _cost(inv, cfg)) for configs in by_backend.values()]
    in_turns = [cfg for turn in itertools.zip_longest(*queues, fillvalue=_NONE) for cfg in turn if cfg is not _NONE]
    return list(dict.fromkeys([default, *hints, *in_turns]))


_NONE = object()


def _cost(inv: Any, cfg: Any) -> float:
    """The predicted cost of a config; infinite where there is none."""
    cost = None if why_illegal(inv, cfg) is not None else inv.kernel.cost(inv, cfg)
    return math.inf if cost is None or math.isnan(cost) else cost


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a race ended.

    Args:
        winner: the config to use.
        times: median milliseconds of each config; of the winner the heuristic's, less the gain that decided.
        samples: milliseconds of each config, of the last rounds where it was in them.
        rejected: configs that were fast enough, and why they may not win.
    """

    winner: Any
    times: dict[Any, float]
    samples: dict[Any, list[float]]
    rejected: dict[Any, str]


def race(
    default: Any,
    configs: Sequence[Any],
    sample: Sampler,
    verify: Callable[[Any], str | None] = lambda cfg: None,
    *,
    finalists: int = 3,
    rounds: int = 20,
    min_gain: float = 0.02,
) -> Outcome:
    """Successive halving, and last rounds in which the best few meet the heuristic, pair by pair.

    A config wins only if it saves `min_gain` of the heuristic's time, by the medians and by the median of the paired
    ratios both; else it is a tie, which the heuristic wins. `verify` is asked about a config that would win; where it
    objects the race goes on without that config.

    Args:
        default: the heuristic config.
        configs: all configs, the heuristic among them.
        sample: `sample(configs, rounds)` gives samples of each, taken in turns.
        verify: why a config may not win, or `None`.
        finalists: how many meet the heuristic in the last rounds.
        rounds: how many last rounds.
        min_gain: part of the heuristic's time.

    Returns:
        The outcome.
    """
    early: dict[Any, list[float]] = {cfg: [] for cfg in configs}
    final: dict[Any, list[float]] = {}
    rejected: dict[Any, str] = {}
    while True:
        alive = _halved([cfg for cfg in configs if cfg not in rejected], default, early, sample)
        rivals = sorted((cfg for cfg in alive if cfg != default), key=lambda cfg: min(early[cfg]))
        last = [default, *rivals[:finalists]]
        if len(last) > 1 or not final:
            final |= zip(last, sample(last, rounds))
        finite = [cfg for cfg in last if all(map(math.isfinite, final[cfg]))]  # else it failed
        best = min(finite, key=lambda cfg: _paired(final[cfg], final[default]), default=default)
        needed = min_gain if len(final[best]) >= _FEW else max(min_gain, _FEW_GAIN)
        if not _gain(final[best], final[default]) > needed:
            best = default
        reason = None if best == default else verify(best)
        if reason is None:
            samples = early | final
            times = {cfg: statistics.median(t) for cfg, t in samples.items() if t}
            times[best] = times[default] * (1 - _gain(final[best], final[default]))
            return Outcome(best, times, samples, rejected)
        rejected[best] = reason


def _halved(configs: list[Any], default: Any, early: dict[Any, list[float]], sample: Sampler) -> list[Any]:
    """What remains after each stage; the heuristic always does. Samples are added to `early`."""
    for count, margin in _STAGES:
        wanting = [cfg for cfg in configs if len(early[cfg]) < count]
        if wanting:
            for cfg, times in zip(wanting, sample(wanting, count - min(len(early[cfg]) for cfg in wanting))):
                early[cfg] += times
        best = min(min(early[cfg]) for cfg in configs)
        configs = [cfg for cfg in configs if cfg == default or min(early[cfg]) <= margin * best]
    return configs


def _paired(times: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, base))


def _gain(times: Sequence[float], base: Sequence[float]) -> float:
    """The part of `base` that is saved, by whichever of the two comparisons says less."""
    return 1 - max(_paired(times, base), statistics.median(times) / statistics.median(base))
