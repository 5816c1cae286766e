"""The training example: one GPT in three frameworks, swapped, tuned, interrupted and resumed."""

import csv
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from ejkernel_ops import AutotuningResult, device_fingerprint

ROOT = Path(__file__).parent.parent
FRAMEWORKS = ["nnx", "linen", "equinox"]
pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def untuned(tmp_path):
    """Flags of a run that spends no time on tuning: its result is empty."""
    AutotuningResult(device_fingerprint(), ()).save(tmp_path / "empty.json")
    return ["--result", tmp_path / "empty.json", "--runs", tmp_path, "--corpus", ROOT / "ejkernel_ops"]


def train(*arguments):
    import train_gpt

    return train_gpt.run([str(a) for a in arguments])


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# The models


def matrices(framework):
    """Sizes and standard deviations of the stock GPT's matrices."""
    from gpt.sizes import SIZES

    training = importlib.import_module(f"gpt.{framework}_model")
    state = training.new_state(SIZES["smoke"], jax.numpy.dtype("float32"), 0, 20)
    arrays = [x for x in jax.tree.leaves(training.arrays_of(state)) if np.ndim(x) > 1]
    return sorted((x.size, float(x.std())) for x in arrays if x.any())  # the optimizer has but zeros


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_starts_with_weights_of_the_same_distribution(framework):
    narrow, wide = 1 / np.sqrt(32), 1 / np.sqrt(128)
    bytes_and_head = [(256 * 32, 0.02), (256 * 32, narrow)]
    expected = [*[(32 * 32, narrow)] * 4, (64 * 32, 0.02), (32 * 128, wide), (32 * 128, narrow), *bytes_and_head]
    found = matrices(framework)
    assert [size for size, _ in found] == [size for size, _ in expected]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in sorted(expected)], rtol=0.1)


def test_a_batch_is_a_function_of_seed_and_step():
    from gpt.corpus import Corpus

    corpus = Corpus(np.arange(200, dtype=np.uint8), np.arange(9, dtype=np.uint8), 1)
    first, again, later, other = (corpus.batch(4, 8, seed, step) for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1)))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, later)
    assert not np.array_equal(first, other)
    assert np.array_equal(np.diff(first, axis=1), np.ones((4, 8)))  # windows of the text


# Runs


