"""The child process of `IsolatedBench`: answers questions about one call until the pipe closes."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ..config.entry import type_named
from ..config.schema import from_plain
from ..core.invocation import Invocation
from ..core.kernel import KERNELS
from ..errors import ConfigError, DeviceLostError, TuningError
from ..registry import call_from_plain
from ..triton_target import TARGETS
from .bench import Bench
from .check import program
from .failures import first_line
from .isolation import send
from .trial import Trial


class _Lowerer:
    """Knows one call, and lowers configs of it; needs no device."""

    def __init__(self, setup: dict[str, Any]):
        for name, value in setup["settings"].items():
            if getattr(jax.config, name, value) != value and name not in setup.get("keep", ()):
                jax.config.update(name, value)
        for kernel in setup["kernels"]:
            _make(kernel["op"], kernel["module"], kernel["class"])
        _, self.inv = call_from_plain(setup["call"])
        self.platform = "cuda" if setup["platform"] == "gpu" else setup["platform"]

    def lower(self, config: dict[str, Any]) -> str:
        run = jax.jit(program(self.inv, _config(self.inv, config)))
        trusted = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
        exported = jax.export.export(run, platforms=[self.platform], disabled_checks=trusted)(*self.inv.operands)
        return base64.b64encode(exported.serialize()).decode()


class _Server(_Lowerer):
    """One bench, and the answers about it."""

    def __init__(self, setup: dict[str, Any], inputs: Sequence[np.ndarray] | None):
        super().__init__(setup)
        self.bench = Bench(self.inv, None if inputs is None else [jnp.asarray(x) for x in inputs])
        self.checked: set[Any] = set()

    def hello(self) -> str:
        return "ready"

    def check(self, config: dict[str, Any], warmup: int = 1) -> dict[str, Any]:
        cfg = _config(self.inv, config)
        [trial] = self.bench.check([cfg], warmup)
        if trial.status == "timed":
            self.checked.add(cfg)
        return {"status": trial.status, "reason": trial.reason}

    def sample(self, configs: list[dict[str, Any]], rounds: int, seconds: float | None) -> dict[str, Any]:
        deadline = None if seconds is None else time.monotonic() + seconds
        for config in configs:  # a child that took over from another one knows none of them
            if _config(self.inv, config) not in self.checked and (trial := self.check(config))["status"] != "timed":
                raise ConfigError(f"{config['config']}: {trial['status']}: {trial['reason']}")
        found = self.bench.sampled([_config(self.inv, config) for config in configs], rounds, deadline)
        if isinstance(found, Trial):  # the parent asks which of them it was
            raise TuningError(found.reason)
        return {"times": found, "notes": self.bench.notes}

    def verify(self, config: dict[str, Any]) -> str | None:
        return self.bench.verify(_config(self.inv, config))


def _make(op_id_v: str, module: str, name: str) -> None:
    """Imports a kernel; one that its module does not make is made from its class."""
    found = importlib.import_module(module)
    if op_id_v in KERNELS:
        return
    try:
        functools.reduce(getattr, name.split("."), found)(*op_id_v.split("@v"))  # type: ignore[operator]
    except Exception as error:
        advice = f"make the kernel when {module} is imported: {name}(...)"
        raise ConfigError(f"{op_id_v} cannot be made in a new process ({first_line(error)}); {advice}") from None


def _config(inv: Invocation, data: dict[str, Any]) -> Any:
    kind = inv.kernel.config_cls or type_named(data["type"])
    if kind is None:
        raise ConfigError(f"the type {data['type']} of a config is not known in a new process; expected a dataclass")
    return from_plain(data["config"], kind)


def _arrays(pipe: Connection, count: int) -> list[np.ndarray]:
    found = []
    for _ in range(count):
        name, shape = json.loads(pipe.recv_bytes())
        raw, dtype = pipe.recv_bytes(), jnp.dtype(name)
        found.append(np.frombuffer(raw, np.uint8)[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape))
    return found


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere a hung child may outlive its parent
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main(fd: int) -> None:
    """Answers until the other side is gone."""
    _die_with_parent()
    os.dup2(2, 1)  # what kernels print is not for the pipe
    pipe, server = Connection(fd), None
    send(pipe, {"is": "imported"})
    with contextlib.suppress(EOFError):
        while True:
            message = json.loads(pipe.recv_bytes())
            what = message.pop("do")
            try:
                if what == "meet":
                    server = _Lowerer(message)
                    answer: dict[str, Any] = {"is": "ready"}
                elif what == "setup":
                    count = message["num_inputs"]
                    server = _Server(message, None if count is None else _arrays(pipe, count))
                    answer = {"is": "ready"}
                else:
                    answer = {"is": getattr(server, what)(**message)}
            except Exception as error:  # the parent decides what it means
                answer = {"error": first_line(error), "lost": isinstance(error, DeviceLostError)}
            send(pipe, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
