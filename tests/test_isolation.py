"""Candidates in a child process: crashes, hangs and lost devices cost a child, and are reasons."""

import os
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
from ejkernel_ops.execution import lowering
from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.isolation import IsolatedBench
from ejkernel_ops.kernels import LINEAR
from ejkernel_ops.registry import find_call

from .wild import WHEN_TRACED, WILD, WildConfig

pytestmark = pytest.mark.once

X = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)
CALL = ek.Invocation(WILD, (X,))


def tune(candidates, inv=CALL, timeout=60.0, **options):
    tuner = ek.Autotuner(num_iters=1, isolate=True, trial_timeout_s=timeout, budget_s=None, max_compiles=99, **options)
    return tuner.tune(inv, candidates)


def children():
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "ejkernel_ops.execution.child" in line]


def test_thirty_crashes_of_every_kind_are_reasons():
    wild = [WildConfig(kind, index=i) for kind in ("abort", "exit", "kill") for i in range(10)]
    tuned = tune([*wild, WildConfig()])
    crashed = [trial for trial in tuned.trials if trial.status == "crashed"]
    assert [trial.cfg for trial in crashed] == wild
    assert [trial.reason for trial in crashed[::10]] == ["killed by SIGABRT", "exit code 139", "killed by SIGKILL"]
    assert tuned.cfg == WildConfig()
    assert children() == []
    assert int(jnp.ones(()) + 1) == 2


def test_ten_hangs_end_in_time_and_leave_no_process():
    start = time.monotonic()
    wild = [WildConfig(kind, index=i) for kind in ("hang", "run_hang") for i in range(5)]
    tuned = tune(wild, timeout=2.0)
    assert time.monotonic() - start < 60  # ten times two seconds, and on two cores ten starts beside other tests
    assert [trial.status for trial in tuned.trials] == ["timed", *["timed_out"] * 10]
    assert tuned.trials[1].reason == "no answer within 2 s; killed"
    assert not tuned.compared
    assert children() == []


def test_a_lost_device_costs_the_child_and_the_next_trial_is_good():
    tuned = tune([WildConfig("run_lost"), WildConfig(), WildConfig("run_kill")])
    assert [trial.status for trial in tuned.trials] == ["timed", "crashed", "timed", "crashed"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in tuned.trials[1].reason
    assert tuned.cfg == WildConfig()


def test_a_lost_device_ends_tuning_in_this_process_and_stores_nothing(monkeypatch):
    with pytest.raises(ek.TuningError, match=r"lost the device.*Restart this process; Autotuner\(isolate=True\)"):
        ek.Autotuner(num_iters=1).tune(CALL, [WildConfig("run_lost")])
    chain = ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))
    lowered = jax.jit(lambda x: LINEAR(WILD(x), x.T)).lower(X)
    monkeypatch.setattr(type(WILD), "candidate_cfgs", lambda self, inv: [WildConfig("run_lost")])
    with pytest.raises(ek.TuningError, match="lost the device"):
        ek.autotune_lowered(chain, lowered)
    assert WILD.op_id_v not in {key.op_id_v for key in chain.cache.keys()}


def test_numbers_are_checked_in_the_child_on_given_operands_too():
    bench = IsolatedBench(
        ek.Invocation(LINEAR, (jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16))),
        [jnp.ones((4, 3), jnp.bfloat16), jnp.full((3, 2), 2.0, jnp.bfloat16)],
    )
    cfg = LINEAR.heuristic_cfg(bench.inv)
    assert [t.status for t in bench.check([cfg, ek.LinearConfig(backend="cudnn")])] == ["timed", "illegal"]
    assert len(bench.sample([cfg, cfg], 4)[1]) == 4
    assert bench.verify(cfg) is None
    bench.close()
    assert children() == []


def test_backward_calls_are_tuned_in_a_child_as_well():
    jax.jit(jax.grad(lambda w: ek.linear(X, w, activation="silu").sum())).lower(jnp.ones((3, 2)))
    keys = [ek.Key(ek.device_fingerprint(), "linear_bwd@v1", key) for key in ek.get_invocations()["linear_bwd@v1"]]
    inv = next(inv for inv in map(find_call, keys) if inv.operands[0].shape == (5, 3))
    assert tune(None, inv).ms > 0


