"""The whole step decides: what is faster alone and slower in the step is dropped, and said so."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
import ejlayers
from ejkernel_ops.core import kernel as kernels
from ejkernel_ops.execution.trial import Trial, Tuned

X = jnp.ones((4, 3))


@dataclasses.dataclass(frozen=True)
class Choice:
    backend: str = "xla"
    tile: int = 0


class Step(ek.Kernel[Choice, jax.Array]):
    """Its other back end costs the step `ms` milliseconds, as one that costs a fusion would."""

    ms = {"pallas": 0.0, "xla": 0.0}

    def heuristic_cfg(self, inv):
        return Choice()

    def run_xla(self, x, *, cfg):
        return slept(x, self.ms["xla"])

    def run_pallas(self, x, *, cfg):
        return slept(x, self.ms["pallas"])


def slept(x, ms):
    def host(x):
        time.sleep(ms / 1e3)
        return np.asarray(x)

    return jax.pure_callback(host, x, x)


class First(Step):
    name = "whole_step_first"
    ms = {"pallas": 0.0, "xla": 6.0}


class Second(Step):
    name = "whole_step_second"
    ms = {"pallas": 9.0, "xla": 0.0}


FIRST, SECOND = First(), Second()


class Switches:
    """Finds the other back end faster, whatever the step says."""

    def tune(self, inv, on_event=None):
        cfg = Choice("pallas")
        return Tuned(cfg, Choice(), 1.0, 2.0, (Trial(cfg, "timed", 1.0),))


@pytest.fixture(autouse=True)
def pallas_on_cpu(monkeypatch):
    monkeypatch.setitem(kernels._WHERE, "pallas", ("cpu", "tpu", "gpu"))


def tune(step, **options):
    chain = ek.ConfigSelectorChain(tuner=Switches(), on_event=options.pop("on_event", None))
    return chain, ejlayers.tune(jax.jit(step), X, selector=chain, **options)


def backends(result):
    return {e.op_id_v.split("@")[0]: e.cfg.backend for e in result.entries}


def test_of_two_switched_ops_the_one_that_does_not_pay_is_dropped_and_forgotten():
    chain, result = tune(lambda x: SECOND(FIRST(x)))
    assert backends(result) == {"whole_step_first": "pallas", "whole_step_second": "xla"}
    assert result.step_ms[1] < result.step_ms[0]
    kept, dropped = result.notes
    assert kept.startswith("kept: whole_step_first@v1 on pallas instead of xla: the step takes ")
    assert dropped.startswith("dropped: whole_step_second@v1 on pallas instead of xla: the step takes ")
    assert "ms with it and" in dropped
    assert [key.op_id_v for key in chain.cache.keys()] == ["whole_step_first@v1"]
    assert all(note in str(result) for note in result.notes)


def test_a_switch_that_pays_is_kept_and_reported():
    _, result = tune(lambda x: FIRST(x))
    assert backends(result) == {"whole_step_first": "pallas"}
    assert [note.split(":")[0] for note in result.notes] == ["kept"]


def test_a_single_switch_that_does_not_pay_leaves_the_heuristic():
    chain, result = tune(lambda x: SECOND(x))
    assert backends(result) == {"whole_step_second": "xla"}
    assert result.entries[0].source == "heuristic"
    assert result.step_ms[0] == result.step_ms[1]
    assert chain.cache.keys() == []


def test_without_the_whole_step_nothing_is_dropped():
    chain, result = tune(lambda x: SECOND(x), whole_step=False)
    assert backends(result) == {"whole_step_second": "pallas"}
    assert result.step_ms is None
    assert len(chain.cache) == 1


def test_the_steps_that_are_timed_are_told_of():
    events = []
    tune(lambda x: FIRST(x), on_event=lambda event, **data: events.append(event), progress=False)
    assert events.count("whole_step") == 1
