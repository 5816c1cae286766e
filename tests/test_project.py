"""The project as a newcomer meets it: imports, an example."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(*arguments, cwd=ROOT, **env):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"} | env,
    )  # fmt: skip


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


def test_no_kernel_tunes_itself_when_it_is_launched():
    files = [*(ROOT / "ejkernel_ops").rglob("*.py"), *(ROOT / "ejlayers").rglob("*.py")]
    assert files
    assert [path for path in files if "triton.autotune" in path.read_text()] == []
