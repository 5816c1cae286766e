"""A kernel whose candidates crash, hang or lie, in a module that a new process can import."""

import ctypes
import dataclasses
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import Kernel


@dataclasses.dataclass(frozen=True)
class WildConfig:
    """What a candidate does, when it is traced or when it runs."""

    kind: str = "right"
    ms: float = 0.0
    index: int = 0


def _abort():
    os.abort()


def _exit():
    os._exit(139)


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _hang():
    while True:
        time.sleep(0.01)


def _raise():
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")


WHEN_TRACED = {"abort": _abort, "exit": _exit, "kill": _kill, "hang": _hang}


def _late():
    RUNS.append(1)
    if len(RUNS) > 2:  # a check and a warm-up
        raise ValueError("too late")


RUNS = []
WHEN_RUN = {"run_late": _late, "run_kill": _kill, "run_hang": _hang, "run_lost": _raise}


OPERANDS = []  # where a candidate that writes finds them


class Wild(Kernel[WildConfig, jax.Array]):
    """Doubles."""

    name = "wild"

    def heuristic_cfg(self, inv):
        return WildConfig(ms=20.0)  # far from the rest: other processes may be busy

    def run(self, x, *, cfg):
        if cfg.kind in WHEN_TRACED:
            WHEN_TRACED[cfg.kind]()

        def host(x):
            if cfg.kind in WHEN_RUN:
                WHEN_RUN[cfg.kind]()
            time.sleep(cfg.ms / 1e3)
            y = np.asarray(x) * (3 if cfg.kind == "writes wrong" else 2)
            if cfg.kind.startswith("writes"):  # into its operand, as a kernel with a wrong pointer does
                ctypes.memset(OPERANDS[0].unsafe_buffer_pointer(), 0, 4)
            if cfg.kind == "writes late":
                raise RuntimeError("after it has written")
            return y

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + jnp.zeros_like(x)


WILD = Wild()
