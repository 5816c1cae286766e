"""`python -m ejkernel_ops doctor`: what it finds, what that means for a machine, and that nothing stops it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from ejkernel_ops import Invocation, Kernel, doctor, doctor_report, kernels
from ejkernel_ops.__main__ import main
from ejkernel_ops.doctor_report import Device, Finding, Report, Run

ROOT = Path(__file__).parent.parent
CPU, GPU = Device("cpu", "cpu"), Device("gpu", "NVIDIA H100", "9.0", 60 << 30, 232448)
PLUGINS = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
NO_TRITON = "triton is not installed: pip install 'triton==3.6.*' (Linux only)"
NO_CUDNN = "cuDNN is not found (no library); install jax with its extra cuda13 or cuda12"
DONE = {
    "xla": Run("flash_attention", "xla", "ok", 0.5, 0.003),
    "triton": Run("flash_attention", "triton", "ok", 0.2, 0.003),
    "cudnn": Run("flash_attention", "cudnn", "ok", 0.1, 0.003),
}


def doctor_in_a_process(*options, **env):
    # Fewer devices than the other tests have: a user's machine.
    return subprocess.run(
        [sys.executable, "-m", "ejkernel_ops", "doctor", *options], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | env,
    )  # fmt: skip


def texts(report):
    return [finding.text for finding in report.findings]


def on_gpu(*runs, **more):
    """A machine with a GPU, where all works but for these runs."""
    others = {run.backend: run for run in runs}
    return Report(versions=PLUGINS, gpus=("NVIDIA H100",), devices=(GPU,), runs=tuple((DONE | others).values()), **more)


@pytest.fixture
def machine(monkeypatch):
    """Puts what is found on a machine, and what its children answer, in place of this one's."""

    def make(gpus=(), device=CPU, variables=None, **children):
        survey = [{"devices": [dataclasses.asdict(device)], "cudnn": None}]
        for run in children.pop("survey", ()):
            survey.append({"run": dataclasses.asdict(run)})
        monkeypatch.setattr(doctor, "_versions", lambda: dict(PLUGINS))
        monkeypatch.setattr(doctor, "_variables", lambda problems: variables or {})
        monkeypatch.setattr(doctor, "_gpus", lambda problems: gpus)
        asked = []

        def ask(backend):
            asked.append(backend)
            runs, end = children.get(backend, ((), "exit code 0"))
            answers = [{"run": dataclasses.asdict(run)} for run in runs]
            return (survey if backend == "xla" else []) + answers, end

        monkeypatch.setattr(doctor, "_ask", ask)
        return asked

    return make


# This machine


@pytest.mark.cpu
@pytest.mark.once
def test_on_a_cpu_xla_runs_every_op_and_nothing_is_to_do(tmp_path):
    done = doctor_in_a_process("--json", EJKERNEL_CACHE_DIR=str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["findings"] == []
    assert [device["platform"] for device in found["devices"]] == ["cpu"]
    assert found["versions"]["jax"] == found["versions"]["jaxlib"]
    assert not list(tmp_path.iterdir())  # the cache folder was not made
    runs = {(run["op"], run["backend"]): run for run in found["runs"]}
    xla = [run for (_, backend), run in runs.items() if backend == "xla"]
    ops = (
        "flash_attention", "linear", "gated_linear", "mlp", "rms_norm", "layer_norm", "rotary_embedding",
        "linear_cross_entropy",
    )  # fmt: skip
    assert [run["op"] for run in xla] == [name for op in ops for name in (op, f"{op}_bwd")]
    assert all(run["status"] == "ok" and run["ms"] > 0 and 0 < run["error"] < 0.01 for run in xla)
    assert "needs a gpu" in runs["flash_attention", "triton"]["reason"]
    assert "EJKERNEL_OPS_INTERPRET=1" in runs["flash_attention", "triton"]["reason"]
    assert runs["flash_attention_bwd", "cudnn"]["status"] == "not eligible"


def test_a_process_that_aborts_is_a_finding():
    done = doctor_in_a_process(XLA_FLAGS="--no_such_flag")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"- JAX does not start \(.*no_such_flag.*\): unset XLA_FLAGS", done.stdout)


def test_every_op_has_a_tiny_call():
    ops = {x.op_id for x in vars(kernels).values() if isinstance(x, Kernel)}
    assert {inv.op_id for inv in doctor._calls()} == ops, "give the op a call in doctor._calls"


def test_the_supported_jax_is_that_of_the_package():
    assert f'"{doctor_report._JAX}"' in (ROOT / "pyproject.toml").read_text()


# What children answer


