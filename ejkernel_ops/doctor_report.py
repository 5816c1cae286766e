"""What the doctor found: the data, what follows from it, and how it is printed."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from . import environment
from .utils.text_table import text_table

_ON = ("1", "true", "on", "yes", "y")  # to Triton
_JAX, _JAX_FROM, _JAX_BELOW = "jax>=0.10.2,<0.13", (0, 10, 2), (0, 13)
_REPORT = "report it with what `python -m ejkernel_ops doctor --json` prints"
_ADVICE = {"out_of_memory": "free the GPU's memory; `nvidia-smi` lists who holds it"}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as JAX sees it; what JAX does not tell is `None`."""

    platform: str
    kind: str
    compute_capability: str | None = None
    memory_bytes: int | None = None  # what JAX may take of it
    shared_memory_bytes: int | None = None  # of a block


@dataclasses.dataclass(frozen=True)
class Run:
    """One op on one back end.

    Args:
        op: the kernel's name.
        backend: the back end's.
        status: `"ok"`, `"not eligible"`, or how it failed: `"failed"`, `"wrong"`, `"out_of_memory"`,
            `"out_of_shared_memory"`, `"crashed"`.
        ms: median wall-clock time of a tiny call, its dispatch included.
        error: the largest difference from XLA in float32, relative to the largest number of an output.
        reason: why it is not eligible, or what failed.
    """

    op: str
    backend: str
    status: str
    ms: float | None = None
    error: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What somebody should know, and the command that changes it.

    Args:
        text: one line.
        broken: whether it keeps something from working that should work on this machine.
    """

    text: str
    broken: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was found on a machine; printable.

    Args:
        versions: of packages and of cuDNN; `None`: not installed.
        gpus: the names of the GPUs that `nvidia-smi` sees.
        devices: the devices that JAX uses.
        variables: the environment variables that matter and are set.
        cache: the folder of tuned configs.
        cache_fault: why it cannot be written.
        runs: each op on each back end.
        problems: what came up while looking.

    Example:
        >>> Report(runs=(Run("linear", "xla", "wrong", reason="NaN"),)).ok
        False
    """

    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    cache: str = ""
    cache_fault: str | None = None
    runs: tuple[Run, ...] = ()
    problems: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What to do, the most important first; empty where all is as it should be."""
        found = [*self.problems, *_about_gpus(self), *_about_runs(self), *_about_settings(self)]
        return tuple(sorted(dict.fromkeys(found), key=lambda finding: not finding.broken))

    @property
    def ok(self) -> bool:
        """Whether all works that should work on this machine."""
        return not any(finding.broken for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data, with its findings."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        data = dataclasses.asdict(self)
        del data["problems"]
        return {"ok": self.ok, **data, "findings": findings}

    def __str__(self) -> str:
        return _as_text(self)


# What to do


def _about_gpus(report: Report) -> Iterator[Finding]:
    """Why JAX does not use the GPUs that are there."""
    if not report.gpus or any(device.platform == "gpu" for device in report.devices):
        return
    unused = f"JAX does not use what nvidia-smi sees, {', '.join(dict.fromkeys(report.gpus))}"
    variables, versions = report.variables, report.versions
    plugins = [version for name, version in versions.items() if name.startswith("jax-cuda")]
    if variables.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        yield Finding(f"{unused}, for JAX_PLATFORMS is {variables['JAX_PLATFORMS']!r}: unset JAX_PLATFORMS")
    elif variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding(f"{unused}, for CUDA_VISIBLE_DEVICES hides it: unset CUDA_VISIBLE_DEVICES")
    elif plugins.count(versions.get("jaxlib")) < 2:  # jax-cuda13-plugin and jax-cuda13-pjrt
        yield Finding(f"{unused}, for it has no CUDA plugin of its own version: pip install 'ejlayers[gpu]'")
    elif report.devices:  # else JAX does not start, which is a problem of its own
        unset = [name for name in ("XLA_FLAGS", "LD_LIBRARY_PATH") if name in variables]
        advice = f"unset {' '.join(unset)}, or " if unset else ""
        yield Finding(f"{unused}: {advice}ask python -c \"import jax; jax.devices('cuda')\" why")


def _about_runs(report: Report) -> Iterator[Finding]:
    """What failed, and what a back end lacks; the same of several ops is told once."""
    ops: dict[tuple[str, str, str], list[str]] = {}
    for run in report.runs:
        ops.setdefault((run.backend, run.status, run.reason), []).append(run.op)
    for (backend, status, reason), names in ops.items():
        if status == "not eligible" and _expected(report, backend):
            yield Finding(reason)
        elif status not in ("ok", "not eligible"):
            failure = "failed" if status == "failed" else f"failed ({status.replace('_', ' ')})"
            meanwhile = "" if backend == "xla" else "pass backend='xla' meanwhile, and "
            advice = _ADVICE.get(status, meanwhile + _REPORT)
            yield Finding(f"{', '.join(names)} on {backend} {failure}: {reason}; {advice}")


def _expected(report: Report, backend: str) -> bool:
    """Whether a back end should work on this machine."""
    texts = [device.compute_capability or "" for device in report.devices]
    majors = [int(text.split(".")[0]) for text in texts if re.fullmatch(r"\d+\.\d+", text)]  # NVIDIA's
    if backend == "triton":
        return any(major >= 8 for major in majors) or report.variables.get(environment.INTERPRET) == "1"
    return backend == "xla" or (backend == "cudnn" and any(major >= 8 for major in majors))


def _about_settings(report: Report) -> Iterator[Finding]:
    """What is in the way of something else than a run."""
    if report.cache_fault is not None:
        hint = f"export {environment.CACHE_DIR}=/a/folder/that/you/may/write"
        yield Finding(f"tuned configs cannot be kept in {report.cache} ({report.cache_fault}): {hint}")
    version = report.versions.get("jax")
    if version and not _JAX_FROM <= tuple(map(int, re.findall(r"\d+", version)[:3])) < _JAX_BELOW:
        yield Finding(f"jax is {version}; expected {_JAX}, of which all is tried: pip install '{_JAX}'", broken=False)
    interpreted = report.variables.get("TRITON_INTERPRET", "").lower() in _ON
    if interpreted and not any("TRITON_INTERPRET" in run.reason for run in report.runs):
        yield Finding("TRITON_INTERPRET is set, and Triton then compiles nothing: unset TRITON_INTERPRET", broken=False)


# Text


def _as_text(report: Report) -> str:
    absent = {"cuDNN": "not found by JAX"}
    versions = [(name, text or absent.get(name, "not installed")) for name, text in report.versions.items()]
    devices = [(f"{count} x {x.platform}", x.kind, *_sizes(x)) for x, count in Counter(report.devices).items()]
    settings = [*(report.variables or {"variables": "none is set"}).items(), ("cache folder", _cache_text(report))]
    runs = [(run.op, run.backend, _status(run), _short(run.ms), _short(run.error), run.reason) for run in report.runs]
    on_gpu = any(device.platform == "gpu" for device in report.devices)
    nothing = "nothing" if on_gpu else "nothing: there is no GPU here, and XLA runs every op on the CPU"
    advice = [finding.text if finding.broken else f"note: {finding.text}" for finding in report.findings]
    return "\n".join([
        text_table(("package", "version"), versions),
        text_table(("device", "kind", "compute capability", "memory for JAX", "shared memory of a block"), devices),
        text_table(("setting", "value"), settings),
        text_table(("op", "back end", "found", "ms", "error", "why"), runs, right=("ms", "error")),
        "\n  What to do", *(f"  - {line}" for line in advice or [nothing]),
    ])  # fmt: skip


def _sizes(device: Device) -> tuple[str, str, str]:
    memory, shared = device.memory_bytes, device.shared_memory_bytes
    return (
        device.compute_capability or "-", "-" if memory is None else f"{memory / 2**30:.0f} GiB",
        "-" if shared is None else f"{shared / 2**10:.0f} KiB",
    )  # fmt: skip


def _cache_text(report: Report) -> str:
    return f"{report.cache} ({'writable' if report.cache_fault is None else 'not writable'})" if report.cache else "-"


def _status(run: Run) -> str:
    if run.status in ("ok", "not eligible"):
        return run.status
    return "FAILED" if run.status == "failed" else f"FAILED: {run.status.replace('_', ' ')}"


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.2g}" if number < 10 else f"{number:.0f}"
