"""Recorded calls move between processes as JSON: what is loaded is what was saved, or nothing."""

import concurrent.futures
import dataclasses
import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    Autotuner,
    CacheFormatError,
    ConfigError,
    ConfigSelectorChain,
    Invocation,
    Kernel,
    Key,
    autotune_lowered,
    autotune_recorded,
    clear_invocations,
    device_fingerprint,
    find_labels_in_lowered,
    flash_attention,
    get_invocations,
    linear,
    load_invocations,
    record_invocation,
    save_invocations,
)
from ejkernel_ops.registry import find_call

from .ops import recorded
from .test_gradient_methods import CALLS, RESIDUAL, loss


class Mode(enum.Enum):
    """A static argument."""

    FAST = 1


class Word(enum.StrEnum):
    """One that is text as well."""

    FAST = "fast"


class Pair(NamedTuple):
    """A tuple with names."""

    x: int
    y: float


@dataclasses.dataclass(frozen=True)
class Options:
    """Another one, nested."""

    mode: Mode
    sizes: tuple = (1, 2.5)


class Static(Kernel):
    """Takes any static value."""

    name = "test_static"

    def run(self, x, *, cfg, value=None):
        return x

    def heuristic_cfg(self, inv):
        return 1


STATIC = Static()
X = np.ones((2, 8, 2, 8), np.float32)


def model(query, weight, rng):
    """Attention with dropout and a linear layer, differentiated."""
    out = flash_attention(query, query, query, causal=True, dropout_rate=0.5, dropout_rng=rng)
    return (linear(out, weight, activation="gelu") ** 2).sum()


def lowered():
    return jax.jit(jax.grad(model, (0, 1))).lower(X, np.ones((8, 3), np.float32), jax.random.key(0))


@pytest.fixture(autouse=True)
def no_calls():
    clear_invocations()


def saved(tmp_path):
    save_invocations(tmp_path / "calls.json")
    return tmp_path / "calls.json"


def test_loaded_calls_are_the_saved_ones_in_both_directions(tmp_path):
    labels = set(find_labels_in_lowered(lowered()))
    fn, arrays = CALLS["array keyword"]
    labels |= set(find_labels_in_lowered(jax.jit(jax.grad(loss(fn, RESIDUAL), (0, 1, 2))).lower(*arrays)))
    before = get_invocations()
    file = saved(tmp_path)
    clear_invocations()
    assert get_invocations() == {}
    load_invocations(file)
    assert recorded() == labels
    assert get_invocations() == before
    assert sorted(before) == [
        "flash_attention@v1", "flash_attention_bwd@v1", "linear@v1", "linear_bwd@v1",
        "test_residual@v1", "test_residual_bwd@v1",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [
    None, True, 1, 2.5, float("inf"), float("-0.0"), 1j, "text", np.dtype("bfloat16"), Mode.FAST, Word.FAST,
    Pair(1, 2.0),
    (1, (2, "a")), [1, [2]], {"a": (None,), "b": 1}, frozenset({"x", 1}), Options(Mode.FAST),
    Options(np.float32(np.inf)), Options(np.complex64(1j)),
    {"array": [["nested", {"dict": 1}]]},
])  # fmt: skip
def test_static_values_come_back_equal_and_of_their_type(value, tmp_path):
    inv = Invocation(STATIC, (X,), {"value": value})
    record_invocation(STATIC, inv)
    file = saved(tmp_path)
    clear_invocations()
    load_invocations(file)
    ((_, _, kwargs),) = get_invocations()["test_static@v1"].values()
    assert repr(kwargs["value"]) == repr(value)
    assert type(kwargs["value"]) is type(value)


def test_random_keys_low_precision_and_weak_types_come_back(tmp_path):
    arrays = [jax.random.key(0), jax.random.key(0, impl="rbg"), jnp.ones(3, jnp.bfloat16), jnp.asarray(2.0)]
    record_invocation(STATIC, Invocation(STATIC, (arrays,)))
    before, file = get_invocations(), saved(tmp_path)
    clear_invocations()
    load_invocations(file)
    assert get_invocations() == before
    assert get_invocations()["test_static@v1"].popitem()[1][1][0][3].weak_type


