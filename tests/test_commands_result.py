"""`result` and `tune` on the command line: what they print, what they write, and one line where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ejkernel_ops as ek
from ejkernel_ops.__main__ import main
from ejkernel_ops.execution.result_json import read
from ejkernel_ops.kernels import LINEAR

ROOT = Path(__file__).parent.parent
GPU = "gpu|Fake 9000|9.0"  # files of other devices are looked at on a laptop


def entry(rows=3, key="0" * 16, **fields):
    cfg = ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=rows))
    return ek.Entry("linear@v1", key, cfg, heuristic_ms=2.0, ms=1.0, **fields)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = {
        "a.json": (GPU, entry(3)),
        "same.json": (GPU, entry(3, count=2)),
        "other.json": (GPU, entry(4)),
        "more.json": (GPU, entry(5, "1" * 16)),
        "cpu.json": ("cpu|x|1", entry(3)),
    }
    for name, (device, *entries) in results.items():
        ek.AutotuningResult(device, tuple(entries)).save(name)
    text = Path("a.json").read_text()
    Path("unheard.json").write_text(text.replace("linear@v1", "unheard@v1"))
    Path("broken.json").write_text(text.replace('"blocksize_m": 3', '"blocksize_m": "3"'))
    Path("empty.json").write_text("")
    return tmp_path


@pytest.fixture
def lines(capsys, monkeypatch):
    """Runs a command of which a status is expected, and gives what it prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, status=0):
        found, printed = main([*map(str, arguments)]), capsys.readouterr()
        assert found == status, printed
        assert bool(printed.err) == (status == 2)
        return (printed.out + printed.err).splitlines()

    return run


@pytest.mark.usefixtures("files")
def test_show_prints_what_print_does_for_any_device_and_leaves_out_unknown_ops(lines):
    result = read(ek.AutotuningResult, Path("a.json").read_bytes())
    assert lines("result", "show", "a.json") == str(result).splitlines()
    assert lines("result", "show", "--markdown", "a.json") == result.to_markdown().splitlines()
    assert any(GPU in line for line in lines("result", "show", "a.json"))
    assert any(
        "not tuned: unheard@v1:0000000000000000: left out" in line for line in lines("result", "show", "unheard.json")
    )


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("second", "status", "printed"), [
    ("same.json", 0, ["the same configs for the same calls"]),
    ("other.json", 1, [f"! linear@v1:{'0' * 16}: backend=xla blocksize_m=3 -> backend=xla blocksize_m=4"]),
    ("cpu.json", 1, [f"tuned for {GPU} and for cpu|x|1"]),
])  # fmt: skip
def test_diff_prints_what_differs_and_says_so_by_its_status(second, status, printed, lines):
    assert lines("result", "diff", "a.json", second, status=status) == printed


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("given", "rows"), [
    (["a.json", "more.json", "same.json"], [3, 5]),
    (["a.json", "other.json", "--prefer", "first"], [3]),
    (["a.json", "other.json", "--prefer", "last"], [4]),
])  # fmt: skip
def test_merge_writes_every_call_once_for_the_device_of_the_files(given, rows, lines):
    [line] = lines("result", "merge", *given, "--out", "out.json")
    merged = read(ek.AutotuningResult, Path("out.json").read_bytes())
    assert (merged.device, [e.cfg.fwd.blocksize_m for e in merged.entries]) == (GPU, rows)
    assert merged.digest[:16] in line


@pytest.mark.usefixtures("files")
def test_plot_draws_a_picture(lines):
    assert lines("result", "plot", "a.json", "out.svg") == ["out.svg"]
    assert Path("out.svg").read_text().startswith("<?xml")


