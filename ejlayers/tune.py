"""`tune`: from a train step to the configs that make it faster."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel_ops import AutotuningResult, ConfigSelectorChain, autotune_lowered, default_selector, policy_override
from ejkernel_ops.config.selection import require_chain
from ejkernel_ops.execution.failures import first_line
from ejkernel_ops.execution.hosts import from_first
from ejkernel_ops.execution.measure import BUSY, spread
from ejkernel_ops.execution.progress import Progress

from .steps import copied, is_abstract, jitted, lower, unbound

_ROUNDS, _BUDGET_S = 9, 20.0
_MIN_GAIN, _MAX_LOSS = 0.01, 0.005  # of a step's time: below the one its ops are suspects, above the other they go


def tune(
    step: Any,
    *args: Any,
    selector: ConfigSelectorChain | None = None,
    whole_step: bool = True,
    sync: bool = False,
    progress: bool = True,
    **kwargs: Any,
) -> AutotuningResult:
    """Tunes every kernel of a train step, forward and backward, on shapes that the step itself has.

    With real arguments the whole step is timed at the end, on copies of them, with heuristics and with the
    result, and without each op that would run on another back end than before: a kernel can win alone and cost a
    fusion. What makes the step slower is dropped, and `result.notes` says what was found.

    Args:
        step: a function, or what `jax.jit`, `nnx.jit` or `eqx.filter_jit` returns, or a `functools.partial` of either.
        *args: its arguments; `ShapeDtypeStruct`s will do, then the whole step is not timed.
        selector: whose tuner and caches are used; default the default selector.
        whole_step: time the whole step at the end.
        sync: with several processes, tune in process 0 and give all its result, as `autotune_lowered`; all time the
            whole step, and what process 0 finds decides.
        progress: show what is tuned on stderr where that is a terminal.
        **kwargs: the step's keyword arguments.

    Returns:
        A result to train inside: `with result: step(...)`. `result.skipped` names the calls that were not tuned, and
        why.

    Raises:
        TuningError: inside a trace, where nothing can be timed; with `sync`, tuning failed in another process.
        ConfigError: with `sync`, the processes lowered different programs, or not all came.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> result = tune(nnx.jit(lambda model, x: model(x).sum()), model, nnx.Rngs(0).normal((8, 3)))
        >>> len(result.entries)
        1
    """
    selector = require_chain(default_selector() if selector is None else selector)
    step, args, kwargs = unbound(step, args, kwargs)
    step = jitted(step, args, kwargs)
    with Progress(selector, shown=progress):
        result = autotune_lowered(selector, lower(step, args, kwargs), sync=sync, progress=progress)
        if not whole_step or not result.entries or is_abstract((args, kwargs)):
            return result
        if jax.process_count() > 1 and not sync:  # the others would not take part in its collectives
            note = "the whole step was not timed: with several processes that needs sync=True"
            return dataclasses.replace(result, notes=(*result.notes, note))
        try:
            return _WholeStep(step, args, kwargs, selector).pruned(result)
        except Exception as error:  # what a step may raise is endless, and minutes of tuning must not be lost to it
            note = f"the whole step could not be timed: {first_line(error)}"
        return dataclasses.replace(result, notes=(*result.notes, note))


class _WholeStep:
    """Times a step under several results, on copies of its arguments."""

    def __init__(self, step: Any, args: tuple, kwargs: dict, selector: ConfigSelectorChain):
        self.step, self.arguments, self.selector = step, (args, kwargs), selector

    def pruned(self, result: AutotuningResult) -> AutotuningResult:
        """The result without the ops whose configs make the step slower, and with the step's times."""
        self.selector.emit("whole_step")
        changed, switched = _changed(result), _switched(result)
        if not changed:  # the very same program
            [base] = self.samples([None])
            return dataclasses.replace(result, step_ms=(statistics.median(base),) * 2)
        base, full = self.samples([None, result])
        suspects = changed if _ratio(full, base) > 1 - _MIN_GAIN else [op for op in changed if op in switched]
        others = [base]
        if suspects and len(changed) > 1:
            base, full, *others = self.samples([None, result, *(_without(result, [op]) for op in suspects)])
        slower = [op for op, other in zip(suspects, others) if _ratio(full, other) > 1 + _MAX_LOSS]
        notes = [_note(op, switched.get(op), full, other, op in slower) for op, other in zip(suspects, others)]
        best, final = result, full
        if slower:
            best = _without(result, slower)
            base, final = self.samples([None, best]) if len(slower) < len(changed) else (base, base)
        if final is not base and _ratio(final, base) > 1 + _MAX_LOSS:
            best, final = _without(result, changed), base
            notes.append("dropped: no config that was tried pays in the whole step")
        tuned = result.as_overlay()
        for key, cfg in best.as_overlay().items():
            if tuned[key] != cfg:
                self.selector.forget(key)  # so that no later trace finds what was dropped
        times = statistics.median(base), _relative(final, base)
        return dataclasses.replace(best, step_ms=times, notes=(*best.notes, *notes))

    def samples(self, results: Sequence[AutotuningResult | None]) -> list[list[float]]:
        """Milliseconds of the step under each result (`None`: heuristics), taken in turns."""
        for result in results:
            self._run(result)
        samples: list[list[float]] = [[] for _ in results]
        deadline = time.monotonic() + _BUDGET_S
        for turn in range(_ROUNDS):
            if turn > 2 and _decided(time.monotonic() > deadline):
                break
            for times, result in zip(samples, results):
                times.append(self._run(result))
        if max(map(spread, samples)) > BUSY:
            self.selector.emit("busy", spread=max(map(spread, samples)))
        return _decided(samples)

    def _run(self, result: AutotuningResult | None) -> float:
        args, kwargs = copied(self.arguments)
        _wait((args, kwargs))
        start = time.perf_counter()
        with policy_override(mode="off") if result is None else result:
            out = self.step(*args, **kwargs)
        _wait((out, args, kwargs))  # a step may return nothing, and change its arguments
        return (time.perf_counter() - start) * 1e3


