"""`Bench`: the candidates of one call, compiled, checked and timed on this device, in this process."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.selection import why_illegal
from ..core.invocation import Invocation
from ..errors import DeviceLostError, TuningError
from ..utils.fingerprint import platform_kind
from .check import Reference, gradients, program
from .failures import alive_samples, failed, first_line, lost_device
from .isolation import ChildFailed
from .lowering import BACKENDS, LoweringPool, pool_for
from .measure import NoDeviceTime, device_times, interleaved
from .trial import Trial

SEED = 0
_COLD_BYTES = 256 << 20  # operands of this size push each other out of any L2
_MAX_COPIES = 64
_SHORT_MS, _FOLDS = 0.2, 16  # where dispatch would count, so many calls are one program


class Bench:
    """Compiles, checks and times configs of one call.

    Outputs go into buffers that are filled with NaN before each check, so that what a kernel does not write is found.
    On an accelerator the operands are rotated among copies that together exceed its caches, as they are cold in a
    train step. Device time comes from the profiler; without one, short programs are folded: the call many times over.

    Args:
        inv: the call.
        inputs: its operands; default random ones that the kernel makes.

    Raises:
        TuningError: the heuristic config, or the kernel's own code, does not run.
    """

    def __init__(self, inv: Invocation, inputs: Sequence[Any] | None = None):
        self.inv, self.notes, self.lost = inv, [], []
        self._programs: dict[Any, Any] = {}
        self._runs: dict[Any, Callable[[], Any]] = {}
        self._folded: dict[Any, Callable[[], Any]] = {}
        self._references: dict[Any, tuple[Reference | None, list[Any]]] = {}
        self._odd: list[Invocation] | None = None
        self._on_device = platform_kind(inv.platform) == "gpu"  # whether the device is asked for times
        self._turn, reason = 0, None
        try:
            made = inv.kernel.make_inputs(inv, np.random.default_rng(SEED)) if inputs is None else inputs
            kept = [jnp.asarray(x) for x in made]
            self._reference = Reference(inv, kept)
            self._sets = [*(list(map(jnp.copy, kept)) for _ in range(_num_copies(kept, inv.platform))), kept]
            self._stale = self._poison()
        except Exception as error:  # code of the kernel's author may fail in any way
            reason = first_line(error)
        if reason is not None:  # outside, for an error that holds another one holds its arrays
            raise TuningError(f"the heuristic config of {inv!r} does not run, so nothing can be compared: {reason}")

    def check(self, configs: Sequence[Any], warmup: int = 1) -> Iterator[Trial]:
        """Compiles configs, several at a time, and runs each alone.

        Args:
            configs: the configs.
            warmup: runs after the checked one.

        Yields:
            A trial of each: `"timed"` without a time where it may be timed.

        Raises:
            DeviceLostError: a candidate broke the device.
        """
        workers = min(16, os.cpu_count() or 1)
        threads = concurrent.futures.ThreadPoolExecutor(workers)
        pool = pool_for(self.inv, list(configs))
        try:
            runs = [(cfg, self._run_of(cfg, threads, pool)) for cfg in configs]
            waiting = ((cfg, self._begin(cfg, run, threads)) for cfg, run in runs)
            begun = collections.deque(itertools.islice(waiting, workers + 1))
            while begun:
                cfg, trial = begun.popleft()
                trial = trial.result() if isinstance(trial, concurrent.futures.Future) else trial
                begun.extend(itertools.islice(waiting, 1))
                yield trial if trial is not None else self._checked(cfg, warmup)
        finally:  # whoever has seen enough does not wait for the rest
            if pool is not None:
                pool.close()
            threads.shutdown(cancel_futures=True)

    def _run_of(self, cfg: Any, threads: Any, pool: LoweringPool | None) -> Callable[[], Any]:
        """What gives the call with a config as a function: lowered in another process, if that has begun."""
        if pool is not None and getattr(cfg, "backend", None) in BACKENDS:
            return threads.submit(pool.lower, cfg, program(self.inv, cfg)).result
        return lambda: program(self.inv, cfg)

    def _begin(self, cfg: Any, run_of: Callable[[], Any], threads: Any) -> Any:
        """Lowers a config here, for JAX's settings are those of a thread, and has it compiled in another thread.

        Returns:
            A trial where that cannot be, else a future of one, or of `None`.
        """
        if (reason := why_illegal(self.inv, cfg)) is not None:
            return Trial(cfg, "illegal", reason=reason)
        try:
            run, types = run_of(), self._reference.types
            into = jax.jit(lambda operands, stale: run(*operands), donate_argnums=1, keep_unused=True)
            traced = into.trace(self._sets[0], types)
            found = [(x.shape, x.dtype) for x in traced.out_info]
            if found != (expected := [(x.shape, x.dtype) for x in types]):
                return Trial(cfg, "wrong", reason=f"outputs are {found}, expected {expected}")
            return threads.submit(self._compile, cfg, traced.lower())
        except ChildFailed as error:
            return failed(cfg, "compile_failed" if error.status == "run_failed" else error.status, error)
        except Exception as error:  # a candidate may fail in any way, and must not take the others along
            return failed(cfg, "compile_failed", error)

    def _compile(self, cfg: Any, lowered: Any) -> Trial | None:
        try:
            self._programs[cfg] = lowered.compile()
        except Exception as error:
            return failed(cfg, "compile_failed", error)
        return None

    def _checked(self, cfg: Any, warmup: int) -> Trial:
        """Runs a compiled config into poisoned buffers, and looks at outputs and operands."""
        compiled = self._programs.pop(cfg)
        if (reason := _too_large(compiled, self._sets[0])) is not None:
            return Trial(cfg, "out_of_memory", reason=reason)
        trial, text = Trial(cfg, "timed"), ""
        self._stale = None  # the last outputs go before new buffers come
        try:
            self._stale = self._poison()
            outs = self._stale = jax.block_until_ready(compiled(self._sets[0], self._stale))
            fault = self._reference.fault(outs)
            if (changed := self._changed_operands()) is not None:
                fault = f"{fault}; {changed}" if fault else changed
            if fault is not None:
                trial = Trial(cfg, "wrong", reason=fault)
            else:
                self._runs[cfg] = self._runner(compiled)
                for _ in range(warmup):
                    jax.block_until_ready(self._runs[cfg]())
        except Exception as error:
            trial, text = failed(cfg, "run_failed", error), str(error) or "failed"
        if text:
            self._recover(cfg, text)
        return trial

    def _recover(self, cfg: Any, text: str) -> None:
        """After a failed run: its buffers may be gone, and its operands changed.

        Raises:
            DeviceLostError: the error's text says that the device is gone.
        """
        self._runs.pop(cfg, None)
        if lost_device(text):
            last = text.strip().splitlines()[-1][:300]
            raise DeviceLostError(f"{self.inv.op_id_v} with {cfg} lost the device: {last}")
        self._changed_operands()
        self._stale = self._poison()

    def _runner(self, compiled: Any) -> Callable[[], Any]:
        """A call without arguments: the next operands in, the last outputs overwritten."""

        def run() -> Any:
            self._turn = (self._turn + 1) % (len(self._sets) - 1)
            self._stale = compiled(self._sets[self._turn], self._stale)
            return self._stale

        return run

    def _poison(self) -> list[Any]:
        return [_poisoned(x) for x in self._reference.types]

    def _changed_operands(self) -> str | None:
        """Which operand a candidate wrote to; it is put back."""
        changed = [i for i, (x, kept) in enumerate(zip(self._sets[0], self._sets[-1])) if not _is_same(x, kept)]
        for index in changed:
            self._sets[0][index] = jnp.copy(self._sets[-1][index])
        return f"operand {changed[0]} was changed" if changed else None

    def sample(self, configs: Sequence[Any], rounds: int, deadline: float | None = None) -> list[list[float]]:
        """Samples of checked configs in milliseconds, taken in turns; one that fails now has infinite times, and is in
        `lost`.

        Raises:
            DeviceLostError: a candidate broke the device.
        """
        return alive_samples(self, self.sampled, configs, rounds, deadline)

    def sampled(self, configs: Sequence[Any], rounds: int, deadline: float | None) -> list[list[float]] | Trial:
        """Samples of configs, or where one of them fails, how; it is called the first one's failure."""
        try:
            return self._times(configs, rounds, deadline)
        except Exception as error:
            trial, text = failed(configs[0], "run_failed", error), str(error)
        runs = dict(self._runs)
        self._recover(configs[0], text)
        self._runs = runs  # which of them it was is asked next
        return trial

    def _times(self, configs: Sequence[Any], rounds: int, deadline: float | None) -> list[list[float]]:
        runs = [self._runs[cfg] for cfg in configs]
        if self._on_device:
            try:
                return device_times(runs, rounds, deadline)
            except NoDeviceTime as error:
                self._on_device = False  # for all, so that no two clocks are compared
                self.notes.append(f"timed by the wall clock: {error}")
        count = min(_FOLDS, len(self._sets) - 1)
        if platform_kind(self.inv.platform) == "cpu" or rounds < 5 or count < 2:
            return interleaved(runs, rounds, deadline)
        if statistics.median(interleaved(runs[:1], 3)[0]) > _SHORT_MS:
            return interleaved(runs, rounds, deadline)
        times = interleaved([self._fold(cfg, count) for cfg in configs], rounds, deadline)
        return [[ms / count for ms in each] for each in times]

    def _fold(self, cfg: Any, count: int) -> Callable[[], Any]:
        """The call many times over as one program, with other operands each time, so that XLA cannot share any."""
        if cfg not in self._folded:
            run, sets = program(self.inv, cfg), self._sets[:count]
            many = jax.jit(lambda sets: [run(*operands) for operands in sets]).lower(sets).compile()
            jax.block_until_ready(many(sets))
            self._folded[cfg] = lambda: many(sets)
        return self._folded[cfg]

    def verify(self, cfg: Any) -> str | None:
        """Why a config may not win, from what only winners are asked: odd lengths, and the gradient of its code.

        What the heuristic config cannot do is not asked, nor is an odd call for which the config does not compile.

        Raises:
            DeviceLostError: the config broke the device.
        """
        for inv in self._odd_calls():
            if why_illegal(inv, cfg) is None and (fault := self._fault(inv, cfg, program)) is not None:
                return f"{inv!r}: {fault}"
        if self.inv.kernel.backward is None and self.inv.needs is None:
            if (fault := self._fault(self.inv, cfg, gradients)) is not None:
                return f"gradient: {fault}"
        return None

    def _odd_calls(self) -> list[Invocation]:
        if self._odd is not None:
            return self._odd
        try:
            self._odd = list(self.inv.kernel.odd_calls(self.inv))
            return self._odd
        except Exception as error:
            reason = first_line(error)
        raise TuningError(f"odd_calls of {self.inv!r} does not run: {reason}")

    def _fault(self, inv: Invocation, cfg: Any, of: Callable[..., Any]) -> str | None:
        reference, inputs = self._reference_of(inv, of)
        if reference is None:
            return None
        try:
            compiled = jax.jit(of(inv, cfg)).lower(*inputs).compile()
        except Exception as error:
            return first_line(error) if of is gradients else None
        try:
            return reference.fault(jax.block_until_ready(compiled(*inputs)))
        except Exception as error:
            reason, text = first_line(error), str(error)
        self._recover(cfg, text)
        return reason

    def _reference_of(self, inv: Invocation, of: Callable[..., Any]) -> tuple[Reference | None, list[Any]]:
        """The reference of another computation and its operands; `None` where the heuristic cannot do it."""
        known, reason = self._references, ""
        if (id(inv), of) not in known:
            try:
                made = inv.kernel.make_inputs(inv, np.random.default_rng(SEED + 1)) if of is program else self._sets[-1]
                known[id(inv), of] = Reference(inv, made, of), made
            except Exception as error:
                known[id(inv), of], reason = (None, []), str(error)
        if lost_device(reason):
            raise DeviceLostError(f"the heuristic config of {inv!r} lost the device")
        return known[id(inv), of]

    def close(self) -> None:
        """Frees all arrays and programs."""
        self._sets, self._stale = [], None
        for table in (self._programs, self._runs, self._folded, self._references):
            table.clear()


