"""Cache files that are damaged or forged are a miss, never an exception or an illegal config; many cost nothing."""

import dataclasses
import json
import os
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import CacheFormatError, FwdParams, Invocation, Key, LinearConfig, PersistentCache
from ejkernel_ops.commands.cache import described
from ejkernel_ops.config.entry import CacheEntry, dump_entries, load_entries, read_entry
from ejkernel_ops.config.neighbours import HintsKey, Neighbours, place_of
from ejkernel_ops.config.schema import to_json
from ejkernel_ops.kernels import LINEAR

from .fuzzed import ODD, altered, counts, damaged

pytestmark = pytest.mark.once

KEY = Key("cpu|x86_64|2", "linear@v1", "0123456789abcdef")
CONFIG = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=32))


@pytest.fixture
def stored(tmp_path):
    """A cache with one entry, and the file of it. Its one warning is of no interest here."""
    cache = PersistentCache(tmp_path)
    cache.put(KEY, CONFIG)
    (file,) = tmp_path.iterdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield cache, file


@counts(1000, 10_000)
def test_a_damaged_file_is_a_miss_and_the_next_put_repairs_it(count, stored):
    cache, file = stored
    found = {CONFIG: 0, None: 0}
    for raw in damaged(file.read_bytes(), count):
        file.write_bytes(raw)
        found[cache.get(KEY)] += 1  # any other config is a KeyError
    assert found[None] > 0.95 * count  # the rest is damage to a blank between two fields
    assert found[None] == cache.stats["read failed: corrupt"] + cache.stats["read failed: other schema"]
    assert (len(cache.keys()), cache.sweep()) in ((0, 1), (1, 0))
    cache.put(KEY, CONFIG)
    assert cache.get(KEY) == CONFIG


@counts(1000, 10_000)
def test_a_forged_file_with_a_right_checksum_is_a_miss_or_a_config_of_the_kernel(count, stored):
    cache, file = stored
    entry, missed = read_entry(file), 0
    for fields in altered(dataclasses.asdict(entry), count):
        try:
            forged = CacheEntry(**fields)
        except TypeError:  # a field is missing, or all of it is another value
            file.write_text(json.dumps(fields))
        else:
            file.write_text(forged.dumps())
        config = cache.get(KEY)
        assert config is None or isinstance(config, LinearConfig)
        missed += config is None
    assert 0.2 * count < missed < count


@counts(1000, 10_000)
def test_forged_hints_with_a_right_checksum_break_no_call_nearby(count, tmp_path):
    cache = PersistentCache(tmp_path)
    config = json.loads(to_json(CONFIG))
    call = Invocation(LINEAR, (jnp.ones((8, 128)), jnp.ones((128, 64))))
    place = place_of(call)
    key = HintsKey(KEY.device, KEY.op_id_v, place.kind)
    cache.put(key, "[]")
    file, found = tmp_path / next(cache.entries()).file_name, 0
    entry = read_entry(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for hints in altered([[[[16, 128], [128, 64]], config], [[[32, 128], [128, 64]], None]], count):
            file.write_text(dataclasses.replace(entry, config=json.dumps(hints)).dumps())
            near = Neighbours(cache).of(KEY.device, call, place)
            assert all(n.cfg is None or isinstance(n.cfg, LinearConfig) for n in near)
            found += bool(near)
    failed = cache.stats["read failed: corrupt"]
    assert 0.1 * count < failed < 0.9 * count
    assert 0.1 * count < found <= count - failed


REFUSED = {
    ("fwd", "blocksize_m"): [x for x in ODD if x is not None and not (type(x) is int and 0 < x < 1 << 63)],
    ("fwd",): [x for x in ODD if x not in (None, {})],
    ("backend",): [x for x in ODD if x is not None],
    ("blocksize",): [x for x in ODD],
    (): [x for x in ODD if x not in ({}, {"backend": "xla"})],
}


@pytest.mark.parametrize(("path", "value"), [(path, x) for path, values in REFUSED.items() for x in values], ids=str)
def test_a_value_of_another_type_or_out_of_range_is_refused(path, value, stored):
    cache, file = stored
    for name in reversed(path):
        value = {name: value}
    file.write_text(dataclasses.replace(read_entry(file), config=value).dumps())
    assert cache.get(KEY) is None
    assert cache.stats["read failed: corrupt"] == 1


@counts(300, 3000)
def test_a_damaged_export_is_refused_as_a_whole(count, stored):
    _, file = stored
    text, refused = dump_entries([read_entry(file)] * 3), 0
    whole = load_entries(text)
    for raw in damaged(text.encode(), count):
        try:
            assert load_entries(raw) == whole
        except CacheFormatError:
            refused += 1
    assert refused > 0.95 * count


@counts(1000, 10_000)
def test_a_forged_export_is_refused_or_can_be_listed_and_stored(count, stored, tmp_path):
    _, file = stored
    entry, taken = read_entry(file), 0
    other = PersistentCache(tmp_path / "other")
    for fields in altered(dataclasses.asdict(entry), count):
        try:
            [forged] = load_entries(dump_entries([CacheEntry(**fields)]))
        except (TypeError, CacheFormatError):  # it has no such field; or it is refused
            continue
        assert described(forged)["config"] == forged.config
        assert other.put_entry(forged)
        taken += 1
    assert 0.1 * count < taken < 0.9 * count
    assert len(list(other.entries())) >= len(other.keys()) > 1
    assert all(path.parent == other.path for path in tmp_path.rglob("*") if path not in (file, other.path))


@counts(1000, 10_000)
def test_entries_however_many_are_found_without_listing_them_and_swept_in_seconds(count, tmp_path, monkeypatch):
    cache = PersistentCache(tmp_path, cfg_type=int)
    for number in range(count):
        cache.put(number, number)
    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, lambda *_: 1 / 0)
        times = []
        for number in range(0, count, 10):
            start = time.perf_counter()
            assert cache.get(number) == number
            times.append(time.perf_counter() - start)
    assert np.median(times) < 1e-3
    start = time.process_time()
    assert cache.sweep() == 0
    assert time.process_time() - start < 5
    assert cache.clear() == count
