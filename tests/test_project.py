"""The project as a newcomer meets it: README, examples, imports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def python(*arguments, cwd=ROOT, **env):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"} | env,
    )  # fmt: skip


def test_readme_code_runs(tmp_path):
    assert README_BLOCKS
    done = python("-c", "\n".join(README_BLOCKS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_touches_no_file_no_environment_no_device_and_no_framework():
    code = (
        "import os, sys, jax; before = dict(os.environ); writes = []\n"
        "sys.addaudithook(lambda e, a: writes.append(a[0]) if e in ('os.mkdir', 'os.remove', 'os.rename') or"
        " (e == 'open' and isinstance(a[1], str) and set(a[1]) & set('wax+')) else None)\n"
        "import ejkernel_ops, ejlayers\n"
        "assert dict(os.environ) == before and not writes, writes\n"
        "assert not {'flax', 'equinox', 'triton', 'jax_triton', 'matplotlib', 'typer'} & set(sys.modules)\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    done = python("-B", "-c", code, HOME="/proc/none", XDG_CACHE_HOME="/proc/none")
    assert done.returncode == 0, done.stderr


def test_docs_code_runs(tmp_path):
    for page in ("own_kernel.md", "forms.md", "ops.md", "sharing.md", "caches.md", "several_devices.md"):
        code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL))
        done = python("-c", code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_tests_that_the_docs_name_exist(page):
    file = ""
    for named, test in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", page.read_text()):
        file = named or file
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{page.name} names {file}::{test}"


def test_no_kernel_tunes_itself_when_it_is_launched():
    files = [*(ROOT / "ejkernel_ops").rglob("*.py"), *(ROOT / "ejlayers").rglob("*.py")]
    assert files
    assert [path for path in files if "triton.autotune" in path.read_text()] == []
