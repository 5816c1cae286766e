"""Tuning: the fastest right config wins, whatever the others do; `autotune_lowered` needs `lower()` alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.check import Reference, program
from ejkernel_ops.kernels import LINEAR
from ejkernel_ops.registry import find_call

from . import fakes
from .fakes import FAKE, WRONG, FakeConfig

SLOW = FakeConfig(ms=15.0)  # far from the rest: other processes may be busy
X = jnp.linspace(-2.0, 2.0, 21).reshape(7, 3)


@pytest.fixture
def candidates(monkeypatch):
    def use(*configs, default=SLOW):
        monkeypatch.setattr(fakes.Fake, "candidates", configs)
        monkeypatch.setattr(fakes.Fake, "default", default)

    return use


def tuner():
    return ek.Autotuner(num_iters=3)


def tune(on_event=None):
    return tuner().tune(ek.Invocation(FAKE, (X,)), on_event=on_event)


def test_fastest_right_candidate_wins(candidates):
    candidates(FakeConfig(ms=1.0), FakeConfig(ms=25.0))
    tuned = tune()
    assert tuned.cfg == FakeConfig(ms=1.0)
    assert tuned.ms < tuned.heuristic_ms
    assert [t.status for t in tuned.trials] == ["timed"] * 3


@pytest.mark.parametrize("kind", WRONG)
def test_fast_but_wrong_candidate_never_wins(candidates, kind):
    candidates(FakeConfig(kind, ms=0.0), FakeConfig(ms=1.0))
    tuned = tune()
    assert tuned.cfg == FakeConfig(ms=1.0)
    [wrong] = [t for t in tuned.trials if t.status == "wrong"]
    assert wrong.cfg.kind == kind
    assert "output 0" in wrong.reason


def test_bfloat16_results_may_round_the_other_way_but_not_be_wrong():
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (32, 16))]
    jax.jit(ek.linear).lower(*like)
    [inv] = [i for i in map(find_call, recorded("linear@v1")) if [x.shape for x in i.operands] == [(64, 32), (32, 16)]]
    inputs = LINEAR.make_inputs(inv, np.random.default_rng(0))
    reference = Reference(inv, inputs)
    [out] = jax.jit(program(inv, LINEAR.heuristic_cfg(inv)))(*inputs)
    assert reference.exact[0].dtype == np.float32
    assert np.abs(reference.plain[0] - reference.exact[0]).max() > 0  # the reference is not rounded itself
    exact, right = reference.exact[0], np.asarray(out.astype(jnp.float32))
    other = np.where(right > exact, right - 2.0 ** (np.floor(np.log2(np.abs(right))) - 7), right)  # the neighbour below
    close = np.abs(other - exact) < 1.2 * np.abs(right - exact)
    assert reference.fault([jnp.asarray(np.where(close, other, right)).astype(jnp.bfloat16)]) is None
    assert reference.fault([(out * 1.03).astype(jnp.bfloat16)]) is not None


def recorded(op_id_v):
    return [ek.Key(ek.device_fingerprint(), op_id_v, key) for key in ek.get_invocations()[op_id_v]]


def test_failures_are_reasons_and_do_not_stop_the_others(candidates):
    candidates(FakeConfig("fails"), FakeConfig("crashes"), FakeConfig(ms=0.5))
    tuned = tune()
    failed = {t.cfg.kind: t for t in tuned.trials if t.status != "timed"}
    assert {kind: t.status for kind, t in failed.items()} == {"fails": "compile_failed", "crashes": "run_failed"}
    assert failed["fails"].reason == "ValueError: no such tile"
    assert "ZeroDivisionError" in failed["crashes"].reason
    assert tuned.cfg == FakeConfig(ms=0.5)


@pytest.mark.parametrize(("ms", "wins"), [(4.99, False), (4.91, False), (4.89, True), (5.5, False)])
def test_small_gain_is_a_tie_that_the_heuristic_wins(candidates, monkeypatch, ms, wins):
    default, other = FakeConfig(ms=0.0), FakeConfig("right", 0.1)
    candidates(other, default=default)
    times = (
        [5.0, 5.2, 5.0, 5.2, 5.0],
        [ms, ms * 1.04, ms, ms * 1.04, ms],
    )  # measured, not slept: a busy machine sleeps as it likes
    monkeypatch.setattr("ejkernel_ops.execution.bench.interleaved", lambda runs, *args: [list(t) for t in times])
    assert tune().cfg == (other if wins else default)


def test_unusable_heuristic_is_an_error_that_lists_reasons(candidates):
    candidates(FakeConfig("fails"), default=FakeConfig("fails", ms=1.0))
    with pytest.raises(ek.TuningError, match="no such tile"):
        tune()


def test_tuning_inside_a_trace_is_refused(candidates):
    candidates()
    with pytest.raises(ek.TuningError, match="inside a trace"):
        jax.jit(lambda x: (tune(), x)[1])(X)


def test_config_for_an_absent_back_end_is_illegal_with_its_reason():
    configs = [ek.LinearConfig(backend="cudnn")]
    tuned = tuner().tune(ek.Invocation(LINEAR, (jnp.ones((4, 3)), jnp.ones((3, 2)))), configs)
    [trial] = [t for t in tuned.trials if t.status == "illegal"]
    assert "no cudnn version" in trial.reason


def test_every_candidate_is_reported(candidates):
    candidates(FakeConfig("fails"), FakeConfig("zeros", ms=0.0))
    seen = []

    def on_event(event, **data):
        if event == "trial":
            seen.append((event, data["trial"].status, data["done"], data["total"]))

    tune(on_event)
    assert seen == [("trial", "timed", 1, 3), ("trial", "compile_failed", 2, 3), ("trial", "wrong", 3, 3)]


def test_budget_gives_the_best_so_far(candidates):
    candidates(*(FakeConfig(ms=1.0 + i) for i in range(9)), default=FakeConfig(ms=20.0))
    tuned = ek.Autotuner(num_iters=3, budget_s=0.05).tune(ek.Invocation(FAKE, (X,)))
    assert any("budget" in t.reason for t in tuned.trials)
    assert tuned.ms <= tuned.heuristic_ms


def test_autotune_returns_a_config_and_stores_nothing(candidates):
    candidates()
    best = ek.autotune(FAKE, X, configs=[FakeConfig(ms=0.1), FakeConfig("nan", ms=0.0)], num_warmup=1, num_iters=3)
    assert best == FakeConfig(ms=0.1)
    assert len(ek.default_selector().cache) == 0


def test_tuner_times_any_function():
    def make(ms):
        return lambda x: jax.pure_callback(lambda x: fakes._sleep(x, ms), x, x)

    assert tuner().autotune(make, (X,), {}, [50.0, 0.5, 30.0]) == 0.5
    with pytest.raises(ek.TuningError, match="no candidate"):
        tuner().autotune(lambda cfg: 1 / 0 if cfg else None, (X,), {}, [])


def test_benchmark_is_in_milliseconds():
    assert 2.0 <= ek.benchmark(lambda: fakes._sleep(X, 2.0), num_iters=3) < 50.0


# autotune_lowered


def loss(w, x):
    h = ek.linear(x, w, activation="silu")
    h = jax.lax.scan(lambda h, _: (ek.linear(h, w), None), h, length=3)[0]
    q = ek.linear(h, w).reshape(1, x.shape[0], 2, -1)
    return jnp.square(ek.flash_attention(q, q, q, causal=True)).sum()


W, ROWS = jnp.ones((8, 8)) / 8, jnp.ones((6, 8))


@pytest.fixture(scope="module")
def lowered():
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, ROWS)]
    return jax.jit(jax.grad(loss)).lower(*abstract)


def selector(**options):
    return ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1), **options)


def test_lower_alone_is_enough_and_each_distinct_call_is_tuned_once_with_its_count(lowered):
    result = ek.autotune_lowered(selector(), lowered)
    found = sorted((e.op_id_v, e.count, e.executions) for e in result.entries)
    assert found == [
        ("flash_attention@v1", 1, 1),
        ("flash_attention_bwd@v1", 1, 1),
        ("linear@v1", 1, 1),  # with the activation
        ("linear@v1", 2, 4),  # in the scan, and after it
        ("linear_bwd@v1", 1, 1),
        ("linear_bwd@v1", 2, 4),
    ]
    assert result.skipped == ()
    assert all(e.trials and e.ms and e.heuristic_ms for e in result.entries)
    assert sorted(f"ejkernel_ops#{e.op_id_v}:{e.call_key}" for e in result.entries) == sorted(
        ek.find_labels_in_lowered(lowered)
    )


def test_text_of_the_program_will_do(lowered):
    chain = selector()
    first = ek.autotune_lowered(chain, lowered)
    again = ek.autotune_lowered(chain, lowered.as_text())
    assert [e.cfg for e in again.entries] == [e.cfg for e in first.entries]
    assert {e.source for e in again.entries} == {"memory"}  # not tuned again


def test_winners_reach_the_disk_and_a_new_selector_finds_them(lowered, tmp_path):
    first = ek.autotune_lowered(selector(persistent=ek.PersistentCache(tmp_path)), lowered)
    again = ek.autotune_lowered(selector(persistent=ek.PersistentCache(tmp_path)), lowered)
    assert {e.source for e in again.entries} == {"disk"}
    assert again.digest == first.digest
    assert dict(ek.labels_to_configs(lowered, selector(persistent=ek.PersistentCache(tmp_path)))).keys()


@pytest.mark.filterwarnings("ignore:.*keep their heuristic")
def test_one_failing_op_does_not_stop_the_rest(candidates):
    candidates(default=FakeConfig("crashes"))
    lowered = jax.jit(lambda x, w: ek.linear(FAKE(x), w)).lower(X, jnp.ones((3, 2)))
    result = ek.autotune_lowered(selector(), lowered)
    assert [e.op_id_v for e in result.entries] == ["linear@v1"]
    [(label, reason)] = result.skipped
    assert label.startswith("ejkernel_ops#fake@v1:")
    assert "does not run" in reason
    assert reason in str(result)
    with pytest.raises(ek.TuningError):
        ek.autotune_lowered(selector(), lowered, strict=True)


@pytest.mark.filterwarnings("ignore:.*keep their heuristic")
@pytest.mark.parametrize("method", ["candidate_cfgs", "make_inputs", "heuristic_cfg"])
def test_author_code_that_fails_does_not_stop_the_rest(candidates, monkeypatch, method):
    candidates()
    lowered = jax.jit(lambda x, w: ek.linear(FAKE(x), w)).lower(X, jnp.ones((3, 2)))
    monkeypatch.setattr(fakes.Fake, method, lambda *args: 1 / 0)
    result = ek.autotune_lowered(selector(), lowered)
    assert [e.op_id_v for e in result.entries] == ["linear@v1"]
    assert "ZeroDivisionError" in result.skipped[0][1]


def test_call_that_gives_an_operand_back_is_found():
    class Same(ek.Kernel):
        config_cls = int

        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return 1

    same = Same("same_test")
    lowered = jax.jit(lambda x: same(x)).lower(X)
    assert [(e.op_id_v, e.count) for e in ek.autotune_lowered(selector(), lowered).entries] == [("same_test@v1", 1)]


def test_pinned_call_is_skipped_and_a_compiled_program_refused():
    config = ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=2))
    lowered = jax.jit(lambda x: ek.linear(x, W, config=config)).lower(ROWS)
    result = ek.autotune_lowered(selector(), lowered)
    assert result.entries == ()
    assert result.skipped[0][1].startswith("pinned")
    with pytest.raises(ek.LabelError, match="compiled"):
        ek.autotune_lowered(selector(), lowered.compile())


def test_forged_label_is_skipped_with_a_reason():
    mark = '{mhlo.frontend_attributes = {ejkernel_call = "ejkernel_ops#a@v1:0123456789abcdef"}}'
    text = f"func.func public @main() {{\n %0 = x {mark}\n}}"
    result = ek.autotune_lowered(selector(), text)
    assert result.entries == ()
    assert result.skipped == (
        ("ejkernel_ops#a@v1:0123456789abcdef", "no such call was recorded in this process on this device"),
    )
    with pytest.raises(ek.LabelError, match="no such call was recorded"):
        ek.autotune_lowered(selector(), text, strict=True)


def test_selector_may_be_left_out_and_what_is_no_program_is_refused(lowered):
    ek.set_default_selector(selector())
    assert len(ek.autotune_lowered(lowered).entries) == 6
    with pytest.raises(ek.LabelError, match="expected a Lowered"):
        ek.autotune_lowered(3)


def test_complex_results_may_round_the_other_way():
    class Product(ek.Kernel):
        def run(self, x, y, *, cfg):
            order = slice(None, None, -1) if cfg == 2 else slice(None)
            return jnp.einsum("ij,jk->ik", x[:, order], y[order]) * (1.1 if cfg == 3 else 1.0)

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return 2, 3

    kernel = Product("complex_test")
    inv = ek.Invocation(kernel, (jnp.ones((3, 64), jnp.complex64), jnp.ones((64, 2), jnp.complex64)))
    assert [t.status for t in ek.Autotuner(num_iters=1).tune(inv).trials] == ["timed", "timed", "wrong"]


def test_labels_of_another_prefix_are_not_passed_over(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "mine#")
    lowered = jax.jit(lambda x: ek.linear(x, W)).lower(ROWS)
    monkeypatch.delenv("EJKERNEL_OPS_PREFIX")
    with pytest.raises(ek.LabelError, match=r"another prefix, such as mine#linear@v1.*EJKERNEL_OPS_PREFIX"):
        ek.autotune_lowered(selector(), lowered)


def test_a_config_that_disks_cannot_keep_is_tuned_all_the_same(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Local:
        factor: int = 1

    class Unstored(ek.Kernel):
        def run(self, x, *, cfg):
            return x * cfg.factor

        def heuristic_cfg(self, inv):
            return Local()

    lowered = jax.jit(Unstored("unstored_test")).lower(X)
    chain = selector(persistent=ek.PersistentCache(tmp_path))
    with pytest.warns(UserWarning, match=r"unstored_test@v1 is tuned in this process only: .*could not be read back"):
        result = ek.autotune_lowered(chain, lowered)
    assert [e.cfg for e in result.entries] == [cfg for _, cfg in chain.cache.items()] == [Local()]


def test_a_trace_is_no_place_to_tune(lowered):
    def traced(x):
        with pytest.raises(ek.TuningError, match="inside a trace would time nothing"):
            ek.autotune_lowered(selector(), lowered)
        with pytest.raises(ek.TuningError, match="inside a trace would time nothing"):
            ek.autotune_recorded(selector())
        return x

    jax.make_jaxpr(traced)(X)


def test_a_heuristic_for_one_back_end_is_enough_to_tune():
    class OneBackEnd(ek.Kernel):
        def run_xla(self, x, *, cfg):
            return x * cfg

        def heuristic_cfg_xla(self, inv):
            return 1

    lowered = jax.jit(OneBackEnd("one_back_end_test")).lower(X)
    assert [e.cfg for e in ek.autotune_lowered(selector(), lowered, strict=True).entries] == [1]


def test_candidates_are_those_of_every_back_end_of_the_device():
    class Many(ek.Kernel):
        def run(self, x, *, cfg):
            return x * 1.0

        def heuristic_cfg(self, inv):
            return "a"

        def candidate_cfgs_xla(self, inv):
            return ["b", "c"]

        def candidate_cfgs_triton(self, inv):
            return ["gpu"]

        def candidate_cfgs_pallas(self, inv):
            return ["gpu or tpu"]

    class ByPlatform(Many):
        def candidate_cfgs_cpu(self, inv):
            return ["d"]

    many, by_platform = Many("many_test"), ByPlatform("by_platform_test")
    found = {p: many.all_candidates(ek.Invocation(many, (X,), platform=p)) for p in ("cpu", "cuda", "tpu")}
    assert found == {"cpu": ["b", "c"], "cuda": ["gpu", "gpu or tpu", "b", "c"], "tpu": ["gpu or tpu", "b", "c"]}
    assert by_platform.all_candidates(ek.Invocation(by_platform, (X,))) == ["d"]


def test_clearing_the_registry_hides_but_does_not_forget(lowered):
    ek.clear_invocations()
    assert ek.get_invocations() == {}
    assert len(ek.autotune_lowered(selector(), lowered).entries) == 6


def test_recorded_calls_hold_no_arrays_and_can_be_tuned():
    ek.clear_invocations()
    jax.jit(lambda x: ek.linear(x, W)).lower(ROWS)
    [(kernel, args, _)] = ek.get_invocations()["linear@v1"].values()
    assert kernel is LINEAR
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in args[:2])
    assert [e.op_id_v for e in ek.autotune_recorded(selector()).entries] == ["linear@v1"]


def test_tune_on_call_tunes_eager_calls_only():
    chain = ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1), autotune=True)
    executor = ek.Executor(chain)
    jax.jit(lambda x: executor(LINEAR, x, W))(ROWS)
    assert len(chain.cache) == 0  # inside a trace nothing could be timed
    executor(LINEAR, ROWS, W)
    assert len(chain.cache) == 1
    executor.choose_config(LINEAR, jnp.ones((5, 8)), W)
    assert len(chain.cache) == 2


def test_inside_a_mesh_a_call_is_tuned_on_one_device(monkeypatch):
    devices = []

    class Seen(Bench):
        def check(self, configs, warmup=1):
            devices.extend(len(x.sharding.device_set) for x in self._sets[0])
            return super().check(configs, warmup)

    monkeypatch.setattr("ejkernel_ops.execution.tuning.Bench", Seen)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert len(jnp.ones(3).sharding.device_set) == jax.device_count()
        ek.autotune(LINEAR, jax.ShapeDtypeStruct((8, 3), jnp.float32), jnp.ones((3, 4)), num_iters=1)
    assert devices == [1, 1]
