"""`tune`: from a train step to the configs that make it faster."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel_ops import AutotuningResult, ConfigSelectorChain, autotune_lowered, default_selector, policy_override
from ejkernel_ops.execution.measure import spread

from .frameworks import adapters
from .steps import jitted

_ROUNDS, _MIN_GAIN, _BUDGET_S = 7, 0.01, 20.0


def tune(
    step: Any, *args: Any, selector: ConfigSelectorChain | None = None, whole_step: bool = True, **kwargs: Any
) -> AutotuningResult:
    """Tunes every kernel of a train step, forward and backward, on shapes that the step itself has.

    With real arguments the whole step is timed at the end, on copies of them, with heuristics and with the
    result; groups of configs that do not pay in it are dropped, for a kernel can win alone and cost a fusion.

    Args:
        step: a function, or what `jax.jit`, `nnx.jit` or `eqx.filter_jit` returns.
        *args: its arguments; `ShapeDtypeStruct`s will do, then the whole step is not timed.
        selector: whose tuner and caches are used; default the default selector.
        whole_step: time the whole step at the end.
        **kwargs: the step's keyword arguments.

    Returns:
        A result to train inside: `with result: step(...)`. `result.skipped` names the calls that were not tuned, and
        why.

    Raises:
        TuningError: inside a trace, where nothing can be timed.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> result = tune(nnx.jit(lambda model, x: model(x).sum()), model, nnx.Rngs(0).normal((8, 3)))
        >>> len(result.entries)
        1
    """
    selector = default_selector() if selector is None else selector
    step = jitted(step, args, kwargs)
    result = autotune_lowered(selector, step.lower(*args, **kwargs))
    if not whole_step or not result.entries or _is_abstract((args, kwargs)):
        return result
    try:
        return _WholeStep(step, args, kwargs, selector).pruned(result)
    except Exception as error:  # what a step may raise is endless, and minutes of tuning must not be lost to it
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        note = f"the whole step could not be timed: {type(error).__name__}: {reason}"
        return dataclasses.replace(result, notes=(*result.notes, note))


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


class _WholeStep:
    """Times a step under several results, on copies of its arguments."""

    def __init__(self, step: Any, args: tuple, kwargs: dict, selector: ConfigSelectorChain):
        self.step, self.arguments, self.selector = step, (args, kwargs), selector

    def pruned(self, result: AutotuningResult) -> AutotuningResult:
        """The result without the ops whose configs make the step slower, and with the step's times."""
        changed = sorted({e.op_id_v for e in result.entries if e.heuristic is not None and e.cfg != e.heuristic})
        self.selector.emit("whole_step")
        if not changed:  # the very same program
            [base] = self.times([None])
            return dataclasses.replace(result, step_ms=(base, base))
        base, full = self.times([None, result])
        best, best_ms, dropped = result, full, []
        if full > base * (1 - _MIN_GAIN) and len(changed) > 1:  # it does not pay as a whole: look for the culprit
            options = [_without(result, op) for op in changed]
            times = self.times([None, *options])
            base = times[0]
            op, option, ms = min(zip(changed, options, times[1:]), key=lambda found: found[2])
            if ms < full * (1 - _MIN_GAIN):
                best, best_ms, dropped = option, ms, [op]
        if best_ms > base * (1 + _MIN_GAIN):
            for op in changed:
                best = _without(best, op)
            best_ms, dropped = base, changed
        tuned = result.as_overlay()
        for key, cfg in best.as_overlay().items():
            if tuned[key] != cfg:
                self.selector.forget(key)  # so that no later trace finds what was dropped
        notes = tuple(f"dropped: the configs of {op} did not pay in the whole step" for op in dropped)
        return dataclasses.replace(best, step_ms=(base, best_ms), notes=(*best.notes, *notes))

    def times(self, results: Sequence[AutotuningResult | None]) -> list[float]:
        """Median milliseconds of the step under each result (`None`: heuristics), timed in turns."""
        for result in results:
            self._run(result)
        samples: list[list[float]] = [[] for _ in results]
        deadline = time.monotonic() + _BUDGET_S
        for turn in range(_ROUNDS):
            if turn > 2 and time.monotonic() > deadline:
                break
            for times, result in zip(samples, results):
                times.append(self._run(result))
        if max(map(spread, samples)) > 0.2:
            self.selector.emit("busy", spread=max(map(spread, samples)))
        return [statistics.median(times) for times in samples]

    def _run(self, result: AutotuningResult | None) -> float:
        args, kwargs = _copied(self.arguments)
        _wait((args, kwargs))
        start = time.perf_counter()
        with policy_override(mode="off") if result is None else result:
            out = self.step(*args, **kwargs)
        _wait((out, args, kwargs))  # a step may return nothing, and change its arguments
        return (time.perf_counter() - start) * 1e3


def _wait(tree: Any) -> None:
    """Waits for all arrays of a pytree that were not donated."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    jax.block_until_ready([x for x in arrays if not x.is_deleted()])


def _without(result: AutotuningResult, op_id_v: str) -> AutotuningResult:
    """The result with the heuristic configs of one op."""
    entries = tuple(
        dataclasses.replace(e, cfg=e.heuristic, ms=e.heuristic_ms, source="heuristic")
        if e.op_id_v == op_id_v and e.heuristic is not None
        else e
        for e in result.entries
    )
    return dataclasses.replace(result, entries=entries)


def _copied(tree: Any) -> Any:
    """Arguments with arrays of their own: a step may donate or change what it is given."""
    for adapter in adapters():
        tree = adapter.copied(tree)
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree) if not adapters() else tree
