"""The packaged table of tuned configs: below the user's disk, above tuning, found by neighbours, checked, read once."""

import importlib
import importlib.resources
import json
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ejkernel_ops as ek
from ejkernel_ops.config import table
from ejkernel_ops.config.neighbours import place_of
from ejkernel_ops.execution.result_json import read
from ejkernel_ops.kernels import LINEAR

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
DEVICE = ek.device_fingerprint()
NAME = table.table_name(DEVICE)


def call(rows=512):
    return ek.Invocation(LINEAR, (jax.ShapeDtypeStruct((rows, 4), "float32"), jnp.ones((4, 4))))


def config(rows):
    return ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=rows))


def entry(rows=3, inv=None, **fields):
    inv = inv or call()
    more = {"heuristic": config(512), "heuristic_ms": 2.0, "ms": 1.0, "place": place_of(inv)} | fields
    return ek.Entry(inv.op_id_v, inv.call_key, config(rows), **more)


def result(*entries, device=DEVICE):
    return ek.AutotuningResult(device, entries or (entry(),))


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of which only the tables are there; how often one was opened."""
    (tmp_path / "tables").mkdir()
    monkeypatch.setattr(importlib.resources, "files", lambda name: tmp_path)
    table.table_of.cache_clear()
    yield tmp_path / "tables"
    table.table_of.cache_clear()


@pytest.fixture
def shipped(package):
    (package / NAME).write_text(result().dumps())
    return package


def chosen(inv, **parts):
    choice = ek.ConfigSelectorChain(**parts).choose_for(inv, ek.core.snapshot.current(), 0)
    return choice.cfg.fwd.blocksize_m, dict(choice.sources)["fwd.blocksize_m"]


class Refuses:
    def tune(self, *args, **kwargs):
        raise AssertionError("asked to tune")


@pytest.mark.usefixtures("shipped")
def test_table_is_below_memory_and_disk_and_above_tuning(tmp_path):
    inv, disk, memory = call(), ek.PersistentCache(tmp_path / "disk"), ek.ConfigCache()
    key = ek.Key(DEVICE, inv.op_id_v, inv.call_key)
    policy = ek.AutotunePolicy(tune_on_call=True)
    assert chosen(inv, cache=memory, persistent=disk, tuner=Refuses(), policy=policy) == (3, "table")
    disk.put(*key, config(5))
    assert chosen(inv, cache=memory, persistent=disk) == (5, "disk")
    memory.put(*key, config(6))
    assert chosen(inv, cache=memory, persistent=disk) == (6, "memory")


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(("mode", "found"), [("auto", "table"), ("cached", "table"), ("pinned", "table"), ("off", "")])
def test_every_mode_but_off_takes_the_table(mode, found):
    assert (chosen(call(), policy=ek.AutotunePolicy(mode=mode))[1] == "table") == bool(found)


@pytest.mark.usefixtures("shipped")
def test_table_is_used_with_several_processes_for_every_wheel_has_the_same(monkeypatch, tmp_path):
    inv, disk = call(), ek.PersistentCache(tmp_path / "disk")
    disk.put(DEVICE, inv.op_id_v, inv.call_key, config(5))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert chosen(inv, persistent=disk) == (3, "table")
    assert chosen(call(256), persistent=disk) == (3, "neighbour")


@pytest.mark.usefixtures("shipped")
def test_a_near_shape_takes_the_nearest_and_the_users_own_first():
    assert chosen(call(256)) == (3, "neighbour")
    assert chosen(ek.Invocation(LINEAR, (jnp.ones((512, 4), jnp.bfloat16), jnp.ones((4, 4)))))[1] == "heuristic"
    selector, mine = ek.ConfigSelectorChain(), call(64)
    selector.store(ek.Key(DEVICE, mine.op_id_v, mine.call_key), config(7), mine)
    assert selector.choose(call(256)).fwd.blocksize_m == 7


def test_where_the_heuristic_won_a_near_shape_has_its_own_heuristic(package):
    (package / NAME).write_text(result(entry(512)).dumps())
    assert chosen(call()) == (512, "table")
    assert chosen(call(256))[1] == "heuristic"


@pytest.mark.usefixtures("shipped")
def test_a_config_that_is_not_legal_any_more_is_passed_over(monkeypatch):
    assert chosen(call()) == (3, "table")
    monkeypatch.setattr(type(LINEAR), "illegal", lambda self, inv, cfg: "no" if cfg.fwd.blocksize_m == 3 else None)
    assert chosen(call())[1] == "heuristic"


def test_table_is_read_when_it_is_first_needed_and_once(shipped, monkeypatch):
    reads, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path.name) or read_bytes(path))
    selector = ek.ConfigSelectorChain()
    assert reads == []
    for rows in (512, 256, 128):
        selector.choose(call(rows))
    assert ek.ConfigSelectorChain().choose(call()) == config(3)
    assert reads == [NAME]
    assert shipped.joinpath(NAME).exists()


@pytest.mark.parametrize("text", ["{", result().dumps().replace('"xla"', '"gcc"'), b"\xff\xfe"])
def test_a_damaged_table_is_one_warning_and_breaks_nothing(package, text):
    (package / NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match="packaged table of tuned configs .* cannot be used") as told:
        sources = [chosen(call(rows))[1] for rows in (512, 256)]
    assert sources == ["heuristic"] * 2
    assert len(told) == 1


@pytest.mark.parametrize("name", [None, NAME])
def test_without_a_table_of_this_device_nothing_happens(package, name):
    if name:  # a model of the same name that is another device
        (package / name).write_text(result(device=f"{DEVICE}|9.0").dumps())
    assert chosen(call())[1] == "heuristic"


def test_names_of_tables_are_those_of_models():
    assert table.table_name("gpu|NVIDIA H200|9.0") == "nvidia_h200.json"
    assert table.table_name("gpu|NVIDIA H100 80GB HBM3|9.0") == "nvidia_h100_80gb_hbm3.json"
    assert table.table_name("gpu|../../x|9.0") == "x.json"


# Made of measurements


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("make_table")
    sys.modules.pop("make_table")


GPU = "gpu|Fake 9000|9.0"


def test_a_table_is_made_of_what_was_measured_alone(script, tmp_path):
    measured, folder = tmp_path / "measured", tmp_path / "tables"
    measured.mkdir()
    trial = ek.Trial(config(4), "timed", 3.0)
    first = entry(3, trials=(trial,), count=7)
    others = [entry(5, call(64), source="disk"), entry(5, call(32), place=None), entry(5, call(16), ms=None)]
    result(first, *others, device=GPU).save(measured / "b.json")
    result(entry(4, call(128)), first, device=GPU).save(measured / "a.json")
    script.main([], measured, folder)
    assert [path.name for path in folder.iterdir()] == ["fake_9000.json"]
    made = read(ek.AutotuningResult, (folder / "fake_9000.json").read_bytes())
    assert (made.device, made.notes, made.skipped) == (GPU, (), ())
    assert {e.call_key: e.cfg.fwd.blocksize_m for e in made.entries} == {call().call_key: 3, call(128).call_key: 4}
    assert all((e.trials, e.count, e.ms) == ((), 1, 1.0) for e in made.entries)
    script.main(["--check"], measured, folder)
    (folder / "fake_9000.json").write_text(made.dumps())
    with pytest.raises(SystemExit, match=r"fake_9000\.json in tables/ is not what measured/ gives"):
        script.main(["--check"], measured, folder)
    (measured / "a.json").unlink()
    (measured / "b.json").unlink()
    script.main([], measured, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("second", "message"), [
    (lambda: result(entry(4), device=GPU), r"b\.json: the results have two configs for linear@v1"),
    (lambda: result(device="gpu|FAKE-9000|8.0"), r"b\.json: results are for"),
])  # fmt: skip
def test_measurements_that_contradict_each_other_make_no_table(script, tmp_path, second, message):
    result(device=GPU).save(tmp_path / "a.json")
    second().save(tmp_path / "b.json")
    with pytest.raises(SystemExit, match=message):
        script.main([], tmp_path, tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_the_shipped_tables_are_what_the_committed_measurements_give(script):
    shipped = {path.name: path.read_text() for path in (ROOT / "ejkernel_ops" / "tables").glob("*.json")}
    assert script.tables(ROOT / "benchmarks" / "measured") == shipped
    assert "nvidia_h200.json" in shipped
    for name, text in shipped.items():
        assert table.table_name(json.loads(text)["device"]) == name


def test_tables_are_in_the_wheel():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "ejkernel_ops" in wheel["packages"]
    assert "ejkernel_ops/tables/*.json" in wheel["artifacts"]
