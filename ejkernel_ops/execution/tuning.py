"""`Autotuner`: tries the configs of one call, and keeps the fastest that computes the right numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..config.selection import heuristic, why_illegal
from ..core.call import explicit_pairs
from ..core.invocation import Invocation
from ..core.kernel import Kernel, require_kernel
from ..errors import ConfigError, DeviceLostError, TuningError
from ..utils.fingerprint import is_array
from .bench import Bench
from .failures import first_line
from .measure import BUSY, benchmark, inside_trace, interleaved, on_one_device, spread
from .result import AutotuningResult, Entry
from .search import ordered, race
from .trial import Trial, Tuned

__all__ = ["Autotuner", "AutotuningResult", "Entry", "Trial", "Tuned", "autotune", "benchmark"]


class Autotuner:
    """Tunes one call at a time: order, compile, check numbers, race, and the best few against the heuristic again.

    Args:
        num_warmup: calls of each candidate before it is timed.
        num_iters: half the rounds in which the finalists meet the heuristic.
        min_gain: part of the heuristic's time that a config must save to replace it.
        finalists: how many go into the last rounds, the heuristic not counted.
        budget_s: seconds for one call; when they are over the best so far is taken. `None`: no limit.
        max_compiles: configs that are compiled for one call; the ones that promise least are left out.
        isolate: try candidates in a child process that may crash or hang. Needs a kernel that a new process can
            import, and configs with a JSON form.
        trial_timeout_s: with `isolate`, seconds for compiling and checking one config.

    Raises:
        ValueError: a count below 1 (of warm-up calls: below 0), a negative gain or no time.

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
        *,
        max_compiles: int = 24,
        isolate: bool = False,
        trial_timeout_s: float = 60.0,
    ):
        for name, value, least in (
            ("num_warmup", num_warmup, 0), ("num_iters", num_iters, 1), ("finalists", finalists, 1),
            ("min_gain", min_gain, 0), ("max_compiles", max_compiles, 1),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        for name, seconds in (("trial_timeout_s", trial_timeout_s), ("budget_s", budget_s)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} is {seconds}; expected seconds above 0")
        self.num_warmup, self.num_iters, self.min_gain = num_warmup, num_iters, min_gain
        self.finalists, self.budget_s, self.max_compiles = finalists, budget_s, max_compiles
        self.isolate, self.trial_timeout_s = isolate, trial_timeout_s

    def tune(
        self,
        inv: Invocation,
        candidates: Iterable[Any] | None = None,
        on_event: Callable[..., None] | None = None,
        inputs: Sequence[Any] | None = None,
        hints: Iterable[Any] = (),
    ) -> Tuned:
        """Tunes one call.

        Args:
            inv: the abstract call.
            candidates: configs to try; default the kernel's.
            on_event: called as `on_event("trial", op_id_v=, trial=, done=, total=)` when a candidate is checked, and as
                `on_event("sampled", op_id_v=, count=, best_ms=)` when some have been timed.
            inputs: operands; default random ones that the kernel makes.
            hints: configs to try first, such as winners at neighbouring shapes.

        Returns:
            The winner and all trials.

        Raises:
            TuningError: the heuristic config could not be run, or tuning inside a trace.
            DeviceLostError: a candidate broke the device: restart the process.
        """
        if inside_trace():
            raise TuningError(f"tuning {inv!r} inside a trace would time nothing; tune outside jit, grad and vmap")
        with on_one_device() if inputs is None else contextlib.nullcontext():
            return self._tuned(inv, candidates, on_event, inputs, hints)

    def _tuned(self, inv: Invocation, candidates: Any, on_event: Any, inputs: Any, hints: Iterable[Any]) -> Tuned:
        deadline = None if self.budget_s is None else time.monotonic() + self.budget_s
        default, configs = _configs(inv, candidates, hints)
        bench = self._bench(inv, inputs)
        try:
            trials = self._screened(bench, configs, deadline, on_event)
            return self._decided(bench, default, trials, deadline, on_event)
        except DeviceLostError as error:
            reason = str(error)
        finally:
            bench.close()
        raise DeviceLostError(f"{reason}. Restart this process; Autotuner(isolate=True) tries candidates in a child")

    def _bench(self, inv: Invocation, inputs: Sequence[Any] | None) -> Any:
        if not self.isolate:
            return Bench(inv, inputs)
        from .isolation import IsolatedBench

        return IsolatedBench(inv, inputs, self.trial_timeout_s)

    def _screened(self, bench: Any, configs: list, deadline: float | None, on_event: Any) -> dict[Any, Trial]:
        """A trial of each config: compiled and checked, as far as compiles and time allow."""
        trials: dict[Any, Trial] = {}
        if deadline is not None:  # the rest is for the race
            deadline -= 0.3 * (self.budget_s or 0.0)
        legal = [cfg for cfg in configs if why_illegal(bench.inv, cfg) is None]
        tried = set(legal[: self.max_compiles])
        with contextlib.closing(bench.check([cfg for cfg in configs if cfg in tried], self.num_warmup)) as left:
            for cfg in configs:
                if (reason := why_illegal(bench.inv, cfg)) is not None:
                    trial = Trial(cfg, "illegal", reason=reason)
                elif cfg not in tried:
                    trial = Trial(cfg, "not_tried", reason=f"max_compiles={self.max_compiles} more promising ones were")
                elif deadline is not None and time.monotonic() > deadline and trials:
                    trial = Trial(cfg, "not_tried", reason="the time budget was over")
                else:
                    trial = next(left)
                trials[cfg] = trial
                if on_event is not None:
                    on_event("trial", op_id_v=bench.inv.op_id_v, trial=trial, done=len(trials), total=len(configs))
        return trials

    def _decided(
        self, bench: Any, default: Any, trials: dict[Any, Trial], deadline: float | None, on_event: Any
    ) -> Tuned:
        """Races what may be timed, and writes the times into the trials."""
        if trials[default].status != "timed":
            reasons = "; ".join(f"{t.cfg}: {t.reason}" for t in trials.values() if t.reason)
            raise TuningError(
                f"the heuristic config of {bench.inv!r} does not run, so nothing can be compared: {reasons}"
            )
        best = math.inf

        def sampled(configs: Sequence[Any], rounds: int) -> list[list[float]]:
            nonlocal best
            times = bench.sample(configs, rounds, deadline)
            best = min(best, *map(statistics.median, times))
            if on_event is not None:
                on_event("sampled", op_id_v=bench.inv.op_id_v, count=len(configs), best_ms=best)
            return times

        found = race(
            default,
            [cfg for cfg, trial in trials.items() if trial.status == "timed"],
            sampled,
            bench.verify,
            finalists=self.finalists,
            rounds=2 * self.num_iters,
            min_gain=self.min_gain,
        )
        for cfg, times in found.samples.items():
            trials[cfg] = dataclasses.replace(trials[cfg], ms=found.times[cfg], spread=spread(times))
        for cfg, reason in found.rejected.items():
            trials[cfg] = Trial(cfg, "wrong", reason=reason)
        trials |= {trial.cfg: trial for trial in bench.lost}
        if trials[default].status != "timed":
            raise TuningError(f"the heuristic config of {bench.inv!r} failed: {trials[default].reason}")
        busy = max(trials[default].spread or 0.0, trials[found.winner].spread or 0.0)
        notes = [
            *bench.notes,
            *([f"the device was busy: times spread by {busy:.0%}; tune again when it is not"] if busy > BUSY else []),
        ]
        times = found.times
        return Tuned(found.winner, default, times[found.winner], times[default], tuple(trials.values()), tuple(notes))

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
            except Exception as error:  # a candidate may fail in any way
                reasons.append(f"{cfg}: {first_line(error)}")
        if not runs:
            raise TuningError(f"no candidate could be run: {'; '.join(reasons) or 'there are none'}")
        times = dict(zip(runs, interleaved(list(runs.values()), self.num_iters)))
        return min(runs, key=lambda cfg: statistics.median(times[cfg]))


def _configs(inv: Invocation, candidates: Iterable[Any] | None, hints: Iterable[Any]) -> tuple[Any, list[Any]]:
    """Heuristic config and all configs in order: code of the kernel's author, which may fail in any way."""
    step = "the heuristic config"
    try:
        default = heuristic(inv)
        step = "candidate_cfgs"
        found = list(inv.kernel.all_candidates(inv) if candidates is None else candidates)
        step = "cost"
        return default, ordered(inv, default, found, hints)
    except Exception as error:
        reason = first_line(error)
    raise TuningError(f"{step} of {inv!r} does not run, so nothing can be compared: {reason}")


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
        num_iters: half the last rounds of timing, as in `Autotuner`.
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
