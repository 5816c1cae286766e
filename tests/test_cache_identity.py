"""What an entry is for: another device, kernel or call is a miss, another jax is not; what is illegal is not used."""

import dataclasses
import importlib.metadata

import jax
import numpy as np
import pytest

from ejkernel_ops import (
    ConfigSelectorChain,
    FwdParams,
    Key,
    LinearConfig,
    PersistentCache,
    default_selector,
    device_fingerprint,
    find_labels_in_lowered,
    linear,
    set_default_selector,
)
from ejkernel_ops.config import entry as entry_module
from ejkernel_ops.config import persistent
from ejkernel_ops.config.entry import read_entry
from ejkernel_ops.core import kernel as kernel_module
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils import versions
from ejkernel_ops.utils.meta import call_sites, split_label

pytestmark = pytest.mark.once

X, W = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
CONFIG = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2))


def key_of(*arrays, **options):
    [found] = find_labels_in_lowered(jax.jit(lambda *arrays: linear(*arrays, **options)).lower(*arrays))
    return Key(device_fingerprint(), *split_label(found))


def device(kind="gpu", model="NVIDIA H100 80GB HBM3", capability="9.0"):
    return "|".join((kind, model, capability))


BASE = Key(device(), "linear@v1", key_of(X, W).call_key)
OTHERS = {
    "device kind": BASE._replace(device=device(kind="tpu")),
    "device model": BASE._replace(device=device(model="NVIDIA H200")),
    "compute capability": BASE._replace(device=device(capability="10.0")),
    "op": BASE._replace(op_id_v="linear_bwd@v1"),
    "op version": BASE._replace(op_id_v="linear@v2"),
    "shape": BASE._replace(call_key=key_of(X[:2], W).call_key),
    "dtype": BASE._replace(call_key=key_of(X.astype(np.float16), W.astype(np.float16)).call_key),
    "static argument": BASE._replace(call_key=key_of(X, W, activation="silu").call_key),
}


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path, cfg_type=LinearConfig)


@pytest.mark.parametrize("other", OTHERS)
def test_another_ingredient_of_the_key_is_a_miss_without_a_warning(other, cache):
    cache.put(BASE, CONFIG)
    assert cache.get(OTHERS[other]) is None
    assert cache.get(BASE) == CONFIG
    assert cache.stats == {"written": 1, "miss": 1, "hit": 1}
    assert len({BASE, *OTHERS.values()}) == 9


def test_another_schema_is_a_miss_and_its_file_is_left_to_the_version_that_wrote_it(cache, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(entry_module, "SCHEMA", 4)
        cache.put(BASE, CONFIG)
    [file] = cache.path.iterdir()
    text = file.read_text()
    assert cache.get(BASE) is None
    cache.put(BASE, CONFIG)
    assert cache.get(BASE) == CONFIG
    assert (cache.sweep(), cache.keys()) == (0, [BASE])
    assert file.read_text() == text
    assert cache.stats == {"miss": 1, "written": 2, "hit": 1}


@pytest.mark.parametrize("name", ["jax", "jaxlib", "ejlayers", "triton", "driver"])
def test_another_version_of_jax_of_a_library_or_of_the_driver_is_a_hit_that_is_counted(name, cache, monkeypatch):
    with monkeypatch.context() as then:
        then.setattr(persistent, "tuned_with", lambda: versions.tuned_with() | {name: "0.0.1"})
        cache.put(BASE, CONFIG)
    assert cache.get(BASE) == CONFIG
    assert cache.stats == {"written": 1, "hit": 1, "hit other versions": 1}
    assert cache.clear(lambda entry: entry.versions == versions.tuned_with()) == 0


def test_an_entry_says_what_it_was_tuned_with(cache, monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.3.0\n"
    )
    monkeypatch.setattr(versions, "_DRIVER", driver)
    versions.tuned_with.cache_clear()
    cache.put(BASE, CONFIG)
    driver.unlink()
    versions.tuned_with.cache_clear()
    [entry] = cache.entries()
    installed = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "ejlayers")}
    assert entry.versions.items() >= (installed | {"driver": "580.65.06"}).items()
    assert entry.versions == versions.tuned_with() | {"driver": "580.65.06"}


# What is used of it today


def config_used(tmp_path, config):
    """The source and the config of `linear(X, W)` with an entry for it on disk."""
    PersistentCache(tmp_path, cfg_type=dict).put(key_of(X, W), config)
    set_default_selector(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))
    np.testing.assert_array_equal(linear(X, W), X @ W)
    [site] = call_sites(jax.jit(lambda x, w: linear(x, w)).lower(X, W))  # a function that nobody lowered before
    return site.config


def test_an_entry_of_a_call_is_what_it_uses(tmp_path):
    assert "blocksize_m=2 | backend:disk,fwd.blocksize_m:disk" in config_used(tmp_path, CONFIG)
    assert default_selector().stats["disk illegal"] == 0


ILLEGAL = {
    "a field that its back end lost": LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2, num_warps=4)),
    "a back end that is not here": LinearConfig(backend="triton"),
    "a back end that the op lost": LinearConfig(backend="cudnn"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("why", ILLEGAL)
def test_an_entry_that_is_illegal_today_is_passed_over_and_counted(why, tmp_path):
    assert "backend:heuristic" in config_used(tmp_path, ILLEGAL[why])
    assert default_selector().stats["disk illegal"] > 0


@pytest.mark.parametrize("rule", ["too large by now", ZeroDivisionError()], ids=str)
def test_an_entry_that_a_rule_of_today_refuses_is_passed_over(rule, tmp_path, monkeypatch):
    def illegal(self, inv, cfg):
        if isinstance(rule, Exception):
            raise rule
        return rule if cfg == CONFIG else None

    monkeypatch.setattr(type(kernel_module.KERNELS["linear@v1"]), "illegal", illegal)
    assert "backend:heuristic" in config_used(tmp_path, CONFIG)
    assert default_selector().stats["disk illegal"] > 0


def test_a_config_type_that_fails_at_its_own_values_is_a_miss(tmp_path):
    cache = PersistentCache(tmp_path, cfg_type=Ratio)
    cache.put("key", Ratio(4, 2))
    [file] = tmp_path.iterdir()
    file.write_text(dataclasses.replace(read_entry(file), config={"rows": 4, "parts": 0}).dumps())
    with pytest.warns(UserWarning, match="by zero"):
        assert cache.get("key") is None
    assert cache.stats["read failed: corrupt"] == 1


@dataclasses.dataclass(frozen=True)
class Ratio:
    rows: int
    parts: int

    def __post_init__(self):
        if self.rows % self.parts:
            raise ValueError("parts do not divide rows")


def test_the_disk_is_not_asked_where_there_are_several_processes(tmp_path, monkeypatch):
    PersistentCache(tmp_path).put(key_of(X, W), CONFIG)
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert selector.choose(find_call(key_of(X, W))) != CONFIG
    assert selector.persistent.stats == {}
