"""The training example over a mesh: the same numbers, parameters in parts, checkpoints that another mesh reads."""

import csv
import importlib
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejlayers
from ejkernel_ops import AutotuningResult, device_fingerprint

ROOT = Path(__file__).parent.parent
MODELS = ["nnx", "linen", "equinox", "llama"]
pytestmark = [pytest.mark.once, pytest.mark.slow]


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def trained(model, sizes, steps=3):
    """The losses of some steps over a mesh, and the arrays of the state before and after them by path."""
    from gpt.sharding import Spread
    from gpt.sizes import SIZES

    training = importlib.import_module(f"gpt.{model}_model")
    size = SIZES["llama-smoke" if model == "llama" else "smoke"]
    spread = Spread.over(sizes, size)
    rows = np.random.default_rng(0).integers(0, 256, (size.batch, size.context + 1), np.int32)

    def new():
        return training.new_state(size, jax.numpy.dtype("float32"), 0, 20, ejlayers.swap)

    def arrays():
        found = jax.tree_util.tree_leaves_with_path(training.arrays_of(state))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}

    losses = []
    with spread.entered():
        state, batch = spread.state(training, new), spread.batch(rows)
        before = arrays()
        for _ in range(steps):
            state, loss = training.train_step(state, batch)
            losses.append(float(loss))
        return losses, before, arrays()


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_over_every_axis_as_on_one_device_and_stays_in_the_same_parts(model):
    alone, _, _ = trained(model, None)
    losses, before, after = trained(model, {"fsdp": 2, "context": 2, "model": 2})
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert [n for n, x in before.items() if not x.sharding.is_equivalent_to(after[n].sharding, x.ndim)] == []
    matrices = {name: x for name, x in before.items() if x.ndim > 1 and "positions" not in name}
    assert len(matrices) >= 3 * 8  # each, with both of its moments
    assert {n: x.sharding.spec for n, x in matrices.items() if x.addressable_shards[0].data.size * 4 != x.size} == {}


def test_a_rule_is_left_out_where_an_axis_does_not_divide():
    from gpt.sharding import spec_of

    sizes = {"data": 1, "fsdp": 4, "context": 1, "model": 3}
    assert spec_of("blocks/0/attention/query/kernel", (32, 2, 16), sizes) == P("fsdp", None)
    assert spec_of("blocks/0/attention/out/kernel", (6, 16, 30), sizes) == P("model", None, None)
    assert spec_of("blocks/0/norm1/scale", (32,), sizes) == P()


def test_a_run_over_one_mesh_goes_on_over_another_and_on_one_device(tmp_path, capsys):
    import train_gpt

    def train(*arguments):
        assert train_gpt.run([*map(str, arguments), "--runs", str(tmp_path)]) == 0
        return capsys.readouterr().out

    def losses(name):
        with open(tmp_path / name / "metrics.csv", newline="") as file:
            return [float(row["loss"]) for row in csv.DictReader(file)]

    AutotuningResult(device_fingerprint(), ()).save(tmp_path / "empty.json")
    flags = ["--size", "smoke", "--result", tmp_path / "empty.json", "--corpus", ROOT / "ejkernel_ops"]
    train(*flags, "--name", "whole", "--steps", 4, "--save-every", 2, "--mesh", "fsdp=2,model=2")
    for name, mesh in {"alone": [], "other": ["--mesh", "data=2,context=2"]}.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints/4")
        assert "resumed   after step 2" in train("--resume", name, *mesh)
        assert losses(name)[:2] == losses("whole")[:2]
        np.testing.assert_allclose(losses(name), losses("whole"), rtol=1e-5)
