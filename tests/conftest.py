"""Every test runs on eight CPU devices, with caches in a folder of its own and nothing left behind."""

import importlib
import importlib.metadata
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

_CACHE = tempfile.TemporaryDirectory(prefix="ejkernel-tests-")
os.environ["EJKERNEL_CACHE_DIR"] = _CACHE.name
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests already fill the cores
_ON_GPU = os.environ.get("EJKERNEL_TEST_GPU") == "1"
if not _ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling is most of the time of the tests: what LLVM could make of a program does not matter for them.
    flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jax").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")  # later ones have no other
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import jax
import pytest

import ejkernel_ops


@pytest.fixture(autouse=True)
def exact_products(request):
    """On a GPU products of float32 as exact as on a CPU, where a test does not say that it is about GPUs."""
    with jax.default_matmul_precision("highest") if _ON_GPU and "gpu" not in request.keywords else nullcontext():
        yield


@pytest.fixture(autouse=True)
def own_selector():
    """A default selector without memory of other tests."""
    before = ejkernel_ops.set_default_selector(ejkernel_ops.ConfigSelectorChain())
    yield
    ejkernel_ops.set_default_selector(before)


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of the benchmarks as it is when it runs: beside the others of its folder."""
    folder = Path(__file__).parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (folder / f"{name}.py").exists():
            del sys.modules[name]


def pytest_collection_modifyitems(config, items):
    """GPU tests run where `EJKERNEL_TEST_GPU=1` says that there is one, those of what a CPU chooses elsewhere.

    The compilation of every candidate is asked for with `-m kernels`, the full counts of fuzz tests with `-m fuzz`.
    """
    skipped = {"cpu": "is about CPUs"} if _ON_GPU else {"gpu": "needs a GPU: set EJKERNEL_TEST_GPU=1"}
    for name, reason in {
        "kernels": "compiles for minutes: make kernels",
        "fuzz": "tries for minutes: make fuzz",
    }.items():
        if name not in config.getoption("markexpr"):
            skipped[name] = reason
    for item in items:
        for name in skipped:
            if name in item.keywords:
                item.add_marker(pytest.mark.skip(reason=skipped[name]))


# Shared by tests; none themselves.
collect_ignore = [
    "attention_cases.py", "cache_processes.py", "compile_for_h100s.py", "compiled.py", "fakes.py", "fuzzed.py",
    "loaded_results.py", "nnx_models.py", "ops.py", "pages.py", "partitioned_blocks.py", "process_of_two.py",
    "reference.py", "release_check.py",
    "told.py", "train_of_two.py", "triton_kernels.py", "triton_scale.py", "two_processes.py", "wild.py",
]  # fmt: skip
