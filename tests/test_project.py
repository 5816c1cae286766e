"""The project as a newcomer meets it: README, examples, imports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def python(*arguments, cwd=ROOT, **env):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"} | env,
    )  # fmt: skip


def test_readme_code_runs(tmp_path):
    assert README_BLOCKS
    done = python("-c", "\n".join(README_BLOCKS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_touches_no_file_no_environment_no_device_and_no_framework():
    code = (
        "import os, sys, jax; before = dict(os.environ); writes = []\n"
        "sys.addaudithook(lambda e, a: writes.append(a[0]) if e in ('os.mkdir', 'os.remove', 'os.rename') or"
        " (e == 'open' and isinstance(a[1], str) and set(a[1]) & set('wax+')) else None)\n"
        "import ejkernel_ops, ejlayers\n"
        "assert dict(os.environ) == before and not writes, writes\n"
        "assert not {'flax', 'equinox', 'triton', 'jax_triton', 'matplotlib'} & set(sys.modules)\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    done = python("-B", "-c", code, HOME="/proc/none", XDG_CACHE_HOME="/proc/none")
    assert done.returncode == 0, done.stderr


def test_train_gpt_leaves_a_complete_run_and_takes_its_result_again(tmp_path):
    options = ["--size", "smoke", "--compare", "--runs", str(tmp_path)]
    done = python("examples/train_gpt.py", *options, "--name", "a")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "loss.png",
        "metrics.csv",
        "result.json",
        "tuning.png",
    ]
    lines = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,loss,stock_loss,held_out,tokens_per_s,memory_mib"
    assert len(lines) == 21
    apart = float(re.search(r"differ by at most (\S+)", done.stdout)[1])
    assert apart < 1e-4
    again = python(
        "examples/train_gpt.py", *options, "--name", "b", "--steps", "2", "--result", str(tmp_path / "a/result.json")
    )
    assert again.returncode == 0, again.stderr
    assert "the heuristic (" not in again.stdout  # nothing was tuned
    assert re.search(r"has configs for (\d+) of the \1 kernels", again.stdout)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--size", "huge"], "--size is 'huge'; expected one of"),
        (["--colour"], "No such option"),
        (["--steps", "many"], "not a valid|valid integer"),
        (["--steps", "0"], "--steps is 0; expected at least 1"),
        (["--name", "../x"], "expected a plain folder name"),
        (["--corpus", "{tmp}"], "has 0 bytes of Python"),
        (["--runs", "/proc/none"], "cannot write to"),
        (["--result", "{tmp}/missing.json"], "cannot read"),
        (["--result", "{tmp}/other.json"], "tuned for 'gpu|H100'"),
    ],
)
def test_train_gpt_refuses_in_one_line_with_status_2(arguments, match, tmp_path, monkeypatch, capsys):
    from ejkernel_ops import AutotuningResult

    AutotuningResult("gpu|H100", ()).save(tmp_path / "other.json")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    import train_gpt

    assert train_gpt.run(["--size", "smoke", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(match.replace("gpu|", r"gpu\|"), error)


def test_own_kernel_example_tunes_both_directions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import own_kernel

    result = own_kernel.main()
    assert sorted(e.op_id_v for e in result.entries) == ["swiglu@v1", "swiglu_bwd@v1"]
    assert any("pallas needs" in t.reason for e in result.entries for t in e.trials)


def test_unnamed_runs_get_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_gpt

    names = []
    for _ in range(3):
        names.append(train_gpt._free_name(tmp_path, "tiny"))
        (tmp_path / names[-1]).mkdir()
    assert names == ["tiny", "tiny-2", "tiny-3"]


def test_docs_code_runs(tmp_path):
    for page in ("own_kernel.md", "forms.md", "ops.md"):
        code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL))
        done = python("-c", code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_no_kernel_tunes_itself_when_it_is_launched():
    files = [*(ROOT / "ejkernel_ops").rglob("*.py"), *(ROOT / "ejlayers").rglob("*.py")]
    assert files
    assert [path for path in files if "triton.autotune" in path.read_text()] == []
