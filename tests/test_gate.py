"""The numbers gate: what is wrong never wins however fast it is, and what is right is never refused."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
from ejkernel_ops.execution import bench as benches
from ejkernel_ops.execution.bench import Bench
from ejkernel_ops.execution.check import Reference, program
from ejkernel_ops.execution.search import race
from ejkernel_ops.kernels import LINEAR

from .wild import WILD, WildConfig

LENGTH, DIM, BLOCK = 12, 4, 4


@dataclasses.dataclass(frozen=True)
class Planted:
    """A way in which attention can be wrong, and how long it takes."""

    bug: str = ""
    ms: float = 1.0


BUGS = (
    "zeros", "nan", "scale of the softmax", "scale of the output", "mask off by one", "tail dropped", "half the rows",
    "stale buffer", "not rescaled", "one element", "odd tail", "leaks the padding",
)  # fmt: skip


class Attention(ek.Kernel[Planted, jax.Array]):
    """Causal attention of one head in blocks of keys, with bugs on demand."""

    name = "gate_test"
    rows, out_rows = (True, True, True), (True,)

    def heuristic_cfg(self, inv):
        return Planted(ms=10.0)

    def candidate_cfgs(self, inv):
        return [*(Planted(bug) for bug in BUGS), Planted(ms=5.0)]

    def make_inputs(self, inv, rng):
        rng = np.random.default_rng(self.seed)
        return [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in inv.operands]

    def run(self, q, k, v, *, cfg):
        n, bug = q.shape[0], cfg.bug
        scale = DIM**-0.5 * (1.05 if bug == "scale of the softmax" else 1.0)
        pad = -n % BLOCK
        keys, values = (jnp.pad(x, ((0, pad), (0, 0))) for x in (k, v))
        i, j = jnp.arange(n)[:, None], jnp.arange(n + pad)[None, :]
        seen = (j <= i + (bug == "mask off by one")) & ((j < n) | (bug == "leaks the padding"))
        if bug == "leaks the padding":
            seen |= j >= n
        if bug == "tail dropped":
            seen &= (j < n - BLOCK) | (i < BLOCK)
        scores = jnp.where(seen, q @ keys.T * scale, -jnp.inf)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        added = jnp.where(j < BLOCK, 1.2 * weights, weights) if bug == "not rescaled" else weights  # the first block's
        out = added @ values / weights.sum(-1, keepdims=True)
        rows = jnp.arange(n)[:, None]
        wrong = {
            "zeros": lambda: jnp.zeros_like(out),
            "nan": lambda: out * jnp.nan,
            "scale of the output": lambda: out * 1.01,
            "half the rows": lambda: jnp.where(rows < n // 2, out, 0),
            "stale buffer": lambda: jnp.where(rows < n - 1, out, jnp.nan),
            "one element": lambda: out.at[n // 2, 0].add(0.05),
            "odd tail": lambda: jnp.where((rows == n - 1) & (n % 2 == 1), 0, out),
        }
        return wrong[bug]() if bug in wrong else out


class Seeded(Attention):
    seed = 0


KERNEL = Seeded()
CALL = ek.Invocation(KERNEL, (jax.ShapeDtypeStruct((LENGTH, DIM), jnp.float32),) * 3)


@pytest.fixture
def cached(monkeypatch):
    """One program for each config and shape, whatever the operands: compiling is not what is tested."""
    program = benches.program

    @functools.cache
    def once(cfg, shapes):
        return jax.jit(program(CALL if shapes[0][0] == LENGTH else CALL.like(*map(like, shapes)), cfg))

    def like(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def cached(inv, cfg):
        return once(cfg, tuple(x.shape for x in inv.operands))

    monkeypatch.setattr(benches, "program", cached)
    monkeypatch.setattr("ejkernel_ops.execution.check.program", cached)
    monkeypatch.setattr(Reference.__init__, "__defaults__", (cached,))

    def begin(self, cfg, *rest):
        self._programs[cfg] = lambda operands, stale: cached(self.inv, cfg)(*operands)

    monkeypatch.setattr(Bench, "_begin", begin)
    monkeypatch.setattr(benches, "_too_large", lambda *args: None)
    monkeypatch.setattr(benches, "gradients", lambda inv, cfg: cached(inv, cfg))


def test_twelve_wrong_candidates_that_are_ten_times_faster_never_win_and_no_right_one_is_refused(cached, monkeypatch):
    winners, refused = set(), 0
    for seed in range(200):
        monkeypatch.setattr(Seeded, "seed", seed)
        bench = Bench(CALL)
        configs = [KERNEL.heuristic_cfg(CALL), *KERNEL.candidate_cfgs(CALL)]
        timed = [trial.cfg for trial in bench.check(configs, warmup=0) if trial.status == "timed"]
        refused += Planted(ms=5.0) not in timed or bench.verify(Planted(ms=5.0)) is not None
        found = race(configs[0], timed, lambda cfgs, n: [[cfg.ms] * n for cfg in cfgs], bench.verify)
        winners.add(found.winner)
    assert winners == {Planted(ms=5.0)}
    assert refused == 0


def tuned(candidates, inv=CALL, **options):
    return ek.Autotuner(num_iters=1, **options).tune(inv, candidates)


def test_what_is_only_wrong_at_odd_lengths_is_found_when_it_would_win(monkeypatch):
    monkeypatch.setattr(Bench, "sample", lambda self, configs, rounds, deadline: [[cfg.ms] * rounds for cfg in configs])
    result = tuned([Planted("odd tail"), Planted(ms=5.0)])
    assert result.cfg == Planted(ms=5.0)
    [wrong] = [trial for trial in result.trials if trial.status == "wrong"]
    assert wrong.cfg.bug == "odd tail"
    assert "float32[11, 4]" in wrong.reason


def test_a_wrong_gradient_of_a_kernel_without_a_backward_is_found(monkeypatch):
    class Halved(ek.Kernel):
        def run(self, x, *, cfg):
            held = jax.lax.stop_gradient(x)
            return jnp.tanh(x) if cfg == 1 else jnp.tanh(x / 2 + held / 2)

        def heuristic_cfg(self, inv):
            return 1

    monkeypatch.setattr(Bench, "sample", lambda self, configs, rounds, deadline: [[1.0 / c] * rounds for c in configs])
    result = tuned([2], ek.Invocation(Halved("halved_test"), (jnp.ones((4, 3)),)))
    assert result.cfg == 1
    assert next(t.reason for t in result.trials if t.cfg == 2).startswith("gradient: output 0: largest error")


def test_outputs_are_written_into_buffers_of_nan():
    bench = Bench(ek.Invocation(LINEAR, (jnp.ones((64, 32)), jnp.ones((32, 16)))))
    before = [x.unsafe_buffer_pointer() for x in bench._stale]
    assert np.isnan(np.asarray(bench._stale[0])).all()
    cfg = LINEAR.heuristic_cfg(bench.inv)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert bench._begin(cfg, lambda: program(bench.inv, cfg), threads).result() is None
    outs = bench._programs[cfg](bench._sets[0], bench._stale)
    assert [x.unsafe_buffer_pointer() for x in outs] == before
    assert bench._stale[0].is_deleted()


def test_poison_is_no_value_that_a_kernel_computes():
    def poison(dtype):
        return benches._poisoned(jax.ShapeDtypeStruct((3,), dtype))

    assert np.isnan(np.asarray(poison(jnp.bfloat16), np.float32)).all()
    assert np.isnan(np.asarray(poison(jnp.complex64))).all()
    assert poison(jnp.int8).tolist() == [127] * 3
    assert poison(jnp.bool_).tolist() == [True] * 3


def test_a_candidate_that_writes_to_its_operands_is_refused_and_they_are_put_back(monkeypatch):
    inv = ek.Invocation(WILD, (jnp.ones((5, 3)),))
    bench = Bench(inv)
    monkeypatch.setattr("tests.wild.OPERANDS", bench._sets[0])
    kept = np.asarray(bench._sets[-1][0])
    trials = list(bench.check([WildConfig("writes"), WildConfig()]))
    assert [(t.status, t.reason) for t in trials] == [("wrong", "operand 0 was changed"), ("timed", "")]
    assert (np.asarray(bench._sets[0][0]) == kept).all()


def test_another_type_or_count_of_outputs_is_wrong():
    class Typed(ek.Kernel):
        def run(self, x, *, cfg):
            return {1: x, 2: x.astype(jnp.bfloat16), 3: x[:2]}[cfg]

        def heuristic_cfg(self, inv):
            return 1

    trials = tuned([2, 3], ek.Invocation(Typed("typed_test"), (jnp.ones((4, 3)),))).trials
    assert [t.status for t in trials] == ["timed", "wrong", "wrong"]
    assert "expected [((4, 3), dtype('float32'))]" in trials[1].reason


def test_odd_calls_have_one_row_less_and_the_same_statics():
    [odd] = KERNEL.odd_calls(CALL)
    assert [x.shape for x in odd.operands] == [(11, 4)] * 3
    jax.jit(jax.grad(lambda q: ek.flash_attention(q, q, q, causal=True).sum())).lower(jnp.ones((2, 130, 2, 8)))
    from ejkernel_ops.registry import find_call

    for op, by_key in ek.get_invocations().items():
        if not op.startswith("flash"):
            continue
        for key in by_key:
            inv = find_call(ek.Key(ek.device_fingerprint(), op, key))
            if inv.arguments["query"].shape != (2, 130, 2, 8):
                continue
            [odd] = inv.kernel.odd_calls(inv)
            assert {x.shape[1] for x in odd.operands} == {129}
            assert odd.kwargs == inv.kwargs
            assert Bench(inv).verify(inv.kernel.heuristic_cfg(inv)) is None


def test_where_the_plain_computation_overflows_the_rest_is_checked_all_the_same():
    class Overflows(ek.Kernel):
        def run(self, x, *, cfg):
            return (x * 2).astype(x.dtype)

        def heuristic_cfg(self, inv):
            return 1

    x = jnp.array([1.0, 2.0, 3.0, 60000.0], jnp.float16)
    reference = Reference(ek.Invocation(Overflows("overflow_test"), (x,)), [x])
    assert np.isinf(reference.plain).tolist() == [[False, False, False, True]]

    def fault(*values):
        return reference.fault([jnp.array(values, jnp.float32 if max(values) > 65504 else jnp.float16)])

    assert fault(2.0, 4.0, 6.0, np.inf) is None
    assert fault(2.0, 4.0, 6.0, 120000.0) is None
    assert "1 values are off where the plain computation overflows" in fault(2.0, 4.0, 6.0, 5.0)
    assert "error 0." in fault(2.0, 4.5, 6.0, np.inf)
    assert fault(np.nan, np.nan, np.nan, np.nan) is not None


def test_a_wrong_candidate_that_also_writes_to_its_operands_harms_no_other_and_no_array_of_the_caller(monkeypatch):
    x = jnp.ones((5, 3))
    bench = Bench(ek.Invocation(WILD, (x,)), [x])
    monkeypatch.setattr("tests.wild.OPERANDS", bench._sets[0])
    kinds = [WildConfig("writes wrong"), WildConfig(), WildConfig("writes late"), WildConfig(ms=0.1)]
    trials = list(bench.check(kinds))
    assert [t.status for t in trials] == ["wrong", "timed", "run_failed", "timed"]
    assert "largest error" in trials[0].reason
    assert "operand 0 was changed" in trials[0].reason
    assert (np.asarray(x) == 1).all()
