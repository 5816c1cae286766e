"""What becomes of candidates: failures are data with a reason, searches stay small, and nothing is kept alive."""

import gc
import json
import logging
import threading
import time
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
from ejkernel_ops.execution import bench as benches
from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.failures import failed, lost_device
from ejkernel_ops.execution.measure import NoDeviceTime
from ejkernel_ops.execution.trial import STATUSES
from ejkernel_ops.kernels import LINEAR

pytestmark = pytest.mark.once

X = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)
SHARED = "INTERNAL: Requested shared memory size 262144 exceeds the limit of 232448"
MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.02GiB"

ERRORS = ValueError("no such tile"), RuntimeError(SHARED), RuntimeError(MEMORY), MemoryError(), KeyError("k")


class Many(ek.Kernel[int, jax.Array]):
    """Candidates 0 to 9 raise or are illegal, 10 to 19 are fine."""

    name = "candidates_test"
    only_bad = False

    def heuristic_cfg(self, inv):
        return 99

    def candidate_cfgs(self, inv):
        return range(10 if self.only_bad else 20)

    def illegal(self, inv, cfg):
        return f"{cfg} needs more shared memory than there is" if 5 <= cfg < 10 else None

    def run(self, x, *, cfg):
        if cfg < 5:
            raise ERRORS[cfg]
        return x * 2


MANY = Many()
CALL = ek.Invocation(MANY, (X,))


def tune(**options):
    return ek.Autotuner(num_iters=1, **options).tune(CALL)


def test_each_failure_has_its_kind_and_reason_and_the_rest_is_timed():
    tuned = tune()
    found = {trial.cfg: trial for trial in tuned.trials}
    kinds = ["compile_failed", "out_of_shared_memory", "out_of_memory", "out_of_memory", "compile_failed"]
    assert [found[cfg].status for cfg in range(10)] == [*kinds, *["illegal"] * 5]
    assert [found[cfg].status for cfg in range(10, 20)] == ["timed"] * 10
    assert found[0].reason == "ValueError: no such tile"
    assert found[7].reason == "7 needs more shared memory than there is"
    assert all(trial.reason and trial.ms is None for trial in tuned.trials if trial.status != "timed")
    assert {trial.status for trial in tuned.trials} <= set(STATUSES)


def test_failures_survive_the_file_of_a_result():
    chain = ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))
    result = ek.autotune_lowered(chain, jax.jit(lambda x: MANY(x)).lower(X))
    [entry] = ek.AutotuningResult.loads(result.dumps()).entries
    assert entry.trials == result.entries[0].trials
    stored = json.loads(result.dumps())["entries"][0]["trials"]
    assert {"config": 1, "status": "out_of_shared_memory", "ms": None, "spread": None} == {
        name: value for name, value in stored[2].items() if name != "reason"
    }
    assert chain.stats["trial illegal"] == 5
    assert chain.stats["trial timed"] == 11
    assert chain.stats["tunings"] == 1
    assert "10 of" in str(result) or "5 of" in str(result)


def test_where_all_fail_the_heuristic_stays_with_one_warning_and_nothing_is_stored(monkeypatch, tmp_path):
    monkeypatch.setattr(Many, "only_bad", True)
    chain = ek.ConfigSelectorChain(
        tuner=ek.Autotuner(num_iters=1), persistent=ek.PersistentCache(tmp_path), autotune=False
    )
    lowered = jax.jit(lambda x: MANY(MANY(x)[:2]) + MANY(x[:2])).lower(X)
    with pytest.warns(UserWarning, match="2 of 2 calls keep their heuristic config.*candidates_test@v1") as caught:
        result = ek.autotune_lowered(chain, lowered)
    assert len(caught) == 1
    assert {(entry.cfg, entry.source) for entry in result.entries} == {(99, "heuristic")}
    assert chain.cache.items() == list(tmp_path.iterdir()) == []