@pytest.mark.slow
def test_a_run_is_complete_and_another_takes_its_result(tmp_path):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, ROOT / "examples/train_gpt.py", "--size", "smoke", "--compare", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        )  # fmt: skip

    done = command("--name", "a")
    assert done.returncode == 0, done.stderr
    files = ["checkpoints", "loss.png", "metrics.csv", "result.json", "run.json", "tuning.png"]
    folder = tmp_path / "runs" / "a"
    assert sorted(p.name for p in folder.iterdir()) == files
    assert list(rows(folder)[0]) == ["step", "loss", "baseline_loss", "held_out", "tokens_per_s", "memory_mib"]
    assert len(rows(folder)) == 20
    assert float(re.search(r"differ by at most (\S+)", done.stdout)[1]) < 1e-4
    again = command("--name", "b", "--steps", "2", "--result", folder / "result.json")
    assert again.returncode == 0, again.stderr
    assert "the heuristic (" not in again.stdout  # nothing was tuned
    assert re.search(r"has configs for (\d+) of the \1 kernels", again.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been_and_swapped_trains_as_stock(
    framework, untuned, tmp_path, monkeypatch
):
    from gpt.corpus import Corpus

    flags = ["--framework", framework, "--size", "smoke", "--steps", 8, "--save-every", 3, "--compare", *untuned]
    assert train(*flags, "--name", "whole") == 0
    with monkeypatch.context() as patch:
        batches = {step: Corpus.batch for step in range(5)}  # no fifth one
        patch.setattr(Corpus, "batch", lambda *a: batches[a[-1]](*a))
        with pytest.raises(KeyError):
            train(*flags, "--name", "halves")
    assert len(rows(tmp_path / "halves")) == 4
    assert train("--resume", "halves", "--runs", tmp_path) == 0
    columns = ("step", "loss", "baseline_loss", "held_out")
    whole, halves = ([[row[name] for name in columns] for row in rows(tmp_path / name)] for name in ("whole", "halves"))
    assert halves == whole  # as text: the same bits
    assert max(abs(float(loss) - float(stock)) for _, loss, stock, _ in whole) < 1e-4


def test_a_llama_trains_tuned_and_untuned(untuned, capsys):
    assert train("--size", "llama-smoke", "--steps", 4, "--compare", *untuned) == 0
    out = capsys.readouterr().out
    assert re.search(r"step +untuned \S+ ms, tuned \S+ ms", out)
    assert float(re.search(r"differ by at most (\S+)", out)[1]) < 1e-4


# Refusals


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--size", "huge"], "--size is 'huge'; expected one of"),
        (["--framework", "torch"], "--framework is 'torch'; expected one of nnx, linen, equinox"),
        (["--framework", "linen", "--size", "llama-smoke"], "--size llama-smoke is there for nnx alone"),
        (["--dtype", "float16"], "--dtype is 'float16'; expected one of"),
        (["--colour"], "No such option"),
        (["--steps", "many"], "not a valid|valid integer"),
        (["--steps", "0"], "--steps is 0; expected at least 1"),
        (["--save-every", "0"], "--save-every is 0; expected at least 1"),
        (["--seed", "-1"], "--seed is -1; expected at least 0"),
        (["--name", "../x"], "expected a plain folder name"),
        (["--corpus", "{tmp}"], "has 0 bytes of Python"),
        (["--mesh", "data"], "--mesh is 'data'; expected sizes of some of data, fsdp, context, model, such as"),
        (["--mesh", "pipe=2"], "--mesh is 'pipe=2'; expected sizes"),
        (["--mesh", "data=0"], "--mesh is 'data=0'; expected sizes"),
        (["--mesh", "data=2,data=2"], "expected each axis once"),
        (["--size", "smoke", "--mesh", "data=4,model=4"], "--mesh has 16 devices; there are 8"),
        (["--size", "smoke", "--mesh", "data=8"], "--mesh splits the batch of 4 into 8 parts; expected a divisor"),
        (["--mesh", "context=3"], "--mesh splits the context of 256 into 3 parts; expected a divisor"),
        (["--processes", "2"], "--processes without --distributed"),
        (["--distributed", "--processes", "2"], "--coordinator, --process missing: give all three of them, or none"),
        (["--distributed", "--coordinator", "a:1", "--processes", "2", "--process", "2"], "expected 0 to 1"),
        (["--distributed"], "--distributed without --name"),
        (["--runs", "/proc/none"], "cannot write to"),
        (["--result", "{tmp}/missing.json"], "cannot read"),
        (["--result", "{tmp}/other.json"], r"tuned for 'gpu\|H100'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_with_status_2(arguments, match, tmp_path, monkeypatch, capsys):
    AutotuningResult("gpu|H100", ()).save(tmp_path / "other.json")
    monkeypatch.chdir(tmp_path)
    assert train(*(a.format(tmp=tmp_path) for a in arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(match, error)


@pytest.fixture
def folder_of(tmp_path):
    """Makes the folder of a run of the size smoke that trained so many steps."""
    from gpt.corpus import read_corpus
    from gpt.settings import Settings

    def make(steps, device=None, **settings):
        corpus = ROOT / "ejkernel_ops"
        text = read_corpus(corpus, 64).digest
        folder = tmp_path / "runs" / "first"
        (folder / "checkpoints" / str(steps)).mkdir(parents=True)
        Settings(**{"size": "smoke", "corpus": str(corpus), "text": text} | settings).save(folder)
        AutotuningResult(device or device_fingerprint(), ()).save(folder / "result.json")
        return folder

    return make


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--framework", "equinox"], "--framework is 'equinox'; the run that is resumed has 'nnx'"),
        (["--size", "tiny"], "--size is 'tiny'; the run that is resumed has 'smoke'"),
        (["--seed", "1"], "--seed is 1; the run that is resumed has 0"),
        (["--steps", "40"], "--steps is 40; the run that is resumed has 20"),
        (["--compare"], "--compare is True; the run that is resumed has False"),
        (["--corpus", "docs"], "--corpus is '.*docs'; the run that is resumed has"),
        (["--name", "second"], "--name is 'second'; a run that is resumed has its own"),
        (["--result", "x.json"], "--result is 'x.json'; a run that is resumed has its own"),
    ],
)
def test_a_run_is_resumed_with_its_own_settings_alone(arguments, match, folder_of, monkeypatch, capsys):
    monkeypatch.chdir(folder_of(10).parent.parent)
    assert train("--resume", "first", *arguments) == 2
    assert re.fullmatch(f"train_gpt: {match}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("steps", "settings", "match"),
    [
        (0, {}, "has no checkpoint; start it anew with --name first"),
        (20, {}, "has all of its 20 steps"),
        (10, {"text": "other"}, "the text is not that of"),
        (10, {"device": "gpu|H100"}, "tuned for"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused(steps, settings, match, folder_of, capsys):
    assert train("--resume", folder_of(steps, **settings)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert match in error


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"colour": 1}', '{"steps": "many"}'])
def test_what_is_no_run_is_not_resumed(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert train("--resume", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search("is no run: cannot read|was not written by this program", error)


def test_unnamed_runs_get_folders_of_their_own(tmp_path):
    import train_gpt

    names = []
    for _ in range(3):
        names.append(train_gpt._free_name(tmp_path, "tiny"))
        (tmp_path / names[-1]).mkdir()
    assert names == ["tiny", "tiny-2", "tiny-3"]
