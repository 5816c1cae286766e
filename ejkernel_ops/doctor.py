"""`python -m ejkernel_ops doctor`: what is found on a machine, what runs there, and what to do about the rest.

What touches a device does so in child processes, one for each back end: a driver may abort, and is then a finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import environment
from .config.cache import Key
from .config.selection import heuristic
from .core.invocation import Invocation
from .doctor_report import Device, Finding, Report, Run
from .errors import EjkernelError
from .execution.check import Reference, program
from .execution.failures import failed, first_line
from .execution.measure import benchmark
from .kernels import (
    flash_attention,
    gated_linear,
    layer_norm,
    linear,
    linear_cross_entropy,
    mlp,
    rms_norm,
    rotary_embedding,
)
from .kernels.attention import cudnn
from .registry import find_call
from .utils.fingerprint import device_fingerprint
from .utils.meta import find_labels_in_lowered, split_label

_PACKAGES = (
    "ejlayers", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt",
    "triton", "jax-triton", "flax", "equinox", "numpy",
)  # fmt: skip
_SETTINGS = (
    "JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "LD_LIBRARY_PATH"
)  # fmt: skip
_CHILD_S = 300.0
_ELIGIBLE = "eligible"  # of a run that is not done yet
_MARK = "ejkernel_ops doctor: "  # what a child answers begins so; the rest of its output is a library's


def examine() -> Report:
    """Looks at the machine, and runs each op on each back end in child processes.

    It takes some ten seconds, more where Triton kernels are compiled. Nothing that goes wrong raises: it is a finding.

    Returns:
        What was found.

    Example:
        `print(ejkernel_ops.doctor.examine())`
    """
    problems: list[Finding] = []

    def tried(what: str, look: Callable[..., Any], otherwise: Any, *arguments: Any) -> Any:
        try:
            return look(*arguments)
        except Exception as error:  # whatever a machine does wrong, the rest of it is still looked at
            problems.append(Finding(f"looking at {what} failed: {first_line(error)}"))
            return otherwise

    versions = tried("versions", _versions, {})
    variables = tried("the environment", _variables, {}, problems)
    cache, cache_fault = tried("the cache folder", _cache, ("", None))
    gpus = tried("nvidia-smi", _gpus, (), problems)
    told, runs = tried("the back ends", _children, ({}, ()), variables, problems)
    return Report(
        versions=versions | {"cuDNN": told.get("cudnn")}, gpus=gpus, variables=variables, cache=cache,
        cache_fault=cache_fault, devices=tuple(Device(**device) for device in told.get("devices", ())),
        runs=tuple(runs), problems=tuple(problems),
    )  # fmt: skip


# What is found without a device


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if "cuda12" not in name:  # the other way to have a GPU: told only where it is there
                found[name] = None
    return found


def _variables(problems: list[Finding]) -> dict[str, str]:
    """The variables that matter and are set; what the package refuses or does not know is a problem."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for read in (environment.recording, environment.interpreting, environment.label_prefix):
            try:
                read()
            except EjkernelError as error:
                problems.append(Finding(f"{error}; or unset it"))
    problems += [Finding(str(warning.message), broken=False) for warning in caught]
    values = environment.child_environment()  # this process's, but for what is not asked for here
    names = sorted(name for name in values if name in _SETTINGS or name.startswith(("EJKERNEL_OPS_", "EJKERNEL_CACHE")))
    return {name: values[name] for name in names if values[name] or name == "CUDA_VISIBLE_DEVICES"}


def _cache() -> tuple[str, str | None]:
    """The folder of tuned configs, and why it cannot be written or, where it is not there yet, made."""
    folder = environment.cache_dir()
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"anything")
    except OSError as error:
        return str(folder), error.strerror
    return str(folder), None


def _gpus(problems: list[Finding]) -> tuple[str, ...]:
    """The GPUs that the driver has, whatever JAX thinks."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except FileNotFoundError:
        return ()
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        problems.append(Finding(f"nvidia-smi fails ({' '.join(lines)}): see to the driver", broken=False))
        return ()
    return tuple(lines)


# What children find


def _children(variables: dict[str, str], problems: list[Finding]) -> tuple[dict[str, Any], list[Run]]:
    """What the first child tells about the machine, and all runs: the first child does those of XLA."""
    answers, end = _ask("xla")
    told = next((answer for answer in answers if "devices" in answer), None)
    if told is None:
        unset = [name for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in variables]
        advice = f"unset {' '.join(unset)}" if unset else 'python -c "import jax; jax.devices()" tells more'
        problems.append(Finding(f"JAX does not start ({end}): {advice}"))
        return {}, []
    runs = _by_op(answers)
    for backend in dict.fromkeys(run.backend for run in runs.values() if run.status == _ELIGIBLE):
        if backend != "xla":
            answers, end = _ask(backend)
            runs |= _by_op(answers)
        for key, run in runs.items():
            if run.backend == backend and run.status == _ELIGIBLE:
                runs[key] = dataclasses.replace(run, status="crashed", reason=f"its process ended: {end}")
    return told, list(runs.values())


def _by_op(answers: list[dict[str, Any]]) -> dict[tuple[str, str], Run]:
    found = [Run(**answer["run"]) for answer in answers if "run" in answer]
    return {(run.op, run.backend): run for run in found}


def _ask(backend: str) -> tuple[list[dict[str, Any]], str]:
    """What a child process answers about a back end, and how it ended."""
    command = [sys.executable, "-m", "ejkernel_ops", "doctor", "--probe", backend]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:  # kept when the child dies
        try:
            code = subprocess.run(
                command, env=environment.child_environment() | {environment.RECORD: "1"}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, timeout=_CHILD_S,
            ).returncode  # fmt: skip
            end = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            end = f"no end within {_CHILD_S:g} s, killed"
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    others = [re.sub(r"^[FEWI]\d{4} .*?\] ", "", line)[:300] for line in lines if not line.startswith(_MARK)]
    answers = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    return answers, ": ".join([end, *others[-1:]])


def probe(backend: str) -> int:
    """The child's side: answers one at a time, so that those before a crash are not lost."""
    try:
        calls = _calls()
        if backend == "xla":
            devices = [dataclasses.asdict(_device(device)) for device in jax.devices()]
            _answer(devices=devices, cudnn=_cudnn_version())
            for inv in calls:
                for other in inv.kernel.backends:
                    _answer(run=dataclasses.asdict(_eligible(inv, other)))
        for inv in calls:
            if _eligible(inv, backend).status == _ELIGIBLE:
                _answer(run=dataclasses.asdict(_run(inv, backend)))
    except Exception as error:  # its last line is what the parent tells
        print(first_line(error), file=sys.stderr)
        return 1
    return 0


