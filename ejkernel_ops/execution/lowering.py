"""`LoweringPool`: Triton compiles while JAX lowers, in Python, so only processes do that in parallel."""

from __future__ import annotations

import base64
import importlib.util
import os
import queue
from collections.abc import Callable
from typing import Any

import jax.export

from ..core.invocation import Invocation
from ..errors import TuningError
from .isolation import Child, ChildFailed, plain_config, setup_message

BACKENDS = ("triton",)  # what is compiled while it is lowered
_FEWEST = 12  # starting processes takes seconds: on an H200 eight small kernels took 7.2 s so, and 4.0 s in threads
_TIMEOUT_S = 120.0


class LoweringPool:
    """Child processes that lower configs of one call, and need no device for it.

    Args:
        inv: the call.
        workers: how many processes.

    Raises:
        TuningError: a kernel that a new process cannot import.
    """

    def __init__(self, inv: Invocation, workers: int):
        self._setup = setup_message(inv, None)
        self._idle: queue.Queue[Child | None] = queue.Queue()
        self._children: list[Child] = []
        self._unable = False  # whether a new process has failed to make the call
        for _ in range(workers):
            self._idle.put(None)

    def lower(self, cfg: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """The call with a config as a function of its operands, lowered in another process. Threads may share a pool.

        Args:
            cfg: the config.
            otherwise: what is returned where new processes cannot make the call.

        Raises:
            ChildFailed: it could not be lowered, and why.
        """
        if self._unable:
            return otherwise
        child = self._idle.get()
        try:
            if child is None:
                child = Child({"JAX_PLATFORMS": "cpu"})  # one process holds the device: this one
                self._children.append(child)
                if not self._met(child):
                    return otherwise
            text = child.ask({"do": "lower", "config": plain_config(cfg)}, _TIMEOUT_S)
            return jax.export.deserialize(bytearray(base64.b64decode(text))).call
        except BaseException:
            if child is not None:
                child.kill()
                child = None
            raise
        finally:
            self._idle.put(child)

    def _met(self, child: Child) -> bool:
        try:
            child.ask(self._setup | {"do": "meet", "keep": ["jax_platforms"]})
        except ChildFailed:
            self._unable = True
        return not self._unable

    def close(self) -> None:
        """Ends the processes."""
        for child in self._children:
            child.kill()


def pool_for(inv: Invocation, configs: list[Any]) -> LoweringPool | None:
    """A pool, where one pays: enough configs of such back ends, cores, and a kernel that can be imported."""
    slow = [cfg for cfg in configs if getattr(cfg, "backend", None) in BACKENDS]
    workers = min(len(slow), 8, (os.cpu_count() or 1) - 1)
    if len(slow) < _FEWEST or workers < 2 or importlib.util.find_spec("flatbuffers") is None:  # which export needs
        return None
    try:
        return LoweringPool(inv, workers)
    except TuningError:
        return None