def _decided(value: Any) -> Any:
    """What process 0 has found: all must go on alike, for a step may have collectives."""
    return value if jax.process_count() == 1 else from_first("timing the step", lambda: value)


def _wait(tree: Any) -> None:
    """Waits for all arrays of a pytree that were not donated."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    jax.block_until_ready([x for x in arrays if not x.is_deleted()])


def _changed(result: AutotuningResult) -> list[str]:
    """The ops with another config than the heuristic's."""
    return sorted({e.op_id_v for e in result.entries if e.heuristic is not None and e.cfg != e.heuristic})


def _switched(result: AutotuningResult) -> dict[str, str]:
    """The ops that run on another back end than the heuristic's, and how that reads."""
    found = {}
    for entry in result.entries:
        new, old = (getattr(cfg, "backend", None) for cfg in (entry.cfg, entry.heuristic))
        if old is not None and new != old:
            found[entry.op_id_v] = f"{new} instead of {old}"
    return found


def _note(op: str, switch: str | None, full: Sequence[float], other: Sequence[float], is_slower: bool) -> str:
    """What a step takes with and without the configs of an op."""
    what = f"{op} on {switch}" if switch else f"the configs of {op}"
    times = f"the step takes {_relative(full, other):.1f} ms with it and {statistics.median(other):.1f} ms without"
    return f"{'dropped' if is_slower else 'kept'}: {what}: {times}"


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Time relative to another one, round by round."""
    return statistics.median(a / b for a, b in zip(times, base))


def _relative(times: Sequence[float], base: Sequence[float]) -> float:
    """Milliseconds that stand to the median of `base` as what decided says."""
    return statistics.median(base) * _ratio(times, base)


def _without(result: AutotuningResult, ops: Sequence[str]) -> AutotuningResult:
    """The result with the heuristic configs of some ops."""
    entries = tuple(
        dataclasses.replace(e, cfg=e.heuristic, ms=e.heuristic_ms, source="heuristic")
        if e.op_id_v in ops and e.heuristic is not None
        else e
        for e in result.entries
    )
    return dataclasses.replace(result, entries=entries)
