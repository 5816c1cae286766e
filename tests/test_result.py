"""`AutotuningResult`: entered, nested, shared, stored, read back."""

import gc
import json

import jax
import jax.numpy as jnp
import pytest

import ejkernel_ops as ek
from ejkernel_ops.utils.meta import call_sites

X, W = jnp.ones((12, 4)), jnp.ones((4, 4)) / 4
DEVICE = ek.device_fingerprint()
[KEY] = (text.split(":")[1] for text in ek.find_labels_in_lowered(jax.jit(lambda x: ek.linear(x, W)).lower(X)))


def result(rows, op="linear@v1", key=KEY, **fields):
    cfg = ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=rows))
    return ek.AutotuningResult(DEVICE, (ek.Entry(op, key, cfg, **fields),))


class Step:
    """A jitted step that counts its traces and tells the rows that it was compiled with."""

    def __init__(self):
        self.traces = 0
        self.jitted = jax.jit(self._step)

    def _step(self, x):
        self.traces += 1
        return ek.linear(x, W)

    def __call__(self):
        self.jitted(X)
        [site] = call_sites(self.jitted.lower(X))
        return int(site.config.split("blocksize_m=")[1].split()[0])


def test_entering_retraces_once_and_leaving_and_equal_content_never():
    step = Step()
    assert step() == 12
    with result(3):
        assert step() == 3
        assert step() == 3
    assert step() == 12
    with result(3):  # equal content, another object
        assert step() == 3
    with ek.AutotuningResult.loads(result(3).dumps()):
        assert step() == 3
    assert step.traces == 2


def test_nesting_the_innermost_wins_and_an_exception_restores():
    step, outer = Step(), result(3)
    with outer:
        with result(4):
            assert step() == 4
            with outer, outer:  # the same object again
                assert step() == 3
            assert step() == 4
        with pytest.raises(ZeroDivisionError), result(6):
            raise ZeroDivisionError
        assert step() == 3
    assert step() == 12
    assert step.traces == 3


def test_nesting_large_results_is_cheap():
    entries = [tuple(ek.Entry("linear@v1", f"{i:016x}", 1) for i in range(s, s + 300)) for s in (0, 200)]
    outer, inner = (ek.AutotuningResult(DEVICE, e) for e in entries)
    with outer:
        assert ek.benchmark(lambda: inner.__enter__().__exit__(None, None, None), num_iters=20) < 1.0


def test_unrelated_function_outside_never_retraces():
    traces = []

    @jax.jit
    def other(x):
        traces.append(1)
        return x + 1

    other(X)
    with result(3):
        pass
    other(X)
    with result(4):
        Step()()
    other(X)
    assert len(traces) == 1


def test_short_lived_results_are_never_stale():
    jitted = jax.jit(lambda x: ek.linear(x, W))
    for index in range(200):
        rows = index % 11 + 1
        with result(rows):
            assert f"blocksize_m={rows} " in call_sites(jitted.lower(X))[0].config
        gc.collect(0)


def test_wrapped_step_leaves_other_work_alone():
    step = Step()
    wrapped = result(4).wrap(step)
    assert (wrapped(), step(), wrapped()) == (4, 12, 4)
    assert step.traces == 2


def test_compiled_step_keeps_its_configs_outside():
    compiled = result(4).compile(jax.jit(lambda x: ek.linear(x, W)), X)
    assert jnp.allclose(compiled(X), X @ W)
    assert "blocksize_m=4" in compiled.as_text()


def test_pinned_mode_takes_configs_from_the_result_only():
    step = Step()
    with ek.policy_override(mode="pinned"):
        with result(2):
            assert step() == 2
        with pytest.raises(ek.ConfigError, match="pinned"):
            step()


def test_round_trip_is_equal_and_the_digest_is_of_the_configs_alone(tmp_path):
    trial = ek.Trial(ek.LinearConfig(backend="xla"), "failed", reason="why")
    first = result(3, heuristic=ek.LinearConfig(backend="xla"), heuristic_ms=2.0, ms=1.0, trials=(trial,), count=4)
    first.save(tmp_path / "r.json")
    again = ek.AutotuningResult.load(tmp_path / "r.json")
    assert again == first
    assert again.digest == first.digest == result(3, ms=9.0).digest != result(4).digest
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]  # no part file is left


def test_merging_takes_the_right_one_and_refuses_two_devices():
    both = result(3) | result(4) | result(5, key="0" * 16)
    assert sorted(e.cfg.fwd.blocksize_m for e in both.entries) == [4, 5]
    with pytest.raises(ek.ConfigError, match="only one device"):
        result(3) | ek.AutotuningResult("gpu|other", ())


def edited(**changes):
    return json.dumps(json.loads(result(3).dumps()) | changes)


def with_entry(**changes):
    body = json.loads(result(3).dumps())
    body["entries"][0] |= changes
    return json.dumps(body)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("", ek.CacheFormatError, "not valid JSON"),
        ("[1]", ek.CacheFormatError, "not an AutotuningResult"),
        ("[" * 100000, ek.CacheFormatError, "not valid JSON"),
        (edited(schema=99), ek.CacheFormatError, "schema is 99"),
        (edited(device="gpu|H100"), ek.CacheFormatError, "tuned for 'gpu|H100'"),
        (edited(entries=3), ek.CacheFormatError, "damaged"),
        (with_entry(op="os@v1"), ek.ConfigError, "unknown op 'os@v1'"),
        (with_entry(config={"fwd": {"blocksize": 3}}), ek.CacheFormatError, "did you mean 'q_blocksize'"),
        (with_entry(config={"fwd": {"blocksize_m": "3"}}), ek.CacheFormatError, "Expected `int"),
        (with_entry(config={"fwd": {"blocksize_m": -3}}), ek.CacheFormatError, "blocksize_m"),
        (with_entry(config={"backend": "gcc"}), ek.CacheFormatError, "backend"),
        (with_entry(count=None), ek.CacheFormatError, "damaged"),
    ],
)
def test_file_that_cannot_be_used_says_why(text, error, match):
    with pytest.raises(error, match=match.replace("|", r"\|")):
        ek.AutotuningResult.loads(text)


def test_result_of_another_device_is_used_here_only_if_told():
    text = edited(device="cpu|other|9")
    again = ek.AutotuningResult.loads(text, allow_other_device=True)
    assert again.device == DEVICE
    assert "tuned for cpu|other|9" in str(again)


def test_text_has_calls_back_end_config_times_gain_and_source():
    heuristic = ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=12))
    text = str(result(3, heuristic=heuristic, heuristic_ms=2.0, ms=1.0, count=4, executions=12))
    for part in ("linear@v1", "4 (x3)", "xla", "blocksize_m=3", "2.000", "1.000", "2.00x", "tuned"):
        assert part in text