def _answer(**what: Any) -> None:
    print(f"\n{_MARK}{json.dumps(what)}", flush=True)


def _calls() -> list[Invocation]:
    """Both calls of each op at a tiny size that all back ends can do: where one cannot, the machine lacks something."""

    def like(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    heads, x, weight, vector = like(1, 128, 4, 64), like(128, 64), like(64, 128), like(64)
    ids = like(128, dtype=jnp.int32)
    ops: list[tuple[Callable[..., Any], tuple]] = [
        (
            functools.partial(flash_attention, causal=True, deterministic=False),
            (heads, like(1, 128, 2, 64), like(1, 128, 2, 64)),
        ),
        (functools.partial(linear, activation="gelu"), (x, weight, like(128))),
        (gated_linear, (x, weight, weight)),
        (functools.partial(mlp, activation="gelu"), (x, weight, like(128, 64))),
        (rms_norm, (x, vector)),
        (layer_norm, (x, vector, vector)),
        (rotary_embedding, (heads, ids)),
        (linear_cross_entropy, (x, weight, ids)),
    ]

    def step(op: Callable[..., Any], arrays: tuple) -> Any:
        floats = tuple(i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating))
        return jax.jit(jax.grad(lambda *arrays: op(*arrays, backend="xla").sum(), floats)).lower(*arrays)

    device = device_fingerprint()
    labels = [label for op, arrays in ops for label in find_labels_in_lowered(step(op, arrays))]
    found = [find_call(Key(device, *split_label(label))) for label in labels]
    return [inv for inv in found if inv is not None]


def _device(device: Any) -> Device:
    stats = device.memory_stats() or {}
    return Device(
        device.platform, device.device_kind, getattr(device, "compute_capability", None), stats.get("bytes_limit"),
        getattr(device, "shared_memory_per_block_optin", None),
    )  # fmt: skip


def _cudnn_version() -> str | None:
    module = cudnn.private_module()
    try:
        version = None if isinstance(module, str) else module.check_cudnn_version()
    except RuntimeError:  # it is not found
        return None
    return version and f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _eligible(inv: Invocation, backend: str) -> Run:
    """A run that may be done, or why not."""
    try:
        reason = inv.kernel.why_not(inv, backend)
    except Exception as error:  # a broken installation, or a variable that is refused
        reason = first_line(error)
    return Run(inv.op_id, backend, "not eligible" if reason else _ELIGIBLE, reason=reason or "")


def _run(inv: Invocation, backend: str) -> Run:
    """Runs a call, compares it with XLA in float32, and times it."""
    try:
        with _quick_compiles():
            made = jax.jit(lambda: inv.kernel.make_inputs(inv, np.random.default_rng(0)))()
            reference = Reference(inv, made)
        run = jax.jit(program(inv, heuristic(inv, backend)))
        outs = run(*made)
        error = _relative_error(outs, reference.exact)
        if fault := reference.fault(outs):
            return Run(inv.op_id, backend, "wrong", error=error, reason=fault)
        return Run(inv.op_id, backend, "ok", benchmark(run, *made, num_iters=5, num_warmup=1), error)
    except Exception as error:  # any failure is what was asked about
        trial = failed(None, "failed", error)
        return Run(inv.op_id, backend, trial.status, reason=trial.reason)


@contextlib.contextmanager
def _quick_compiles() -> Iterator[None]:
    """On a CPU the compiler takes most of the time, and a reference runs once."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def _relative_error(outs: Sequence[Any], exact: Sequence[np.ndarray]) -> float | None:
    """The largest error of all outputs, each relative to its largest number; `None`: there is a NaN or infinity."""
    with np.errstate(invalid="ignore"):
        errors = [
            np.abs(np.asarray(out.astype(jnp.float32)) - x).max() / max(np.abs(x).max(), np.finfo(np.float32).tiny)
            for out, x in zip(outs, exact)
        ]
    return float(max(errors)) if np.isfinite(errors).all() else None
