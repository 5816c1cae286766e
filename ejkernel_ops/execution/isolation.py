"""`IsolatedBench`: as `Bench`, but in a child process that may crash, hang or lose its device."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import jax
import numpy as np

from ..config.cache import Key
from ..config.schema import to_json
from ..core.call import call_like
from ..core.gradient_methods import MethodBackward
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..environment import child_environment
from ..errors import TuningError
from ..registry import call_to_plain
from .failures import alive_samples
from .trial import Trial

_SETUP_S = 600.0  # importing, and computing the reference: the call's work, not a candidate's
# What changes numbers or programs, and may be set in this process alone.
_SETTINGS = (
    "jax_platforms", "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_compilation_cache_dir",
)  # fmt: skip


class ChildFailed(Exception):
    """A child process that died (`status` "crashed"), hung ("timed_out"), or says what is wrong ("run_failed")."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class IsolatedBench:
    """Compiles, checks and times configs of one call in a child process, which is replaced when it fails.

    Args:
        inv: the call.
        inputs: its operands; default random ones that the kernel makes.
        timeout_s: for compiling and checking one config.

    Raises:
        TuningError: a kernel that a new process cannot import, or whose heuristic config does not run there.
    """

    def __init__(self, inv: Invocation, inputs: Sequence[Any] | None = None, timeout_s: float = 60.0):
        self.inv, self.timeout_s, self.lost, self.notes = inv, timeout_s, [], []
        self._inputs = None if inputs is None else list(map(_as_numpy, inputs))
        self._setup = setup_message(inv, self._inputs)
        self._child: Child | None = None
        self._spare: Child | None = Child()  # the next one imports while this one works
        reason = None
        try:
            self._ask({"do": "hello"})
        except ChildFailed as error:
            reason = f"{error.status}: {error.reason}"
        finally:
            if self._child is None:  # whatever it was, an interrupt too
                self.close()
        if reason is not None:
            self.close()
            raise TuningError(f"a child process cannot tune {inv!r}: {reason}")

    def check(self, configs: Sequence[Any], warmup: int = 1) -> Iterator[Trial]:
        """A trial of each config, one after the other."""
        for cfg in configs:
            try:
                yield Trial(cfg, **self._ask({"do": "check", "config": plain_config(cfg), "warmup": warmup}))
            except ChildFailed as error:
                yield Trial(cfg, error.status, reason=error.reason)

    def sample(self, configs: Sequence[Any], rounds: int, deadline: float | None = None) -> list[list[float]]:
        """Samples of checked configs; one that fails now has infinite times, and is in `lost`."""
        if self._spare is not None:
            with contextlib.suppress(ChildFailed):
                self._spare.imported(_SETUP_S)  # not while others are timed
        return alive_samples(self, self._sampled, configs, rounds, deadline)

    def _sampled(self, configs: Sequence[Any], rounds: int, deadline: float | None) -> list[list[float]] | Trial:
        left = None if deadline is None else deadline - time.monotonic()
        ask = {"do": "sample", "rounds": rounds, "seconds": left, "configs": list(map(plain_config, configs))}
        try:
            found = self._ask(ask, self.timeout_s * (1 + len(configs)))
        except ChildFailed as error:
            return Trial(configs[0], error.status, reason=error.reason)
        self.notes += [note for note in found["notes"] if note not in self.notes]
        return found["times"]

    def verify(self, cfg: Any) -> str | None:
        """Why a config may not win; see `Bench.verify`."""
        try:
            return self._ask({"do": "verify", "config": plain_config(cfg)}, 4 * self.timeout_s)
        except ChildFailed as error:
            return f"{error.status}: {error.reason}"

    def _ready_child(self) -> Child:
        """A child that knows the call; a setup that fails is tried once more, for a dead one's memory may come late."""
        for last in (False, True):
            child, self._spare = self._spare or Child(), None
            try:
                child.ask(self._setup, _SETUP_S, self._inputs)
                self._spare = Child()
                return child
            except ChildFailed:
                child.kill()
                if last:
                    raise
            except BaseException:
                child.kill()
                raise
        raise AssertionError

    def close(self) -> None:
        """Ends the child processes."""
        for child in (self._child, self._spare):
            if child is not None:
                child.kill()
        self._child = self._spare = None

    def _ask(self, message: dict[str, Any], timeout: float | None = None) -> Any:
        """The child's answer.

        Raises:
            ChildFailed: it has none; a child that died or hung is replaced.
        """
        if self._child is None:
            self._child = self._ready_child()
        try:
            return self._child.ask(message, timeout or self.timeout_s)
        except ChildFailed as error:
            if error.status != "run_failed" and self._child is not None:
                self._child.kill()
                self._child = None
            raise