def _bytes(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _num_copies(arrays: Sequence[Any], platform: str | None) -> int:
    """One to run with; on an accelerator as many as push each other out of its caches."""
    if platform_kind(platform) == "cpu":
        return 1
    return max(1, min(_MAX_COPIES, math.ceil(_COLD_BYTES / max(1, _bytes(arrays)))))


def _poisoned(like: jax.ShapeDtypeStruct) -> jax.Array:
    """A buffer of values that no kernel computes: NaN, the largest integer, True."""
    if jnp.issubdtype(like.dtype, jnp.inexact):
        value = jnp.nan
    else:
        value = True if jnp.issubdtype(like.dtype, jnp.bool_) else jnp.iinfo(like.dtype).max
    return jnp.full(like.shape, value, like.dtype, device=like.sharding)


@jax.jit
def _equal(x: Any, y: Any) -> Any:
    return jnp.array_equal(x, y, equal_nan=bool(jnp.issubdtype(x.dtype, jnp.inexact)))


def _is_same(x: Any, y: Any) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # typed keys
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return bool(_equal(x, y))


def _too_large(compiled: Any, operands: Sequence[jax.Array]) -> str | None:
    """Why a program cannot run in what is left of the device's memory."""
    device = next((d for x in operands for d in x.devices()), None)
    stats, needed = device and device.memory_stats(), compiled.memory_analysis()
    if not stats or "bytes_limit" not in stats or needed is None:
        return None
    wanted, left = needed.temp_size_in_bytes, stats["bytes_limit"] - stats["bytes_in_use"]
    return None if wanted <= left else f"needs {wanted >> 20} MiB beside its operands, {left >> 20} MiB are left"