def test_a_call_that_cannot_be_read_back_is_left_out_with_a_warning(tmp_path):
    record_invocation(STATIC, Invocation(STATIC, (X,), {"value": jnp.sin}))
    record_invocation(STATIC, Invocation(STATIC, (X,), {"value": 3}))
    with pytest.warns(UserWarning, match=r"test_static@v1:\w{16} is not saved: .*is not a value that can be read"):
        file = saved(tmp_path)
    clear_invocations()
    load_invocations(file)
    assert [kwargs["value"] for _, _, kwargs in get_invocations()["test_static@v1"].values()] == [3]


TUNE = """
import sys
import ejkernel_ops as ek
ek.load_invocations(sys.argv[1])
result = ek.autotune_recorded(ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1)))
result.save(sys.argv[2])
"""


@pytest.mark.once
def test_a_fresh_process_tunes_a_model_from_the_saved_calls_alone(tmp_path):
    from ejkernel_ops import AutotuningResult

    program = lowered()
    file, out = saved(tmp_path), tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-c", TUNE, file, out], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = AutotuningResult.load(out)
    assert not result.skipped
    assert {f"ejkernel_ops#{e.op_id_v}:{e.call_key}" for e in result.entries} == set(find_labels_in_lowered(program))
    assert all(e.trials for e in result.entries)
    jax.clear_caches()
    with result:
        text = lowered().as_text()
    assert ":overlay" in text
    assert ":heuristic" not in text


def test_calls_of_another_machine_are_tuned_here_if_told(tmp_path):
    record_invocation(STATIC, Invocation(STATIC, (X,)))
    file = saved(tmp_path)
    file.write_text(file.read_text().replace(device_fingerprint(), "gpu|H100|9.0"))
    clear_invocations()
    load_invocations(file)
    assert (list(get_invocations()), list(get_invocations("gpu|H100|9.0"))) == ([], ["test_static@v1"])
    load_invocations(file, device=device_fingerprint())
    result = autotune_recorded(ConfigSelectorChain(tuner=Autotuner(num_iters=1)))
    assert [e.op_id_v for e in result.entries] == ["test_static@v1"]


def test_loaded_calls_answer_the_labels_of_a_program(tmp_path):
    program = lowered()
    file = saved(tmp_path)
    load_invocations(file)
    result = autotune_lowered(ConfigSelectorChain(tuner=Autotuner(num_iters=1)), program, strict=True)
    assert len(result.entries) == 4


def change(**fields):
    def apply(body):
        body["calls"][0].update(fields)
        return body

    return apply