def test_where_the_heuristic_fails_too_the_error_lists_all(monkeypatch):
    monkeypatch.setattr(Many, "only_bad", True)
    monkeypatch.setattr(Bench, "_checked", lambda self, cfg, warmup: failed(cfg, "run_failed", ValueError(f"no {cfg}")))
    with pytest.raises(ek.TuningError, match=r"99: ValueError: no 99; 0: ValueError: no such tile; 1: .*9 needs more"):
        tune()


def test_no_more_than_max_compiles_are_compiled(monkeypatch):
    compiled = []
    begin = Bench._begin
    monkeypatch.setattr(Bench, "_begin", lambda self, cfg, *rest: compiled.append(cfg) or begin(self, cfg, *rest))
    tuned = tune(max_compiles=8)
    assert sorted(compiled) == [0, 1, 2, 3, 4, 10, 11, 99]  # illegal ones cost no compile
    left = [trial for trial in tuned.trials if trial.status == "not_tried"]
    assert [trial.cfg for trial in left] == list(range(12, 20))
    assert left[0].reason == "max_compiles=8 more promising ones were"
    compiled.clear()
    monkeypatch.setattr(Many, "candidate_cfgs", lambda self, inv: range(10, 60))
    tune()
    assert len(compiled) == 24


def test_hints_are_compiled_before_what_costs_more(monkeypatch):
    monkeypatch.setattr(Many, "cost", lambda self, inv, cfg: -cfg)
    tuned = ek.Autotuner(num_iters=1, max_compiles=3).tune(CALL, hints=[12])
    assert [trial.cfg for trial in tuned.trials if trial.status == "timed"] == [99, 12, 19]


def test_a_broken_rule_is_a_reason_and_not_an_error(monkeypatch):
    monkeypatch.setattr(Many, "illegal", lambda self, inv, cfg: 1 / 0 if cfg == 12 else None)
    [trial] = [trial for trial in tune().trials if trial.cfg == 12]
    assert trial.reason == "candidates_test@v1.illegal raised ZeroDivisionError: division by zero"


def test_time_that_is_over_leaves_the_rest_untried(monkeypatch):
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr("ejkernel_ops.execution.tuning.time.monotonic", lambda: next(now))
    monkeypatch.setattr(Bench, "sample", lambda self, configs, rounds, deadline: [[1.0] * rounds for _ in configs])
    tuned = tune(budget_s=50.0)
    assert [trial.reason for trial in tuned.trials if trial.status == "not_tried"] != []
    assert tuned.cfg == 99


def test_a_busy_device_is_noted_in_the_result(monkeypatch):
    def sample(self, configs, rounds, deadline):
        return [[1.0 + (i % 2) for i in range(rounds)] for _ in configs]

    monkeypatch.setattr(Bench, "sample", sample)
    chain = ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=4))
    result = ek.autotune_lowered(chain, jax.jit(lambda x: MANY(x)).lower(X))
    assert result.notes == (
        "candidates_test@v1 float32[5,3]: the device was busy: times spread by 33%; tune again when it is not",
    )
    assert result.notes[0] in str(result)


def test_no_array_outlives_its_trial():
    class Big(ek.Kernel[int, jax.Array]):
        def heuristic_cfg(self, inv):
            return 0

        def candidate_cfgs(self, inv):
            return range(50)

        def run(self, x, *, cfg):
            def host(x):
                if cfg % 2:
                    raise ValueError(f"candidate {cfg}")
                return x

            return jax.pure_callback(host, x, x) + 1.0

    logging.disable(logging.CRITICAL)  # pytest keeps what is logged, tracebacks and arrays with it
    inv = ek.Invocation(Big("big_test"), (jax.ShapeDtypeStruct((1 << 20,), jnp.float32),))
    bench = Bench(inv)
    gc.collect()
    before = len(jax.live_arrays())
    trials = []
    for cfg in range(50):
        trials += bench.check([cfg], warmup=0)
        bench._runs.clear()
    gc.collect()
    logging.disable(logging.NOTSET)
    assert abs(len(jax.live_arrays()) - before) <= 1
    assert [trial.status for trial in trials] == ["timed", "run_failed"] * 25
    assert all(type(trial.reason) is str for trial in trials)
    bench.close()
    gc.collect()
    assert len(jax.live_arrays()) < before


