"""Tuning on a GPU: device time, poisoned outputs, lost devices, full memory, Triton lowered in processes."""

import statistics
import time

import jax
import jax.numpy as jnp
import pytest

import ejkernel_ops as ek
from ejkernel_ops.execution import lowering
from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.measure import interleaved
from ejkernel_ops.kernels import LINEAR

from .triton_scale import SCALE, ScaleConfig

pytestmark = pytest.mark.gpu
X = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)


@pytest.fixture
def triton():
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton")


def statuses(bench, *configs):
    return [(trial.status, trial.reason) for trial in bench.check(configs)]


def test_device_time_does_not_count_dispatch_and_a_folded_program_agrees():
    inv = ek.Invocation(LINEAR, (jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16),) * 2)
    bench, cfg = Bench(inv), LINEAR.heuristic_cfg(inv)
    assert statuses(bench, cfg) == [("timed", "")]
    device = bench.sample([cfg, cfg], 20)
    assert bench.notes == []
    device_ms = [statistics.median(times) for times in device]
    assert device_ms[0] == pytest.approx(device_ms[1], rel=0.05)
    wall_ms = statistics.median(interleaved([bench._runs[cfg]], 20)[0])
    bench._on_device = False
    folded_ms = statistics.median(bench.sample([cfg], 20)[0])
    print(f"device {device_ms[0]:.4f} ms, folded {folded_ms:.4f} ms, wall clock {wall_ms:.4f} ms")
    assert device_ms[0] < folded_ms < wall_ms


def test_operands_are_cold():
    bench = Bench(ek.Invocation(SCALE, (X,)))
    assert len(bench._sets) == 65
    pointers = {bench._sets[i][0].unsafe_buffer_pointer() for i in range(65)}
    assert len(pointers) == 65


def test_what_a_kernel_does_not_write_is_found(triton):
    bench = Bench(ek.Invocation(SCALE, (X,)))
    right, half = statuses(bench, ScaleConfig(), ScaleConfig(kind="half"))
    assert right == ("timed", "")
    assert half[0] == "wrong"


def test_triton_is_lowered_in_processes_and_times_the_same(triton, monkeypatch):
    inv = ek.Invocation(SCALE, (X,))
    configs = SCALE.candidate_cfgs(inv)
    monkeypatch.setattr(lowering, "_FEWEST", 2)
    start = time.perf_counter()
    assert statuses(Bench(inv), *configs) == [("timed", "")] * len(configs)
    in_processes = time.perf_counter() - start
    monkeypatch.setattr(lowering, "_FEWEST", 99)  # threads
    start = time.perf_counter()
    assert statuses(Bench(inv), *configs) == [("timed", "")] * len(configs)
    print(f"lowered {len(configs)} in processes: {in_processes:.2f} s, in threads: {time.perf_counter() - start:.2f} s")


def test_a_lost_device_costs_a_child_and_no_more(triton):
    wild = [ScaleConfig(block=2**n, kind="elsewhere") for n in range(7, 10)]
    good = [ScaleConfig(block=2**n) for n in range(7, 10)]
    mixed = [cfg for pair in zip(wild, good) for cfg in pair]
    tuned = ek.Autotuner(num_iters=2, isolate=True).tune(ek.Invocation(SCALE, (X,)), mixed)
    status = {trial.cfg: trial.status for trial in tuned.trials}
    assert [status[cfg] for cfg in wild] == ["crashed"] * 3
    assert [status[cfg] for cfg in good] == ["timed"] * 3
    assert int(jnp.ones(()) + 1) == 2


def test_full_memory_is_a_reason():
    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    used = jax.devices()[0].memory_stats()["bytes_in_use"]
    held = jnp.zeros((limit - used - (400 << 20)) // 4)
    held.block_until_ready()
    q = jax.ShapeDtypeStruct((4, 4096, 16, 64), jnp.bfloat16)
    lowered = jax.jit(lambda q: ek.flash_attention(q, q, q, causal=True)).lower(q)
    result = ek.autotune_lowered(ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=2)), lowered)
    failed = [t.status for e in result.entries for t in e.trials if t.status != "timed"]
    print("with 400 MiB of the memory left:", failed, result.skipped)
    assert "out_of_memory" in failed or any("RESOURCE_EXHAUSTED" in reason for _, reason in result.skipped)
    del held
