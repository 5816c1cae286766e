"""A disk that fails costs a tuned config and one warning; the model runs on, and the reason is counted."""

import builtins
import contextlib
import errno
import os
import pwd
import resource
import shutil
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from ejkernel_ops import (
    Autotuner,
    ConfigSelectorChain,
    FwdParams,
    Key,
    LinearConfig,
    PersistentCache,
    autotune_lowered,
    device_fingerprint,
    find_labels_in_lowered,
    linear,
    set_default_selector,
)
from ejkernel_ops.config import entry as entry_module
from ejkernel_ops.utils import files as files_module
from ejkernel_ops.utils.meta import split_label

pytestmark = pytest.mark.once

X, W = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
ERRORS = ("EBUSY", "ESTALE", "ENOENT", "EACCES", "EIO", "EROFS", "ENOSPC", "EDQUOT", "EMFILE")


@pytest.fixture
def cache(tmp_path):
    """A cache with one entry, not used yet, in a folder that is there."""
    PersistentCache(tmp_path, cfg_type=int).put("key", 32)
    return PersistentCache(tmp_path, cfg_type=int)


class Failing:
    """An open file of which one method raises."""

    def __init__(self, file, method, error):
        self.file, self.method, self.error = file, method, error

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def _call(self, method, *arguments):
        if method == self.method:
            raise self.error
        return getattr(self.file, method)(*arguments)

    def read(self, size):
        return self._call("read", size)

    def write(self, text):
        return self._call("write", text)


def fails(patch, place, error):
    """Makes one system call fail, as a network filesystem may."""

    def raises(*arguments, **keywords):
        raise error

    def opens(*arguments, **keywords):
        return Failing(builtins.open(*arguments, **keywords), place, error)

    places = {
        "mkdir": (os, "mkdir", raises), "replace": (os, "replace", raises),
        "list": (os, "listdir", raises), "remove": (os, "unlink", raises),
        "create": (files_module, "open", raises), "write": (files_module, "open", opens),
        "open": (entry_module, "open", raises), "read": (entry_module, "open", opens),
    }  # fmt: skip
    patch.setattr(*places[place], raising=False)


def use(cache, place):
    """Does what reaches a place, and returns what a caller sees of the fault: nothing but the lack of an entry."""
    if place in ("mkdir", "create", "write", "replace"):
        if place == "mkdir":
            shutil.rmtree(cache.path, ignore_errors=True)
        return cache.put("other", 33)
    if place == "remove":
        return cache.discard("key")
    return cache.get("key") if place in ("open", "read") else (cache.keys() or None)


ACTIONS = {"open": "read", "read": "read", "list": "list", "remove": "remove"}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("place", ["mkdir", "create", "write", "replace", "open", "read", "list", "remove"])
def test_any_error_of_a_filesystem_is_a_miss_one_warning_and_counted(place, name, cache, monkeypatch):
    action = ACTIONS.get(place, "write")
    nothing_there = name == "ENOENT" and action != "write"  # no fault
    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        fails(patch, place, OSError(getattr(errno, name), "a fault"))
        for _ in range(3):
            assert use(cache, place) is None
    assert len(caught) == (0 if nothing_there else 1)
    reasons = {f"{action} failed: {name}": 3} if not nothing_there else {"miss": 3} if action == "read" else {}
    assert cache.stats == reasons
    if place != "mkdir":
        assert cache.get("key") == 32
        assert len(os.listdir(cache.path)) == 1  # nothing half-written is left
    cache.put("other", 34)
    assert cache.get("other") == 34


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("place", ["open", "read"])
def test_a_model_gives_the_same_numbers_while_its_disk_fails(place, name, tmp_path, monkeypatch):
    [found] = find_labels_in_lowered(jax.jit(linear).lower(X, W))
    key = Key(device_fingerprint(), *split_label(found))
    PersistentCache(tmp_path).put(key, LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2)))
    cache = PersistentCache(tmp_path)
    set_default_selector(ConfigSelectorChain(persistent=cache))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fails(monkeypatch, place, OSError(getattr(errno, name), "a fault"))
        np.testing.assert_array_equal(linear(X, W), X @ W)
    assert len(caught) == (name != "ENOENT")
    assert not cache.stats["hit"]