class Child:
    """A new Python process that answers questions on a pipe.

    Args:
        more: environment variables besides those of this process.
    """

    def __init__(self, more: Mapping[str, str] | None = None):
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "ejkernel_ops.execution.child", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=child_environment() | dict(more or {}), pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        theirs.close()
        self._imported, self._dead = False, False

    def imported(self, timeout: float) -> None:
        """Waits until the process has done its imports.

        Raises:
            ChildFailed: it has died of them.
        """
        if self._imported or self._dead:
            return
        try:
            if not self._pipe.poll(timeout):
                raise ChildFailed("timed_out", f"no import within {timeout:g} s; killed")
            self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise ChildFailed("crashed", self._last_words()) from None
        self._imported = True

    def ask(
        self, message: dict[str, Any], timeout: float = _SETUP_S, arrays: Sequence[np.ndarray] | None = None
    ) -> Any:
        """Sends a question and waits for the answer.

        Raises:
            ChildFailed: there is none, or it is an error.
        """
        self.imported(_SETUP_S)
        try:
            send(self._pipe, message, arrays or ())
            if not self._pipe.poll(timeout):
                raise ChildFailed("timed_out", f"no answer within {timeout:g} s; killed")
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise ChildFailed("crashed", self._last_words()) from None
        if "error" in answer:
            raise ChildFailed("crashed" if answer["lost"] else "run_failed", answer["error"])
        return answer["is"]

    def _last_words(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe and went on; killed"
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return how + (f": {lines[-1][:300]}" if lines else "")

    def kill(self) -> None:
        """Ends the process and what it started; again: nothing."""
        if self._dead:
            return
        self._dead = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._log.close()


def _as_numpy(x: Any) -> np.ndarray:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
        raise TuningError(f"isolate=True cannot hand over operands of type {x.dtype}; leave inputs or isolate out")
    return np.asarray(x)


def send(pipe: Connection, message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """A message as JSON, and arrays as bytes behind it."""
    pipe.send_bytes(json.dumps(message).encode())
    for x in arrays:
        pipe.send_bytes(json.dumps([x.dtype.name, x.shape]).encode())
        pipe.send_bytes(x.tobytes() or b"\0")


def setup_message(inv: Invocation, inputs: list | None) -> dict[str, Any]:
    """All that a new process needs to make the call again."""
    call, _ = call_like(inv)
    inv.call = call
    kernels = [inv.kernel, *([call.forward.kernel] if call.forward is not None else [])]
    settings = {name: getattr(jax.config, name) for name in _SETTINGS if hasattr(jax.config, name)}
    return {
        "do": "setup",
        "settings": settings,
        "kernels": [_address(kernel) for kernel in reversed(kernels)],
        "call": call_to_plain(Key(inv.device_fingerprint, inv.op_id_v, inv.call_key), inv),
        "platform": inv.platform or jax.default_backend(),
        "num_inputs": None if inputs is None else len(inputs),
    }


def _address(kernel: Kernel) -> dict[str, str]:
    """Where a new process finds a kernel."""
    if isinstance(kernel, MethodBackward):  # it comes with its forward
        kernel = kernel.forward
    cls = type(kernel)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise TuningError(
            f"isolate=True needs kernels that a new process can import; {cls.__qualname__} is defined in "
            f"{'the main script' if cls.__module__ == '__main__' else 'a function'}: move it into a module, or leave "
            "isolate out"
        )
    return {"op": kernel.op_id_v, "module": cls.__module__, "class": cls.__qualname__}


def plain_config(cfg: Any) -> dict[str, Any]:
    """A config and its type as JSON data."""
    kind = f"{type(cfg).__module__}:{type(cfg).__qualname__}"
    return {"type": kind, "config": json.loads(to_json(cfg))}
