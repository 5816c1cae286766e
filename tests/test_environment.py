"""Environment variables are checked where they are read, and unknown ones do not pass unseen."""

from pathlib import Path

import platformdirs
import pytest

from ejkernel_ops import ConfigError, LabelError, PersistentCache, label
from ejkernel_ops.environment import _warn_of_unknown, cache_dir, label_prefix, recording


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_recording_is_on_unless_it_is_turned_off(value, wanted, monkeypatch):
    monkeypatch.delenv("EJKERNEL_OPS_RECORD", raising=False)
    if value is not None:
        monkeypatch.setenv("EJKERNEL_OPS_RECORD", value)
    assert recording() is wanted


@pytest.mark.parametrize(("name", "value", "read", "error", "message"), [
    ("EJKERNEL_OPS_RECORD", "yes", recording, ConfigError, "EJKERNEL_OPS_RECORD is 'yes'; expected 0 or 1"),
    ("EJKERNEL_OPS_PREFIX", "mine", label_prefix, LabelError, "EJKERNEL_OPS_PREFIX is 'mine'; expected 1 to 63"),
    ("EJKERNEL_OPS_PREFIX", "a b#", label_prefix, LabelError, "EJKERNEL_OPS_PREFIX is 'a b#'"),
    ("EJKERNEL_CACHE_DIR", "cache", cache_dir, ConfigError, "EJKERNEL_CACHE_DIR is 'cache'; expected an absolute path"),
])  # fmt: skip
def test_bad_values_are_refused_by_name(name, value, read, error, message, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        read()


def test_the_cache_folder_is_the_given_one_else_that_of_the_platform(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~/configs")
    assert cache_dir() == PersistentCache().path == Path.home() / "configs"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "")
    assert cache_dir() == Path(platformdirs.user_cache_dir("ejkernel_ops")) / "configs"


def test_unknown_variables_are_a_warning_with_a_hint_once(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORDS", "0")
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    _warn_of_unknown.cache_clear()
    with pytest.warns(UserWarning, match="is not known and has no effect") as caught:
        recording()
    texts = [str(w.message) for w in caught]
    assert any("EJKERNEL_OPS_RECORDS" in t and "did you mean EJKERNEL_OPS_RECORD?" in t for t in texts)
    assert any("EJKERNEL_OPS_STAMP" in t for t in texts)
    label("a@v1", "0" * 16)  # no second time: it would be an error here
