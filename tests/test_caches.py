"""Caches keep typed configs; whatever is wrong with one is a miss and a warning, never a broken model."""

import concurrent.futures
import contextlib
import os
import sys
import threading
import warnings

import numpy as np
import pytest

from ejkernel_ops import (
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    FwdParams,
    Invocation,
    Key,
    LinearConfig,
    PersistentCache,
    linear,
    set_default_selector,
)
from ejkernel_ops.kernels import LINEAR

X, W = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)


def test_memory_cache_takes_both_call_forms():
    cache = ConfigCache()
    cache.put("cpu|cpu", "op@v1", "00", 3)
    cache.put(("any", 7), 4)
    assert cache.get("cpu|cpu", "op@v1", "00") == cache.get(Key("cpu|cpu", "op@v1", "00")) == 3
    assert cache.get(("any", 7)) == 4
    assert (("any", 7) in cache, "other" in cache, len(cache)) == (True, False, 2)
    assert cache.get("other") is None
    with pytest.raises(TypeError, match="expected one key, or device, op_id_v and call_key"):
        cache.get("cpu|cpu", "op@v1")
    with pytest.raises(TypeError, match="expected one key"):
        cache.put("cpu|cpu", "op@v1", 3)
    with pytest.raises(ConfigError, match="cfg is None"):
        cache.put("key", None)
    cache.clear()
    assert cache.keys() == cache.items() == []


def test_memory_cache_is_safe_in_threads():
    cache = ConfigCache()

    def work(number):
        for i in range(1000):
            cache.put(f"{number}-{i}", i)
            assert cache.get(f"{number}-{i}") == i
            if i % 100 == 0:
                cache.items()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert len(cache) == 16_000


def disk_files(cache):
    return sorted(p.name for p in cache.path.iterdir())


def test_disk_cache_takes_both_call_forms_and_reads_back_typed_configs(tmp_path):
    cache = PersistentCache(tmp_path / "new" / "folder", cfg_type=dict)
    config = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2))
    assert cache.get("cpu|cpu", "linear@v1", "00") is None
    cache.put("cpu|cpu", "linear@v1", "00", config)
    cache.put({"any": 7}, {"size": 4})
    again = PersistentCache(tmp_path / "new" / "folder", cfg_type=dict)
    assert again.get("cpu|cpu", "linear@v1", "00") == again.get(Key("cpu|cpu", "linear@v1", "00")) == config
    assert again.get({"any": 7}) == {"size": 4}
    assert ({"any": 7} in again, "other" in again) == (True, False)
    assert all(len(name) == 69 and name.endswith(".json") for name in disk_files(cache))
    assert (tmp_path / "new").stat().st_mode & 0o077 in (0, 0o055)
    with pytest.raises(ConfigError, match=r"cache key is a builtins\.object"):
        cache.put(object(), 3)
    with pytest.raises(ConfigError, match="cfg is None"):
        cache.put("key", None)
    with pytest.raises(ConfigError, match="no JSON form"):
        cache.put("key", object())


def entry(tmp_path):
    """A cache with one entry, its file, and the text of it."""
    cache = PersistentCache(tmp_path, cfg_type=int)
    cache.put("key", 32)
    (file,) = tmp_path.iterdir()
    return PersistentCache(tmp_path, cfg_type=int), file, file.read_text()


