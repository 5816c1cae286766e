"""Many processes and killed ones use one cache folder: nothing is lost, torn or left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ejkernel_ops import PersistentCache

from .fuzzed import counts

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent


def processes(folder, what, count):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests/cache_processes.py", folder, what, str(count)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@counts(20, 200)
def test_sixteen_processes_with_keys_of_their_own_lose_nothing(count, tmp_path):
    assert processes(tmp_path, "crowd", count) == {"failed": 0}
    cache = PersistentCache(tmp_path, cfg_type=int)
    assert [cache.get(f"{n}-{i}") for n in range(16) for i in range(count)] == [
        1000 * n + i for n in range(16) for i in range(count)
    ]
    assert len(os.listdir(tmp_path)) == 16 * count


@counts(10, 200)
def test_sixteen_processes_that_write_one_key_never_show_a_torn_entry(count, tmp_path):
    assert processes(tmp_path, "shared", count) == {"failed": 0, "torn": 0}


@counts(20, 200)
def test_a_killed_writer_leaves_a_whole_entry_and_nothing_that_a_sweep_does_not_remove(count, tmp_path):
    found = processes(tmp_path, "killed", count)
    assert found["unreadable"] == 0
    parts = [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
    assert len(parts) == found["left"]
    assert count < 200 or parts, "no writer was killed while it wrote"
    cache = PersistentCache(tmp_path, cfg_type=list)
    assert cache.sweep() == 0  # they may still be written to
    for path in parts:
        os.utime(path, (0, time.time() - 3601))
    assert cache.sweep() == len(parts)
    assert len(os.listdir(tmp_path)) == 1
    assert len(cache.get("key")) > 1


def test_the_first_write_of_a_process_sweeps_what_killed_ones_left(tmp_path):
    old, young = tmp_path / f".tmp-{'0' * 16}", tmp_path / f".tmp-{'1' * 16}"
    for path in (old, young, tmp_path / ".tmp-of-another-program"):
        path.write_text("half")
    os.utime(old, (0, time.time() - 3601))
    os.utime(tmp_path / ".tmp-of-another-program", (0, 0))
    PersistentCache(tmp_path).put("key", 3)
    assert not old.exists()
    assert young.exists()
    assert (tmp_path / ".tmp-of-another-program").exists()