@dataclasses.dataclass(frozen=True)
class Config:
    backend: str


class Doubles(Kernel):
    name, config_cls = "test_doctor_doubles", Config

    def heuristic_cfg_xla(self, inv):
        return Config("xla")

    def heuristic_cfg_triton(self, inv):
        return Config("triton")

    def run_xla(self, x, *, cfg):
        return 2 * x

    def run_triton(self, x, *, cfg):
        return 2 * x


DOUBLES = Doubles()
DOUBLED = Invocation(DOUBLES, (jnp.ones((4, 3)),))


def test_a_run_is_timed_and_compared():
    run = doctor._run(DOUBLED, "triton")
    assert (run.op, run.backend, run.status, run.error) == ("test_doctor_doubles", "triton", "ok", 0.0)
    assert run.ms > 0


@pytest.mark.parametrize(("factor", "error"), [(2.5, 0.25), (float("nan"), None)])
def test_wrong_numbers_are_a_failure(factor, error, monkeypatch):
    monkeypatch.setattr(Doubles, "run_triton", lambda self, x, *, cfg: factor * x)
    run = doctor._run(DOUBLED, "triton")
    assert run.status == "wrong"
    assert run.error == (None if error is None else pytest.approx(error))
    assert "largest error" in run.reason
    json.dumps(dataclasses.asdict(run), allow_nan=False)


@pytest.mark.parametrize(("error", "status"), [
    (RuntimeError("no kernel\nand more"), "failed"),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out_of_memory"),
])  # fmt: skip
def test_an_error_is_a_failure_with_its_first_line(error, status, monkeypatch):
    def run(self, x, *, cfg):
        raise error

    monkeypatch.setattr(Doubles, "run_triton", run)
    assert doctor._run(DOUBLED, "triton") == Run(
        "test_doctor_doubles", "triton", status, reason=f"RuntimeError: {str(error).splitlines()[0]}"
    )


def told(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix(doctor._MARK)) for line in lines if line.startswith(doctor._MARK)]


@pytest.mark.cpu
def test_the_first_child_tells_devices_and_what_is_eligible_before_it_runs_anything(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_calls", lambda: [DOUBLED])
    assert doctor.probe("xla") == 0
    first, *runs = told(capsys)
    assert {Device(**device) for device in first["devices"]} == {CPU}
    assert [(r["run"]["backend"], r["run"]["status"]) for r in runs] == [
        ("triton", "not eligible"), ("xla", "eligible"), ("xla", "ok")
    ]  # fmt: skip
    assert doctor.probe("triton") == 0  # not eligible here
    assert told(capsys) == []


def test_a_child_that_cannot_even_look_says_so_in_its_last_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor.jax, "devices", lambda: 1 / 0)
    assert main(["doctor", "--probe", "xla"]) == 1
    assert capsys.readouterr().err == "ZeroDivisionError: division by zero\n"


def test_an_error_of_eligibility_is_a_reason(monkeypatch):
    monkeypatch.setattr(Doubles, "unsupported", lambda self, inv, backend: 1 / 0)
    assert doctor._eligible(DOUBLED, "xla").reason == "ZeroDivisionError: division by zero"