def test_errors_keep_no_arrays_alive(monkeypatch):
    monkeypatch.setattr(Many, "make_inputs", lambda self, inv, rng: [jnp.ones((5, 3)), 1 / 0])
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ek.TuningError) as caught:
        tune()
    gc.collect()
    assert caught.value.__context__ is None
    assert len(jax.live_arrays()) <= before


@pytest.mark.parametrize(
    "text",
    ["CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", "INTERNAL: CUDA_ERROR_LAUNCH_FAILED",
     "CUDA_ERROR_MISALIGNED_ADDRESS", "device-side assert triggered"],
)  # fmt: skip
def test_errors_that_end_a_device_are_known(text):
    assert lost_device(f"INTERNAL: Failed to launch: {text}")
    assert not lost_device(MEMORY)
    assert not lost_device(SHARED)


class Late(ek.Kernel[int, jax.Array]):
    """Config 1 fails when it has run `limit` times, 2 is lost then, 99 is the heuristic."""

    name = "late_test"
    default, limit = 99, 2  # a check and a warm-up
    runs: ClassVar[dict] = {}

    def heuristic_cfg(self, inv):
        return self.default

    def candidate_cfgs(self, inv):
        return 1, 3

    def run(self, x, *, cfg):
        def host(x):
            self.runs[cfg] = self.runs.get(cfg, 0) + 1
            if cfg in (1, 2) and self.runs[cfg] > self.limit:
                raise ValueError("CUDA_ERROR_LAUNCH_FAILED" if cfg == 2 else "too late")
            time.sleep(0.002 if cfg == 99 else 0.0)
            return x

        return jax.pure_callback(host, x, x) + 1.0


LATE = Late()


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(Late, "runs", {})
    return ek.Invocation(LATE, (X,))


def test_what_fails_when_it_is_timed_is_a_reason_and_the_rest_goes_on(late):
    tuned = ek.Autotuner(num_iters=3).tune(late)
    found = {trial.cfg: trial for trial in tuned.trials}
    assert [found[cfg].status for cfg in (99, 1, 3)] == ["timed", "run_failed", "timed"]
    assert found[1].reason.startswith("when it was timed: ")
    assert found[1].ms is None
    assert found[3].ms is not None
    assert "Infinity" not in json.dumps([trial.ms for trial in tuned.trials])


def test_a_heuristic_that_fails_when_it_is_timed_is_an_error(late, monkeypatch):
    monkeypatch.setattr(Late, "default", 1)
    monkeypatch.setattr(Late, "limit", 4)  # and the two of the reference
    with pytest.raises(ek.TuningError, match=r"heuristic config of .* failed: when it was timed"):
        ek.Autotuner(num_iters=3).tune(late)


def test_a_device_that_is_lost_when_it_is_timed_ends_tuning(late):
    with pytest.raises(ek.TuningError, match="lost the device"):
        ek.Autotuner(num_iters=3).tune(late, [2])


def test_a_device_that_is_lost_at_odd_lengths_ends_tuning(monkeypatch):
    def run(self, x, *, cfg):
        def host(x):
            if cfg == 10 and len(x) == 3:
                raise ValueError("CUDA_ERROR_ILLEGAL_ADDRESS")
            return x

        return jax.pure_callback(host, x, x) + 1.0

    monkeypatch.setattr(Many, "run", run)
    monkeypatch.setattr(Many, "rows", (True,))
    bench = Bench(CALL)
    assert [trial.status for trial in bench.check([10, 11])] == ["timed"] * 2
    assert bench.verify(11) is None
    with pytest.raises(ek.TuningError, match="lost the device"):
        bench.verify(10)


