"""`Autotuner`: tries the configs of one call, and keeps the fastest that computes the right numbers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ..config.selection import heuristic, why_illegal
from ..core.call import explicit_pairs
from ..core.invocation import Invocation
from ..core.kernel import Kernel, require_kernel
from ..errors import ConfigError, TuningError
from ..utils.fingerprint import is_array
from .check import Reference, compiled
from .measure import benchmark, inside_trace, interleaved, spread
from .result import AutotuningResult, Entry
from .trial import Trial, Tuned

__all__ = ["Autotuner", "AutotuningResult", "Entry", "Trial", "Tuned", "autotune", "benchmark"]

SEED = 0


class Autotuner:
    """Tunes one call at a time: restrict, compile, check numbers, time in turns, time the best few again.

    Args:
        num_warmup: calls of each candidate before it is timed.
        num_iters: all candidates take turns in a third as many rounds (at least 3), then the finalists in twice as
            many.
        min_gain: part of the heuristic's time that a config must save to replace it.
        finalists: how many go into the last rounds, the heuristic not counted.
        budget_s: seconds for one call; when they are over the best so far is taken. `None`: no limit.

    Raises:
        ValueError: a count below 1 (of warm-up calls: below 0) or a negative gain.

    Example:
        >>> Autotuner(num_iters=5).num_iters
        5
    """

    def __init__(
        self,
        num_warmup: int = 1,
        num_iters: int = 10,
        min_gain: float = 0.02,
        finalists: int = 3,
        budget_s: float | None = 60.0,
    ):
        if num_warmup < 0 or num_iters < 1 or finalists < 1 or min_gain < 0:
            raise ValueError(
                f"num_warmup={num_warmup}, num_iters={num_iters}, finalists={finalists}, min_gain={min_gain}; "
                "expected at least 0, 1, 1 and 0"
            )
        self.num_warmup, self.num_iters, self.min_gain = num_warmup, num_iters, min_gain
        self.finalists, self.budget_s = finalists, budget_s

    def tune(
        self,
        inv: Invocation,
        candidates: Iterable[Any] | None = None,
        on_event: Callable[..., None] | None = None,
        inputs: Sequence[Any] | None = None,
    ) -> Tuned:
        """Tunes one call.

        Args:
            inv: the abstract call.
            candidates: configs to try; default the kernel's.
            on_event: called as `on_event("trial", op_id_v=, trial=, done=, total=)` after each candidate; the
                trial's time is a first sample.
            inputs: operands; default random ones that the kernel makes.

        Returns:
            The winner and all trials.

        Raises:
            TuningError: the heuristic config could not be run, or tuning inside a trace.
        """
        if inside_trace():
            raise TuningError(f"tuning {inv!r} inside a trace would time nothing; tune outside jit, grad and vmap")
        deadline = None if self.budget_s is None else time.monotonic() + self.budget_s
        default, configs, operands, reference = _prepared(inv, candidates, inputs)
        trials, runs = [], {}
        for cfg in configs:
            if deadline is not None and time.monotonic() > deadline and runs:
                trial, run = Trial(cfg, "failed", reason="the time budget was over"), None
            else:
                trial, run = self._prepare(inv, cfg, operands, reference)
            trials.append(trial)
            if run is not None:
                runs[cfg] = run
            if on_event is not None:
                on_event("trial", op_id_v=inv.op_id_v, trial=trial, done=len(trials), total=len(configs))
        if default not in runs:
            reasons = "; ".join(f"{t.cfg}: {t.reason}" for t in trials)
            raise TuningError(f"the heuristic config of {inv!r} does not run, so nothing can be compared: {reasons}")
        return self._compare(default, runs, trials, deadline)

    def _prepare(self, inv: Invocation, cfg: Any, inputs: Sequence[Any], reference: Reference) -> tuple[Trial, Any]:
        """Compiles and checks one candidate. Whatever goes wrong with it is a reason, not an error."""
        if (reason := why_illegal(inv, cfg)) is not None:
            return Trial(cfg, "illegal", reason=reason), None
        try:
            run = compiled(inv, cfg, inputs)
            for _ in range(self.num_warmup):
                jax.block_until_ready(run())
            fault = reference.fault(jax.block_until_ready(run()))
        except Exception as error:  # a candidate may fail in any way, and must not take the others along
            return Trial(cfg, "failed", reason=_first_line(error)), None
        if fault is not None:
            return Trial(cfg, "wrong", reason=fault), None
        return Trial(cfg, "timed", benchmark(run, num_iters=1, num_warmup=0)), run

    def _compare(self, default: Any, runs: dict, trials: list[Trial], deadline: float | None) -> Tuned:
        """Times all in turns, then the best few and the heuristic again; small gains are ties that it wins."""
        first = dict(zip(runs, interleaved(list(runs.values()), max(3, self.num_iters // 3), deadline)))
        ranked = sorted((cfg for cfg in runs if cfg != default), key=lambda cfg: statistics.median(first[cfg]))
        last = [default, *ranked[: self.finalists]]
        rounds = 2 * self.num_iters
        final = dict(zip(last, interleaved([runs[cfg] for cfg in last], rounds, deadline))) if ranked else first
        samples = first | final
        medians = {cfg: statistics.median(times) for cfg, times in samples.items()}
        paired = {cfg: statistics.median(a / b for a, b in zip(final[cfg], final[default])) for cfg in last}
        best = min(last, key=lambda cfg: paired[cfg])
        gain = 1 - max(paired[best], medians[best] / medians[default])  # both must say so
        winner = best if gain > self.min_gain else default
        timed = tuple(
            dataclasses.replace(t, ms=medians[t.cfg], spread=spread(samples[t.cfg])) if t.cfg in runs else t
            for t in trials
        )
        return Tuned(winner, default, medians[winner], medians[default], timed)

    def autotune(self, make_fn: Callable, args: tuple, kwargs: dict, candidates: Iterable[Any]) -> Any:
        """The fastest config of any function: times `make_fn(cfg)(*args, **kwargs)`; checks no numbers.

        Args:
            make_fn: makes the function for a config.
            args: its arguments.
            kwargs: its keyword arguments.
            candidates: configs; of equally fast ones the first wins.

        Returns:
            A candidate.

        Raises:
            TuningError: no candidate could be run.
        """
        runs, reasons = {}, []
        for cfg in candidates:
            try:
                program = jax.jit(make_fn(cfg)).lower(*args, **kwargs).compile()
                jax.block_until_ready(program(*args, **kwargs))
                runs[cfg] = lambda program=program: program(*args, **kwargs)
            except Exception as error:  # as in `_prepare`
                reasons.append(f"{cfg}: {_first_line(error)}")
        if not runs:
            raise TuningError(f"no candidate could be run: {'; '.join(reasons) or 'there are none'}")
        times = dict(zip(runs, interleaved(list(runs.values()), self.num_iters)))
        return min(runs, key=lambda cfg: statistics.median(times[cfg]))


def _prepared(inv: Invocation, candidates: Iterable[Any] | None, inputs: Sequence[Any] | None) -> tuple:
    """Heuristic config, all configs, operands and reference: code of the kernel's author, which may fail in any way."""
    step = "the heuristic config"
    try:
        default = heuristic(inv)
        step = "candidate_cfgs"
        found = inv.kernel.all_candidates(inv) if candidates is None else candidates
        configs = list(dict.fromkeys([default, *found]))
        step = "make_inputs"
        inputs = inv.kernel.make_inputs(inv, np.random.default_rng(SEED)) if inputs is None else list(inputs)
        step = "the heuristic config"
        return default, configs, inputs, Reference(inv, inputs)
    except Exception as error:
        raise TuningError(f"{step} of {inv!r} does not run, so nothing can be compared: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """An error as one line: the error itself would keep its arrays alive."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def autotune(
    kernel: Kernel,
    *args: Any,
    configs: Iterable[Any] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Any:
    """Tunes one call of a kernel, and returns the config; stores nothing.

    Args:
        kernel: the kernel.
        *args: its arguments; arrays are used as they are; where one is abstract, all are made up.
        configs: configs to try besides the heuristic one; default the kernel's candidates.
        num_warmup: calls of each candidate before it is timed.
        num_iters: rounds of timing, as in `Autotuner`.
        **kwargs: the call's keyword arguments.

    Returns:
        The fastest config that computes the right numbers; the heuristic one where none is clearly faster.

    Raises:
        TuningError: the heuristic config could not be run, or tuning inside a trace.
        ConfigError: a config of another type than the kernel's, or `None`.
        ValueError: `num_iters` is below 1, or `num_warmup` below 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops.kernels import LINEAR
        >>> autotune(LINEAR, jnp.ones((8, 3)), jnp.ones((3, 4)), num_iters=1).backend
        'xla'
    """
    require_kernel(kernel)
    configs = None if configs is None else list(configs)
    for cfg in configs or ():
        if cfg is None:
            raise ConfigError("configs has a None; expected configs")
        explicit_pairs(kernel, cfg)
    args, kwargs = kernel.prepare(*args, **kwargs)
    inv = Invocation(kernel, args, kwargs)
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
    concrete = bool(arrays) and not any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    tuner = Autotuner(num_warmup=num_warmup, num_iters=num_iters)
    return tuner.tune(inv, configs, inputs=_operands(inv, args, kwargs) if concrete else None).cfg


def _operands(inv: Invocation, args: tuple, kwargs: dict) -> list[Any]:
    """The arrays of a call in the order of its parameters."""
    bound = inv.kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return [x for x in jax.tree.leaves(tuple(bound.arguments.values())) if is_array(x)]