DAMAGE = {
    "torn": lambda file, text: file.write_text(text[: len(text) // 2]),
    "empty": lambda file, text: file.write_text(""),
    "garbage": lambda file, text: file.write_bytes(bytes(range(256))),
    "one digit": lambda file, text: file.write_text(text.replace("32", "33")),
    "other schema": lambda file, text: file.write_text(text.replace('"schema": 3', '"schema": 4')),
    "no checksum": lambda file, text: file.write_text(
        '{"schema": 3, "key": "key", "type": "builtins:int", "config": 32}'
    ),
    "a list": lambda file, text: file.write_text("[1, 2]"),
    "deep": lambda file, text: file.write_text("[" * 200_000),
    "huge": lambda file, text: file.write_text(text + " " * (1 << 20)),
    "not a number": lambda file, text: file.write_text(text.replace("32", "NaN")),
    "beyond floats": lambda file, text: file.write_text(text.replace("32", "1e999")),
    "many digits": lambda file, text: file.write_text(text.replace("32", "9" * 5000)),
    "name twice": lambda file, text: file.write_text(text.replace('"config"', '"config": 31,\n"config"')),
    "a folder": lambda file, text: (file.unlink(), file.mkdir()),
    "a pipe": lambda file, text: (file.unlink(), os.mkfifo(file)),
    "a link": lambda file, text: (file.rename(file.with_suffix(".x")), file.symlink_to(file.with_suffix(".x"))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_or_foreign_file_is_a_miss_and_one_warning(kind, tmp_path):
    cache, file, text = entry(tmp_path)
    DAMAGE[kind](file, text)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.warns(UserWarning, match="config cache: could not read") as caught:
        assert [cache.get("key") for _ in range(5)] == [None] * 5
    assert len(caught) == 1
    reason = {"other schema": "other schema", "a folder": "EISDIR", "a link": "ELOOP"}.get(kind, "corrupt")
    assert cache.stats == {f"read failed: {reason}": 5}
    assert len(os.listdir("/proc/self/fd")) == opened
    if kind not in ("a folder", "a link"):
        cache.put("key", 32)  # repairs it
        assert cache.get("key") == 32


def test_entry_of_another_key_or_type_is_a_miss(tmp_path):
    cache, file, text = entry(tmp_path)
    cache.put("other", 33)
    other = next(p for p in tmp_path.iterdir() if p != file)
    other.write_text(text)
    with pytest.warns(UserWarning, match="holds another key"):
        assert cache.get("other") is None
    with pytest.warns(UserWarning, match="not a str"):
        assert PersistentCache(tmp_path, cfg_type=str).get("key") is None
    file.write_text(text.replace("builtins:int", "unheard.of:Config"))
    with pytest.warns(UserWarning, match="checksum does not match"):
        assert PersistentCache(tmp_path).get("key") is None


def test_any_key_keeps_the_type_of_its_config_where_it_is_imported(tmp_path, monkeypatch):
    for number, cfg in enumerate([7, "text", [1, 2], {"a": 1}, FwdParams(num_warps=4), LinearConfig(backend="xla")]):
        PersistentCache(tmp_path).put(("any key", number), cfg)
        found = PersistentCache(tmp_path).get(("any key", number))
        assert (found, type(found)) == (cfg, type(cfg))
    monkeypatch.delitem(sys.modules, "ejkernel_ops.params")
    with pytest.warns(UserWarning, match=r"type 'ejkernel_ops.params:FwdParams' is no plain one"):
        assert PersistentCache(tmp_path).get(("any key", 4)) is None
    assert "ejkernel_ops.params" not in sys.modules


def test_entry_with_an_unknown_field_or_an_illegal_value_is_a_miss(tmp_path):
    for config in ({"backend": "xla", "blocksize": 3}, {"backend": "cuda"}, {"fwd": {"blocksize_m": 0}}, {"fwd": 3}):
        PersistentCache(tmp_path, cfg_type=dict).put("cpu|cpu", "linear@v1", "00", config)
        cache = PersistentCache(tmp_path)
        with pytest.warns(UserWarning, match="could not read .* (unknown field|not a LinearConfig)"):
            assert cache.get("cpu|cpu", "linear@v1", "00") is None


def test_config_on_disk_of_a_back_end_that_is_not_here_is_passed_over(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    statics = dict(activation=None, weight_layout="io", out_dtype=np.dtype("float32"), precision=None)
    inv = Invocation(LINEAR, (X, W, None), statics)
    selector.persistent.put(inv.device_fingerprint, inv.op_id_v, inv.call_key, LinearConfig(backend="triton"))
    assert selector.choose(inv).backend == "xla"


@pytest.mark.parametrize(("path", "reason"), [("/proc/none/cache", "ENOENT"), ("/dev/null/cache", "ENOTDIR")])
def test_folder_that_cannot_be_written_costs_one_warning(path, reason):
    cache = PersistentCache(path, cfg_type=int)
    with pytest.warns(UserWarning, match="config cache: could not write") as caught:
        [cache.put(f"key {number}", 32) for number in range(3)]
    assert len(caught) == 1
    assert cache.stats == {f"write failed: {reason}": 3}
    with warnings.catch_warnings(), contextlib.suppress(UserWarning):
        warnings.simplefilter("error")
        assert cache.get("key 0") is None


def test_models_run_on_while_their_cache_is_broken(tmp_path):
    (tmp_path / "file").write_text("")
    set_default_selector(ConfigSelectorChain(persistent=PersistentCache(tmp_path / "file" / "cache")))
    with pytest.warns(UserWarning, match="config cache: could not read"):
        np.testing.assert_allclose(linear(X, W), X @ W)


def test_reading_never_makes_a_folder_and_the_environment_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "given"))
    cache = PersistentCache(cfg_type=int)
    assert cache.get("key") is None
    assert not (tmp_path / "given").exists()
    cache.put("key", 3)
    assert cache.path == tmp_path / "given"
    assert PersistentCache(cfg_type=int).get("key") == 3


def test_no_writer_in_a_crowd_loses_or_tears_an_entry(tmp_path):
    stop, torn = threading.Event(), []

    def read():
        cache = PersistentCache(tmp_path, cfg_type=int)
        while not stop.is_set():
            torn.append(cache.get("shared") not in (None, *range(8)))

    def write(number):
        cache = PersistentCache(tmp_path, cfg_type=int)
        for i in range(25):
            cache.put(f"{number}-{i}", i)
            cache.put("shared", number)

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        reader = pool.submit(read)
        list(pool.map(write, range(8)))
        stop.set()
        reader.result()
    assert not any(torn)
    cache = PersistentCache(tmp_path, cfg_type=int)
    assert [cache.get(f"{n}-{i}") for n in range(8) for i in range(25)] == list(range(25)) * 8
    assert len(list(tmp_path.iterdir())) == 201