DAMAGE = {
    "no JSON": (lambda body: "[", CacheFormatError, "not valid JSON"),
    "a list": (lambda body: [], CacheFormatError, "'format' is missing"),
    "schema": (lambda body: body | {"schema": 2}, CacheFormatError, "schema is 2; this version reads 1"),
    "no calls": (lambda body: {"format": body["format"], "schema": 1}, CacheFormatError, "damaged: KeyError"),
    "unknown op": (change(op="unheard@v1"), ConfigError, "unknown op 'unheard@v1'"),
    "another key": (change(key="0" * 16), CacheFormatError, "has another key here"),
    "no name": (change(arguments=[]), CacheFormatError, "has the parameters"),
    "unknown form": (
        change(arguments=[["x", {"array": ["float32", [2], False]}], ["value", {"object": "os:system"}]]),
        CacheFormatError, "not a value that can be read back",
    ),
    "not imported": (
        change(arguments=[["x", None], ["value", {"dataclass": "unheard.of:Options", "fields": {}}]]),
        CacheFormatError, "'unheard.of:Options' is not imported here",
    ),
    "no dataclass": (
        change(arguments=[["x", None], ["value", {"dataclass": "subprocess:Popen", "fields": {"args": "true"}}]]),
        CacheFormatError, "'subprocess:Popen' is not imported here",
    ),
    "no enum": (
        change(arguments=[["x", None], ["value", {"enum": "os:path.join"}]]), CacheFormatError, "'os:path' is not",
    ),
    "made by code": (
        change(arguments=[["x", None], ["value", {"dataclass": "numpy:f2py.X", "fields": {}}]]),
        CacheFormatError, "'numpy:f2py.X' is not imported here",
    ),
    "huge number": (
        change(arguments=[["x", None], ["value", {"scalar": ["int8", str(10**30)]}]]),
        CacheFormatError, "not a value that can be read back",
    ),
    "no number": (
        change(arguments=[["x", None], ["value", {"scalar": ["V8", "1"]}]]), CacheFormatError, "'V8' is no number type",
    ),
    "negative shape": (
        change(arguments=[["x", {"array": ["float32", [-2], False]}], ["value", None]]),
        CacheFormatError, "has no sizes to tune for",
    ),
    "deep": (
        lambda body: json.dumps(body).replace('"value", 3', '"value", ' + '{"list": [' * 900 + "]}" * 900),
        CacheFormatError, "not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_cannot_be_used_says_why_and_records_nothing(kind, tmp_path):
    damage, error, message = DAMAGE[kind]
    record_invocation(STATIC, Invocation(STATIC, (X,), {"value": 3}))
    file = saved(tmp_path)
    body = damage(json.loads(file.read_text()))
    file.write_text(body if isinstance(body, str) else json.dumps(body))
    clear_invocations()
    with pytest.raises(error, match=message):
        load_invocations(file)
    assert get_invocations() == {}


def test_saving_where_there_is_no_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*missing does not exist"):
        save_invocations(tmp_path / "missing" / "calls.json")


def test_calls_of_any_number_of_arguments_come_back(tmp_path):
    class Many(Kernel):
        name = "test_many_arguments"

        def run(self, *xs, cfg):
            return sum(xs)

        def heuristic_cfg(self, inv):
            return 1

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return cotangents * len(primals)

    kernel = Many()
    jax.jit(jax.grad(lambda x, y: kernel(x, y, x).sum(), (0, 1))).lower(X, X)
    before, file = get_invocations(), saved(tmp_path)
    clear_invocations()
    load_invocations(file)
    assert sorted(get_invocations()) == ["test_many_arguments@v1", "test_many_arguments_bwd@v1"]
    assert get_invocations() == before
    result = autotune_recorded(ConfigSelectorChain(tuner=Autotuner(num_iters=1)))
    assert (len(result.entries), result.skipped) == (2, ())


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    record_invocation(STATIC, Invocation(STATIC, (X,)))
    file = saved(tmp_path)
    monkeypatch.setattr("ejkernel_ops.utils.files.MAX_BYTES", 10)
    with pytest.raises(CacheFormatError, match="larger than"):
        load_invocations(file)


def test_writers_of_one_file_do_not_meet(tmp_path):
    record_invocation(STATIC, Invocation(STATIC, (X,)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: save_invocations(tmp_path / "calls.json"), range(80)))
    load_invocations(tmp_path / "calls.json")
    assert [p.name for p in tmp_path.iterdir()] == ["calls.json"]


def test_kernels_that_share_a_backward_get_their_own_calls_back(tmp_path):
    class SharedBackward(Kernel):
        name = "test_shared_bwd"

        def run(self, x, out, dout, *, cfg, needs, factor):
            return dout * factor

        def heuristic_cfg(self, inv):
            return 1

    class First(Kernel):
        name, backward = "test_shares_first", SharedBackward()

        def run(self, x, *, cfg, factor):
            return x * factor

        def heuristic_cfg(self, inv):
            return 1

    class Second(First):
        name = "test_shares_second"

    First()
    second = Second()
    jax.jit(jax.grad(lambda x: second(x, factor=2.0).sum())).lower(X)
    file = saved(tmp_path)
    assert {call["forward"] for call in json.loads(file.read_text())["calls"]} == {None, "test_shares_second@v1"}
    clear_invocations()
    load_invocations(file)
    (key,) = get_invocations()["test_shared_bwd@v1"]
    inv = find_call(Key(device_fingerprint(), "test_shared_bwd@v1", key))
    assert inv.call.forward.kernel is second
