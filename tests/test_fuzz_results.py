"""A result from somebody else, whatever is in it, is loaded or refused: it opens, imports, starts and runs nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .fuzzed import counts

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent


@counts(200, 1000)
def test_loading_a_damaged_or_forged_result_opens_no_file_imports_nothing_and_starts_nothing(count):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/loaded_results.py", str(count)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("seen") == []
    assert sum(found.values()) == count
    assert found["refused"] > count // 2
    assert found["loaded"] > count // 100
