"""What XLA compiles for two and for four H100s: Triton on each one's part, nothing gathered but four numbers a token.

It needs XLA's compiler for GPUs but no GPU: `pip install --no-deps jax-cuda13-pjrt` of jax's version (0.4 GB).
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .compile_for_h100s import CASES

TESTS = Path(__file__).parent
HAS_COMPILER = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs jax-cuda13-pjrt")
MOVES = {  # collectives of an op's gradient on two and on four
    "attention": {},
    "attention, one key head": {"all-reduce"},
    "ring attention": {"collective-permute"},
    "rms_norm": {"all-reduce"},
    "linear": {"all-reduce"},
    "mlp": {"all-reduce"},
    "gated_linear": {"all-reduce"},
    "rotary_embedding": {},
    "cross-entropy": {"all-reduce", "all-gather"},
}
ON_TRITON = {"attention", "attention, one key head", "ring attention", "rms_norm", "linear", "mlp", "cross-entropy"}


@functools.cache
def compiled(count):
    done = subprocess.run(
        [sys.executable, str(TESTS / "compile_for_h100s.py"), str(count)], capture_output=True, text=True, timeout=900,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path]), "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [2, 4])
def test_each_gpu_has_its_part(count, case):
    found = compiled(count)[case]
    assert set(found["collectives"]) <= set(MOVES[case])
    assert found["collectives"].get("all-gather", 0) <= 1
    assert (found["triton"] > 0) == (case in ON_TRITON)