def test_what_dies_when_it_is_timed_is_found_and_the_others_go_on():
    bench = IsolatedBench(CALL)
    good, dead = WildConfig(), WildConfig("run_kill")
    list(bench.check([good]))
    times = bench.sample([good, dead], 3)
    bench.close()
    assert len(times[0]) == 3
    assert np.isinf(times[1]).all()
    assert [(trial.cfg, trial.status) for trial in bench.lost] == [(dead, "crashed")]


def test_what_raises_when_it_is_timed_has_no_time_and_the_others_go_on():
    tuned = tune([WildConfig("run_late"), WildConfig()])
    found = {trial.cfg.kind: trial for trial in tuned.trials[1:]}
    assert found["run_late"].status == "run_failed"
    assert found["run_late"].reason.startswith("when it was timed: ")
    assert found["run_late"].ms is None
    assert tuned.cfg == WildConfig()


def test_kernels_that_cannot_be_imported_are_refused_with_advice():
    class Local(type(WILD)):
        name = "local_test"

    with pytest.raises(ek.TuningError, match=r"Local is defined in a function: move it into a module"):
        tune(None, ek.Invocation(Local(), (X,)))
    assert children() == []


def test_a_call_that_kills_its_child_is_an_error_and_not_a_crash(monkeypatch):
    monkeypatch.setattr(type(WILD), "heuristic_cfg", lambda self, inv: WildConfig("exit"))
    with pytest.raises(ek.TuningError, match=r"heuristic config of .* does not run.*exit code 139"):
        tune([])


def test_lowering_in_processes_gives_the_same_programs_and_reasons(monkeypatch):
    monkeypatch.setattr(lowering, "BACKENDS", ("xla",))
    monkeypatch.setattr("ejkernel_ops.execution.bench.BACKENDS", ("xla",))
    monkeypatch.setattr(lowering, "_FEWEST", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    inv = ek.Invocation(LINEAR, (jnp.ones((600, 3)), jnp.ones((3, 2))))
    bench, configs = Bench(inv), list(LINEAR.candidate_cfgs(inv))
    assert [trial.status for trial in bench.check(configs)] == ["timed"] * len(configs) == ["timed"] * 2
    assert bench.verify(configs[1]) is None
    assert children() == []
    monkeypatch.setattr(type(LINEAR), "illegal", lambda self, inv, cfg: None)
    [*_, failed] = Bench(inv).check([*configs, ek.LinearConfig(backend="xla")])  # without a tile
    assert failed.status == "compile_failed"
    assert "AttributeError" in failed.reason
    assert set(WHEN_TRACED) == {"abort", "exit", "kill", "hang"}


def test_a_pool_that_cannot_make_the_call_costs_no_config(monkeypatch):
    monkeypatch.setattr(lowering, "BACKENDS", ("xla",))
    monkeypatch.setattr("ejkernel_ops.execution.bench.BACKENDS", ("xla",))
    monkeypatch.setattr(lowering, "_FEWEST", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(type(LINEAR), "state", lambda self: "another kernel than a new process makes")
    inv = ek.Invocation(LINEAR, (jnp.ones((600, 3)), jnp.ones((3, 2))))
    assert [trial.status for trial in Bench(inv).check(list(LINEAR.candidate_cfgs(inv)))] == ["timed"] * 2
    with pytest.raises(ek.TuningError, match="has another key here"):
        tune(None, inv)


def test_typed_keys_cannot_be_handed_over():
    inv = ek.Invocation(WILD, (jax.random.key(0),))
    with pytest.raises(ek.TuningError, match=r"operands of type key<fry>; leave inputs or isolate out"):
        IsolatedBench(inv, [jax.random.key(0)])


def test_an_interrupt_leaves_no_child(monkeypatch):
    def interrupted(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ejkernel_ops.execution.isolation.Child.ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        IsolatedBench(CALL)
    assert children() == []