@pytest.mark.parametrize("place", ["open", "read"])
def test_what_cannot_be_read_today_is_not_swept(place, cache, monkeypatch):
    with monkeypatch.context() as patch:
        fails(patch, place, OSError(errno.ESTALE, "a fault"))
        with pytest.warns(UserWarning, match="could not read"):
            assert cache.sweep() == 0
    assert cache.get("key") == 32


def test_what_is_tuned_is_used_from_memory_where_no_folder_can_be_made():
    chain = ConfigSelectorChain(tuner=Autotuner(num_iters=1), persistent=PersistentCache("/proc/none/configs"))
    lowered = jax.jit(lambda x, w: linear(x, w)).lower(X, W)
    with pytest.warns(UserWarning, match="could not write") as caught:
        [entry] = autotune_lowered(chain, lowered).entries
    assert len(caught) == 1
    [again] = autotune_lowered(chain, lowered).entries
    assert (again.cfg, again.source) == (entry.cfg, "memory")


# Folders


@contextlib.contextmanager
def unprivileged():
    """As a user whom permissions concern: root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def public():
    """A folder that any user can reach, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ejkernel-tests-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_may_only_be_read_gives_its_entries_and_takes_none(public):
    PersistentCache(public, cfg_type=int).put("key", 32)
    public.chmod(0o555)
    cache = PersistentCache(public, cfg_type=int)
    with unprivileged():
        with pytest.warns(UserWarning, match="could not write") as caught:
            [cache.put(key, 33) for key in ("key", "other")]
        assert (cache.get("key"), cache.get("other")) == (32, None)
    assert len(caught) == 1
    assert cache.stats == {"write failed: EACCES": 2, "hit": 1, "miss": 1}
    assert len(os.listdir(public)) == 1


def test_a_folder_of_somebody_else_is_a_miss_and_one_warning(public):
    PersistentCache(public / "own", cfg_type=int).put("key", 32)
    assert (public / "own").stat().st_mode & 0o777 == 0o700
    (public / "own").chmod(0o000)
    cache = PersistentCache(public / "own", cfg_type=int)
    with unprivileged(), pytest.warns(UserWarning, match="could not read") as caught:
        assert [cache.get("key") for _ in range(3)] == [None] * 3
    assert len(caught) == 1
    assert cache.stats == {"read failed: EACCES": 3}


def test_without_a_home_nothing_is_kept_and_the_warning_says_what_helps(monkeypatch):
    """As in a container, where the user is a number without a name."""
    for name in ("HOME", "EJKERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    for cache in (PersistentCache(cfg_type=int), PersistentCache("~/configs", cfg_type=int)):
        with pytest.warns(UserWarning, match="set EJKERNEL_CACHE_DIR to an absolute path") as caught:
            assert cache.put("key", 32) is cache.get("key") is None
        assert len(caught) == 1
        assert cache.keys() == []
    set_default_selector(ConfigSelectorChain(persistent=PersistentCache()))
    np.testing.assert_array_equal(linear(X, W), X @ W)
    assert not Path("~").exists()


# A full disk


@contextlib.contextmanager
def files_of_at_most(size):
    """Writing more fails, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_disk_that_is_full_keeps_what_it_has_and_takes_no_half(tmp_path):
    cache = PersistentCache(tmp_path, cfg_type=list)
    for number in range(64):
        cache.put(f"key {number}", [number])
    with pytest.warns(UserWarning, match="could not write") as caught, files_of_at_most(256):
        [cache.put(f"{new}key {number}", [number] * 100) for number in range(64) for new in ("", "new ")]
    assert len(caught) == 1
    assert cache.stats == {"written": 64, "write failed: EFBIG": 128}
    assert [cache.get(f"key {number}") for number in range(64)] == [[number] for number in range(64)]
    assert len(os.listdir(tmp_path)) == 64
    cache.put("new key 0", [0])
    assert cache.get("new key 0") == [0]
