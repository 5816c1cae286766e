"""Hostile names: none is ever part of a path."""

import os
import random

import pytest

from ejkernel_ops import ConfigError, Kernel, Key, LabelError, PersistentCache, label

from .fuzzed import counts

pytestmark = pytest.mark.once

DIGITS = "0123456789abcdef"
NAMES = [
    "", ".", "..", "../../x", "../../../etc/passwd", "/etc/passwd", "/", "a/b", "a/../b", "./a", "~", "~root/x",
    "%2e%2e%2f", "..\\..\\x", "C:\\x", "C:", "\\\\server\\share", "CON:", "NUL:", "x:stream", "con/aux", "a b", " a",
    "a\n", "\n", "\0", "a\0b", "\r\n", "\x1b[31m", "ä", "é", "名前", "\u202egnp.exe", "\U0001f600", "\ud800", "a@v1",
    "a@v2", "x" * 65, "x" * 300, "x" * 5000, "op#", "a:b", "a;rm -rf b", "`id`", "$(id)", "{}", "*", "?", "'", '"', "|",
]  # fmt: skip
LAWFUL_BUT_ODD = ["CON", "NUL", "aux", "con.json", "-rf", "--help", "a..b", ".hidden", "_", "x" * 64, "a.tmp", "0"]


class Doubles(Kernel):
    def run(self, x, *, cfg):
        return 2 * x


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_hostile_name_is_refused_in_a_kernel_and_a_label(name):
    with pytest.raises(ConfigError, match="expected 1 to 64 of"):
        Doubles(name=name or "/")
    if name in (".", ".."):  # harmless where a name stands before it, and in text that is only looked up
        return
    with pytest.raises(ConfigError, match="expected 1 to 32 of"):
        Doubles(name="doubles", version=name)
    with pytest.raises(LabelError, match="expected name@vN"):
        label(f"{name}@v1", DIGITS)


@pytest.mark.parametrize("name", NAMES + LAWFUL_BUT_ODD, ids=ascii)
def test_no_name_leaves_the_folder_or_meets_another(name, tmp_path):
    folder = tmp_path / "a" / "cache"
    cache = PersistentCache(folder, cfg_type=str)
    keys = [Key(name, "op@v1", DIGITS), Key("cpu", f"{name}@v1", DIGITS), Key("cpu", "op@v1", name), name, (name, "op")]
    for number, key in enumerate(keys):
        cache.put(key, f"{number} {name}")
    assert [cache.get(key) for key in keys] == [f"{number} {name}" for number in range(5)]
    assert sorted(map(repr, cache.keys())) == sorted(map(repr, keys))
    assert len(tree(tmp_path)) == 2 + 5
    assert all(len(file) == 69 and file.isascii() for file in os.listdir(folder))
    for key in keys:
        cache.discard(key)
    assert tree(tmp_path) == ["a", "a/cache"]


@counts(200, 5000)
def test_no_two_random_keys_meet(count, tmp_path):
    rng, cache = random.Random(0), PersistentCache(tmp_path, cfg_type=int)
    parts = ("", ".", "/", "op", "@v1", "|", ",", '"', "\\", "\0", "é", "[", "]", ":", DIGITS)
    keys = list({tuple("".join(rng.choices(parts, k=3)) for _ in range(3)) for _ in range(count)})
    for number, key in enumerate(keys):
        cache.put(Key(*key), number)
    assert [cache.get(Key(*key)) for key in keys] == list(range(len(keys)))
    assert [cache.get(key) for key in keys] == [None] * len(keys)  # a plain tuple is another key


def test_a_link_that_is_planted_is_neither_followed_nor_written_through(tmp_path):
    cache = PersistentCache(tmp_path / "cache", cfg_type=int)
    cache.put("key", 3)
    [file] = (tmp_path / "cache").iterdir()
    target = tmp_path / "target"
    file.rename(target)
    file.symlink_to(target)
    before = target.read_text()
    with pytest.warns(UserWarning, match="could not read"):
        assert cache.get("key") is None
    cache.put("key", 4)
    assert cache.get("key") == 4
    assert not file.is_symlink()
    assert target.read_text() == before


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes", 3, True])
def test_a_path_that_is_none_is_refused_where_it_is_given(path):
    with pytest.raises(ConfigError, match=r"path is .*; expected a folder"):
        PersistentCache(path)
