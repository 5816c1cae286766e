"""The training example in two processes over one mesh: one that differs stops both, one that dies costs few steps."""

import csv
import re
import shutil

import numpy as np
import pytest

from ejkernel_ops import AutotuningResult, device_fingerprint

from .two_processes import TESTS, run_two

ROOT, MESH = TESTS.parent, ["--mesh", "fsdp=2,model=2"]
pytestmark = [pytest.mark.once, pytest.mark.slow]


def train_two(folder, *flags, dies_at=(0, 0), seeds=(None, None), limit=150.0):
    """Trains in two processes; returns exit statuses, outputs and errors."""

    def command(rank, port):
        seed = [] if seeds[rank] is None else ["--seed", seeds[rank]]
        launch = ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process", rank]
        return [TESTS / "train_of_two.py", dies_at[rank], *flags, *seed, *MESH, *launch]

    codes, outputs, errors, hung = run_two(folder, command, limit, devices=2)
    assert not hung, (outputs, errors)
    return codes, outputs, errors


def train_one(monkeypatch, *flags):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_gpt

    assert train_gpt.run([*map(str, flags)]) == 0


def losses(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture
def flags(tmp_path):
    AutotuningResult(device_fingerprint(), ()).save(tmp_path / "empty.json")
    return ["--size", "smoke", "--steps", 6, "--save-every", 2, "--result", tmp_path / "empty.json",
            "--runs", tmp_path, "--corpus", ROOT / "ejkernel_ops"]  # fmt: skip


def test_a_run_whose_process_was_killed_goes_on_in_two_processes_and_in_one(flags, tmp_path, monkeypatch):
    codes, *_ = train_two(tmp_path, *flags, "--name", "killed", dies_at=(0, 4))
    assert codes[1] == -9
    assert codes[0] != 0  # it does not wait for the other one for ever
    assert sorted(p.name for p in (tmp_path / "killed/checkpoints").iterdir() if p.name.isdigit()) == ["2"]
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")

    codes, outputs, errors = train_two(tmp_path, "--resume", "killed", "--runs", tmp_path)
    assert codes == [0, 0], errors
    assert "resumed   after step 2" in outputs[0]
    assert "resumed" not in outputs[1]  # one process tells
    train_one(monkeypatch, "--resume", "alone", "--runs", tmp_path)
    train_one(monkeypatch, *flags, "--name", "whole")  # one process, one device
    assert len(losses(tmp_path / "whole")) == 6
    for name in ("killed", "alone"):
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "whole"), rtol=1e-5)


def test_processes_with_other_flags_stop_at_once_and_say_what_differs(flags, tmp_path):
    codes, _, errors = train_two(tmp_path, *flags, "--name", "differs", seeds=(0, 1))
    assert codes == [2, 2], errors
    for error in errors:
        assert re.search(
            r"train_gpt: the run in process 0: .*seed=0, .*, but in process 1: .*seed=1, .*same flags", error
        )
    assert not (tmp_path / "differs" / "checkpoints").exists()


def test_what_fails_in_one_process_stops_the_other(flags, tmp_path):
    (tmp_path / "taken").touch()  # a file, where the folder of the run would be
    codes, _, errors = train_two(tmp_path, *flags, "--name", "taken")
    assert codes == [2, 2], errors
    assert f"train_gpt: cannot write to {tmp_path / 'taken'}" in errors[0]
    assert re.search("train_gpt: making the folder failed in process 0: Refused: cannot write to", errors[1])