def child(tmp_path, monkeypatch, script):
    """Has a shell script in place of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(path))


def test_answers_before_a_crash_are_kept_with_how_it_came(tmp_path, monkeypatch):
    said = f"echo 'a library talks'; echo '{doctor._MARK}{{\"run\": 1}}'; echo 'F1128 11:53 x.cc:3] no context' >&2"
    child(tmp_path, monkeypatch, f"{said}; kill -SEGV $$")
    assert doctor._ask("triton") == ([{"run": 1}], "killed by SIGSEGV: no context")


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_CHILD_S", 0.2)
    child(tmp_path, monkeypatch, "exec sleep 60")
    assert doctor._ask("triton") == ([], "no end within 0.2 s, killed")


# The whole, with children that are made up


def test_each_back_end_that_is_eligible_gets_one_child(machine):
    survey = [dataclasses.replace(run, status="eligible", ms=None) for run in DONE.values()]
    asked = machine(("NVIDIA H100",), GPU, survey=survey, **{b: ([r], "exit code 0") for b, r in DONE.items()})
    report = doctor.examine()
    assert asked == ["xla", "triton", "cudnn"]
    assert report.runs == tuple(DONE.values())
    assert report.ok
    assert not report.findings
    assert "- nothing\n" in str(report) + "\n"


def test_a_child_that_dies_is_a_failure_of_what_it_had_not_run(machine, capsys):
    triton = [Run(op, "triton", "eligible") for op in ("flash_attention", "flash_attention_bwd")]
    survey = [DONE["xla"], *triton]
    machine(("NVIDIA H100",), GPU, survey=survey, triton=([DONE["triton"]], "killed by SIGSEGV: no context"))
    report = doctor.examine()
    assert [run.status for run in report.runs] == ["ok", "ok", "crashed"]
    [text] = texts(report)
    assert text.startswith("flash_attention_bwd on triton failed (crashed): its process ended: killed by SIGSEGV")
    assert main(["doctor"]) == 1
    assert "FAILED: crashed" in capsys.readouterr().out


def test_json_has_what_the_text_has(machine, capsys):
    missing = Run("flash_attention", "triton", "not eligible", reason=NO_TRITON)
    machine(("NVIDIA H100",), GPU, survey=[DONE["xla"], missing], variables={"EJKERNEL_OPS_RECORD": "0"})
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["findings"] == [{"text": NO_TRITON, "broken": True}]
    assert found["gpus"] == ["NVIDIA H100"]
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    device = ("NVIDIA H100", "9.0", "60 GiB", "227 KiB")
    for part in (*PLUGINS, *device, "EJKERNEL_OPS_RECORD", "writable", "not eligible"):
        assert part in text
    assert f"What to do\n  - {NO_TRITON}\n" in text


def test_nothing_that_goes_wrong_stops_it(machine, monkeypatch, capsys):
    machine(survey=[DONE["xla"]])
    for name in ("_versions", "_variables", "_cache", "_gpus", "_children"):
        monkeypatch.setattr(doctor, name, lambda *_: 1 / 0)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    for what in ("versions", "the environment", "the cache folder", "nvidia-smi", "the back ends"):
        assert f"  - looking at {what} failed: ZeroDivisionError: division by zero\n" in text


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "command" in capsys.readouterr().err


# What it means


@pytest.mark.parametrize(("backend", "reason"), [("triton", NO_TRITON), ("cudnn", NO_CUDNN)])
def test_what_a_back_end_lacks_is_to_do_where_there_is_a_gpu(backend, reason):
    runs = [Run(op, backend, "not eligible", reason=reason) for op in ("flash_attention", "flash_attention_bwd")]
    report = Report(versions=PLUGINS, gpus=("NVIDIA H100",), devices=(GPU,), runs=tuple(runs))
    assert report.findings == (Finding(reason),)  # once
    on_a_cpu = dataclasses.replace(report, gpus=(), devices=(CPU,))
    assert on_a_cpu.findings == ()
    assert "nothing: there is no GPU here" in str(on_a_cpu)


def test_triton_is_to_do_on_a_cpu_only_where_it_is_to_be_interpreted():
    runs = (Run("flash_attention", "triton", "not eligible", reason=NO_TRITON),)
    assert Report(devices=(CPU,), runs=runs, variables={"EJKERNEL_OPS_INTERPRET": "0"}).ok
    assert texts(Report(devices=(CPU,), runs=runs, variables={"EJKERNEL_OPS_INTERPRET": "1"})) == [NO_TRITON]


def test_cudnn_is_not_missed_on_a_gpu_that_is_too_old_or_not_of_nvidia():
    reason = "cuDNN's attention needs compute capability 8.0"
    for capability in ("7.5", "gfx90a", None):
        device = dataclasses.replace(GPU, compute_capability=capability)
        assert Report(devices=(device,), runs=(Run("a", "cudnn", "not eligible", reason=reason),)).ok


@pytest.mark.parametrize(("status", "backend", "advice"), [
    ("failed", "triton", "failed: why; pass backend='xla' meanwhile, and report it with"),
    ("wrong", "cudnn", "failed (wrong): why; pass backend='xla' meanwhile"),
    ("out_of_memory", "triton", "failed (out of memory): why; free the GPU's memory"),
    ("wrong", "xla", "failed (wrong): why; report it with"),
])  # fmt: skip
def test_a_failure_is_to_do(status, backend, advice):
    report = on_gpu(Run("flash_attention", backend, status, reason="why"))
    [text] = texts(report)
    assert text.startswith(f"flash_attention on {backend} {advice}")
    assert not report.ok


@pytest.mark.parametrize(("version", "fits"), [
    ("0.10.2", True), ("0.12.3", True), ("0.10.1", False), ("0.13.0.dev20260101", False), ("1.0", False)
])  # fmt: skip
def test_another_jax_is_a_note(version, fits):
    report = Report(versions={"jax": version})
    assert report.ok
    assert (texts(report) == []) == fits
    assert fits or f"jax is {version}; expected jax>=0.10.2,<0.13" in str(report)


@pytest.mark.parametrize(("variables", "versions", "text"), [
    ({"JAX_PLATFORMS": "cpu"}, {}, "for JAX_PLATFORMS is 'cpu': unset JAX_PLATFORMS"),
    ({"JAX_PLATFORMS": "cpu,cuda"}, {}, "for JAX_PLATFORMS is 'cpu,cuda': unset JAX_PLATFORMS"),
    ({"CUDA_VISIBLE_DEVICES": ""}, {}, "for CUDA_VISIBLE_DEVICES hides it: unset CUDA_VISIBLE_DEVICES"),
    ({"JAX_PLATFORMS": "cuda"}, {"jax-cuda13-pjrt": None}, "pip install 'ejlayers[gpu]'"),
    ({"XLA_FLAGS": "--x"}, {"jax-cuda13-plugin": "0.10.1"}, "pip install 'ejlayers[gpu]'"),
    ({"XLA_FLAGS": "--x", "LD_LIBRARY_PATH": "/x"}, {}, "unset XLA_FLAGS LD_LIBRARY_PATH, or ask python -c"),
    ({}, {}, "ask python -c"),
])  # fmt: skip
def test_a_gpu_that_jax_does_not_use_is_to_do(variables, versions, text):
    report = Report(gpus=("H100", "H100"), devices=(CPU,), variables=variables, versions=PLUGINS | versions)
    [found] = texts(report)
    assert found.startswith("JAX does not use what nvidia-smi sees, H100")
    assert text in found
    assert not report.ok
    assert dataclasses.replace(report, devices=(GPU,)).ok


def test_interpreted_triton_is_told_once():
    variables = {"TRITON_INTERPRET": "1"}
    note = Report(devices=(CPU,), variables=variables)
    assert note.ok
    assert "note: TRITON_INTERPRET is set" in str(note)
    assert not texts(Report(devices=(CPU,), variables={"TRITON_INTERPRET": "0"}))
    reason = "TRITON_INTERPRET is set, so kernels cannot be compiled: unset it"
    run = Run("flash_attention", "triton", "not eligible", reason=reason)
    assert on_gpu(run, variables=variables).findings == (Finding(reason),)


def test_what_is_broken_comes_before_notes():
    report = Report(problems=(Finding("a note", broken=False), Finding("broken"), Finding("broken")))
    assert texts(report) == ["broken", "a note"]


# What is found without a device


def test_a_cache_folder_that_cannot_be_written_is_to_do(machine, monkeypatch):
    machine(survey=[DONE["xla"]])
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "/proc/none/configs")
    report = doctor.examine()
    [text] = texts(report)
    assert text.startswith("tuned configs cannot be kept in /proc/none/configs (")
    assert "export EJKERNEL_CACHE_DIR=" in text
    assert "(not writable)" in str(report)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "configs")
    [text] = texts(doctor.examine())
    assert "EJKERNEL_CACHE_DIR is 'configs'; expected an absolute path" in text


def test_variables_are_those_that_matter_and_refused_ones_are_to_do(monkeypatch):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "EJKERNEL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "yes")
    monkeypatch.setenv("EJKERNEL_OPS_RECORDS", "1")
    monkeypatch.setenv("SECRET", "not told")
    doctor.environment._warn_of_unknown.cache_clear()
    problems = []
    assert doctor._variables(problems) == {
        "CUDA_VISIBLE_DEVICES": "", "EJKERNEL_OPS_RECORD": "yes", "EJKERNEL_OPS_RECORDS": "1", "JAX_ENABLE_X64": "1"
    }  # fmt: skip
    assert problems[0] == Finding("EJKERNEL_OPS_RECORD is 'yes'; expected 0 or 1; or unset it")
    assert not problems[1].broken
    assert "did you mean EJKERNEL_OPS_RECORD?" in problems[1].text


def test_the_driver_is_asked_for_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program, problems = tmp_path / "nvidia-smi", []
    for script, gpus in (("echo 'NVIDIA H200'; echo 'NVIDIA H200'", ("NVIDIA H200",) * 2), ("echo lost; exit 9", ())):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert doctor._gpus(problems) == gpus
    assert problems == [Finding("nvidia-smi fails (lost): see to the driver", broken=False)]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor._gpus(problems) == ()


def test_versions_name_what_is_not_installed(monkeypatch):
    assert doctor._versions()["numpy"]
    monkeypatch.setattr(doctor, "_PACKAGES", ("jax", "no-such-package", "no-such-cuda12"))
    found = doctor._versions()
    assert set(found) == {"python", "jax", "no-such-package"}
    assert re.search(r"no-such-package +not installed", str(Report(versions=found)))
