"""Starts two real processes of `jax.distributed` on one machine."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent


def run_two(folder, command, limit, devices=4):
    """The exit status of two processes, and what each wrote to its two streams; who takes longer is killed, and named.

    Args:
        folder: where their output goes.
        command: from a rank and a port to the arguments of Python.
        limit: seconds for both.
        devices: of each process.

    Returns:
        Exit statuses, outputs, errors and the ranks of those that were killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
    }  # fmt: skip
    files = [[folder / f"{name}{rank}" for name in ("out", "err")] for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (out, err) in enumerate(files):
            streams = [stack.enter_context(path.open("w")) for path in (out, err)]
            arguments = [sys.executable, *map(str, command(rank, port))]
            processes.append(subprocess.Popen(arguments, stdout=streams[0], stderr=streams[1], env=env))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        deadline, hung = time.monotonic() + limit, []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
    texts = [[path.read_text() for path in each] for each in zip(*files)]
    return [process.returncode for process in processes], *texts, hung