ERRORS = {
    "no such file": (["show", "missing.json"], "missing.json: No such file or directory"),
    "no result": (["show", "empty.json"], "empty.json: not valid JSON"),
    "a bad field": (["show", "broken.json"], r"broken.json: line 19: not a LinearConfig"),
    "an unknown op": (["diff", "a.json", "unheard.json"], "unknown op 'unheard@v1'"),
    "how to make it known": (["diff", "a.json", "unheard.json"], "with --import MODULE"),
    "two configs": (["merge", "a.json", "other.json", "-o", "out.json"], "the results have two configs for linear@v1"),
    "two devices": (["merge", "a.json", "cpu.json", "-o", "out.json"], "only one device's can be merged"),
    "no folder": (["merge", "a.json", "-o", "missing/out.json"], "the folder missing does not exist"),
    "another picture": (["plot", "a.json", "out.gif"], "expected one of .png, .svg, .pdf"),
    "no such module": (["show", "a.json", "--import", "no.such.module"], "cannot import 'no.such.module'"),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("kind", ERRORS)
def test_what_a_user_did_wrong_is_one_line_and_status_2(kind, lines):
    arguments, message = ERRORS[kind]
    [line] = lines("result", *arguments, status=2)
    assert message in line
    assert not Path("out.json").exists()


@pytest.mark.parametrize("command", [["result", "show"], ["cache", "import"], ["tune", "-o", "out.json"]], ids=" ".join)
def test_a_file_without_end_that_was_named_by_mistake_is_not_read_to_its_end(command, lines, monkeypatch):
    monkeypatch.setattr("ejkernel_ops.utils.files.MAX_BYTES", 1 << 20)
    assert lines(*command, "/dev/zero", status=2) == ["/dev/zero: larger than 1 MiB"]
    with pytest.raises(ek.CacheFormatError, match="/dev/zero: larger than 1 MiB"):
        ek.AutotuningResult.load("/dev/zero")


# tune

MODULE = """
import dataclasses
import ejkernel_ops as ek

@dataclasses.dataclass(frozen=True)
class Scale:
    by: int = 1

class Scaled(ek.Kernel[Scale, object]):
    name = "test_tuned_by_command"
    def run(self, x, *, cfg):
        return x * 2
    def heuristic_cfg(self, inv):
        return Scale(1)
    def candidate_cfgs(self, inv):
        return [Scale(2)]

SCALED = Scaled()
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ek.clear_invocations()
    ek.record_invocation(LINEAR, ek.Invocation(LINEAR, (jnp.ones((9, 3)), jnp.ones((3, 4)))))
    ek.save_invocations("calls.json")
    Path("far.json").write_text(Path("calls.json").read_text().replace(ek.device_fingerprint(), GPU))
    return tmp_path


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("given", [["calls.json"], ["far.json", "--here"]])
def test_tune_writes_and_shows_what_it_found_for_the_calls_of_a_file(given, lines):
    printed = lines("tune", *given, "--out", "out.json", "--budget-s", "5", "--no-cache")
    result = ek.AutotuningResult.load("out.json")
    assert [(e.op_id_v, e.source) for e in result.entries] == [("linear@v1", "tuned")]
    assert printed == [*str(result).splitlines(), "written to out.json"]


@pytest.mark.usefixtures("calls")
def test_tune_says_that_it_leaves_out_calls_of_another_device(capsys):
    here, far = (json.loads(Path(name).read_text()) for name in ("calls.json", "far.json"))
    Path("both.json").write_text(json.dumps(here | {"calls": here["calls"] + far["calls"]}))
    assert main(["tune", "both.json", "--out", "out.json", "--budget-s", "5", "--no-cache"]) == 0
    assert "warning: both.json: 1 call of another device is left out; --here tunes it" in capsys.readouterr().err
    assert len(ek.AutotuningResult.load("out.json").entries) == 1


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(("given", "message"), [
    (["far.json"], "far.json has no call of this device"),
    (["missing.json"], "missing.json: No such file or directory"),
    (["calls.json", "--out", "missing/out.json"], "the folder missing does not exist"),
])  # fmt: skip
def test_tune_says_in_one_line_why_it_cannot(given, message, lines):
    [line] = lines("tune", "--out", "out.json", *given, status=2)
    assert message in line
    assert not Path("out.json").exists()


@pytest.mark.once
def test_tune_in_a_fresh_process_knows_the_kernels_of_the_modules_it_is_told(tmp_path):
    (tmp_path / "my_kernels.py").write_text(MODULE)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "EJKERNEL_CACHE_DIR": str(tmp_path)}

    def python(code, *arguments):
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )

    saved = python(
        "import jax, ejkernel_ops as ek, my_kernels\n"
        "jax.jit(my_kernels.SCALED).lower(jax.numpy.ones(3)); ek.save_invocations('calls.json')"
    )
    assert saved.returncode == 0, saved.stderr
    command = "import sys; from ejkernel_ops.__main__ import main; sys.exit(main())"
    unknown = python(command, "tune", "calls.json", "--out", "out.json")
    assert unknown.returncode == 2
    assert "unknown op 'test_tuned_by_command@v1'" in unknown.stderr
    done = python(command, "tune", "calls.json", "--out", "out.json", "--import", "my_kernels")
    assert done.returncode == 0, done.stderr
    assert "test_tuned_by_command@v1" in done.stdout
    assert (tmp_path / "out.json").exists()