def test_candidates_are_compiled_under_the_settings_of_the_thread_that_tunes():
    class Wide(ek.Kernel):
        seen: ClassVar[list] = []

        def run(self, x, *, cfg):
            self.seen.append(jax.config.jax_default_matmul_precision)
            return x * 2

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return 2, 3

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        inv = ek.Invocation(Wide("settings_test"), (jax.ShapeDtypeStruct((4, 3), jnp.float64),))
        tuned = ek.Autotuner(num_iters=1).tune(inv)
    assert [trial.status for trial in tuned.trials] == ["timed"] * 3
    assert set(Wide.seen) == {"highest"}


def test_operands_over_several_devices_can_be_tuned():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, w = jax.device_put(jnp.ones((512, 4)), sharding), jax.device_put(jnp.ones((4, 2)), everywhere)
    assert ek.autotune(LINEAR, x, w, num_iters=1).backend == "xla"


def test_a_listener_that_raises_leaves_no_thread_or_process():
    def on_event(event, **data):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ek.Autotuner(num_iters=1).tune(CALL, on_event=on_event)
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


def test_times_so_far_are_told():
    told = []
    ek.Autotuner(num_iters=1).tune(CALL, on_event=lambda event, **data: told.append((event, data)))
    best = [data["best_ms"] for event, data in told if event == "sampled"]
    assert len(best) >= 2
    assert best == sorted(best, reverse=True)


BAD = {"budget_s": 0.0}, {"budget_s": float("nan")}, {"trial_timeout_s": -1.0}, {"max_compiles": 0}


@pytest.mark.parametrize("option", BAD)
def test_options_that_make_no_sense_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} is .*; expected"):
        ek.Autotuner(**option)


# Clocks other than a CPU's


@pytest.fixture
def on_gpu(monkeypatch):
    """The bench of a GPU without a profiler, on this CPU."""
    monkeypatch.setattr(benches, "platform_kind", lambda platform: "gpu")


def test_operands_are_rotated_and_short_calls_folded_where_there_is_no_profiler(on_gpu):
    bench = Bench(CALL)
    assert len(bench._sets) == 65
    assert [trial.status for trial in bench.check([99, 10])] == ["timed"] * 2
    turn = bench._turn
    times = bench.sample([99, 10], 6)
    assert [len(each) for each in times] == [6, 6]
    assert bench._turn > turn
    assert len(bench.notes) == 1
    assert bench.notes[0].startswith("timed by the wall clock: ")
    assert set(bench._folded) == {99, 10}
    np.testing.assert_allclose(bench._folded[99]()[3][0], X * 0 + 2 * bench._sets[3][0])
    assert len(bench._folded[99]()) == 16


def test_a_record_that_does_not_fit_is_not_believed(on_gpu, monkeypatch):
    def measure(session, aggregate):
        return lambda: (session(), [("popcnt_fusion", 0.001), ("mine", 1.0)])

    monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", measure)
    with pytest.raises(NoDeviceTime, match="1 runs were recorded, 2 expected"):
        benches.device_times([lambda: X, lambda: X], 1)


def test_device_times_are_sums_of_the_kernels_between_markers(monkeypatch):
    log = []

    def measure(session, aggregate):
        def measured():
            session()  # the warm-up
            log.clear()
            session()
            return None, list(log)

        return measured

    def run(*kernels):
        def launch():
            log.extend(kernels)
            return X

        return launch

    monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", measure)
    monkeypatch.setattr("ejkernel_ops.execution.measure._mark", lambda x: log.append(("wrapped_popcnt", 0.001)))
    runs = [run(("a", 1.0), ("memcpy32_post", 0.5)), run(("b", 2.0), ("c", 3.0))]
    assert benches.device_times(runs, 7) == [[1.5] * 7, [5.0] * 7]


def test_sound_tuning_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tune().cfg in {99, *range(10, 20)}
