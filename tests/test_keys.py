"""Keys are equal for equal calls in every process and differ for different ones."""

import dataclasses
import enum
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops
from ejkernel_ops import (
    AttentionConfig,
    ConfigError,
    Invocation,
    Kernel,
    find_labels_in_lowered,
    flash_attention,
    linear,
    stable_json,
)


class Probe(Kernel):
    """A kernel whose static arguments are the subject."""

    name = "test_probe"

    def run(self, x, option=None, *, extra=None, cfg):
        return x + 1

    def heuristic_cfg(self, inv):
        return 1


PROBE, X = Probe(), np.zeros((2, 3), np.float32)


def call_key(*args, kernel=PROBE, **kwargs):
    return Invocation(kernel, args, kwargs).call_key


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


@dataclasses.dataclass(frozen=True)
class Options:
    size: int
    inner: object = None


def closed_over(value):
    return lambda x: x * value


def adds(x, by=1):
    return x + by


class Adder:
    def __call__(self, x):
        return x


# Keys of one process


@pytest.mark.parametrize(("left", "right"), [
    (((X,), {"option": 3}), ((X, 3), {})),
    (((), {"x": X, "extra": None}), ((X,), {})),
    (((X,), {"extra": {"a": 1, "b": [2, {"c": 3, "d": 4}]}}), ((X,), {"extra": {"b": [2, {"d": 4, "c": 3}], "a": 1}})),
    (((X,), {"extra": {"x", "y", "z"}}), ((X,), {"extra": {"z", "x", "y"}})),
    (((X, jnp.float32), {}), ((X, np.dtype("float32")), {})),
    (((X, np.float32), {}), ((X, jnp.float32), {})),
    (((X, jnp.bfloat16), {}), ((X, ml_dtypes.bfloat16), {})),
    (((X, lambda x: x + 1), {}), ((X, lambda x: x + 1), {})),
    (((X, closed_over(2)), {}), ((X, closed_over(2)), {})),
    (((X,), {}), ((jax.ShapeDtypeStruct((2, 3), np.float32),), {})),
    (((X,), {}), ((jnp.ones((2, 3)),), {})),
])  # fmt: skip
def test_spellings_of_one_call_share_a_key(left, right):
    assert call_key(*left[0], **left[1]) == call_key(*right[0], **right[1])


VALUES = [
    None, 1, 1.0, True, False, 0, 0.0, -0.0, "1", "", float("nan"), float("inf"), 1j, (1,), [1], {1}, {"a": 1},
    {1: "a"}, {"1": "a"}, (1, (2,)), ((1, 2),), Colour.RED, Colour.GREEN, Options(1), Options(1.0), Options(True),
    Options(1, (2,)),
    jnp.float32, jnp.bfloat16, np.dtype("int8"), float, int, "float32", "array", Options, len, adds, lambda x: x + 1,
    lambda x: x + 2, lambda x: x + 1.0, lambda y: y + 1, lambda x, by=1: x + by, lambda x, by=2: x + by,
    lambda x: x in (1, 2), lambda x: x in {1, 2}, closed_over(1), closed_over(2), closed_over(1.0), closed_over(adds),
    functools.partial(adds, by=1), functools.partial(adds, by=2), jax.nn.relu, jax.nn.gelu, Options(1).__eq__,
]  # fmt: skip


def test_static_arguments_that_differ_in_any_way_have_keys_of_their_own():
    keys = Counter(call_key(X, value) for value in VALUES)
    keys.update(call_key(X, extra=value) for value in VALUES if value is not None)
    assert set(keys.values()) == {1}


def test_functions_of_one_text_in_two_modules_are_told_apart():
    """The text names globals, and each module has its own."""
    spaces = [{"__name__": f"made_up_{i}"} for i in range(2)]
    for space in spaces:
        exec("scaled = lambda x: x * scale", space)
    assert call_key(X, spaces[0]["scaled"]) != call_key(X, spaces[1]["scaled"])


def test_shapes_dtypes_and_weak_types_have_keys_of_their_own():
    arrays = [
        X, X[:1], X.T, X[None], X[0], X.astype(np.float16), X.astype(np.int32), jnp.asarray(1.0), np.float32(1.0),
        jax.random.key(0), jax.random.key(0, impl="rbg"), {"a": X}, {"b": X}, [X], (X,), [X, X],
    ]  # fmt: skip
    assert len({call_key(x) for x in arrays}) == len(arrays)
    assert call_key(X, X) not in {call_key(X, "array"), call_key(X, extra=X), call_key(X)}


def test_version_name_and_attributes_of_a_kernel_are_in_its_keys():
    class Tunable(Probe):
        def __init__(self, name, version=None, size=None):
            super().__init__(name, version)
            self.size = size

    kernels = [
        Tunable("test_a"),
        Tunable("test_b"),
        Tunable("test_a", "2"),
        *(Tunable("test_a", size=n) for n in (1, 2)),
    ]
    assert len({call_key(X, kernel=k) for k in kernels}) == len(kernels)
    assert call_key(X, kernel=Tunable("test_a", size=2)) == call_key(X, kernel=kernels[-1])


def labels_of(fn, *args):
    return find_labels_in_lowered(jax.jit(fn).lower(*args))


def test_local_shape_of_a_shard_is_in_the_key():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x, weight = np.zeros((8, 4), np.float32), np.zeros((4, 3), np.float32)
    whole, local = labels_of(linear, x, weight), labels_of(linear, x[:2], weight)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
        explicit = labels_of(linear, sharded, jax.device_put(weight, NamedSharding(mesh, P())))
    mapped = jax.shard_map(linear, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    with jax.set_mesh(mesh):
        manual = labels_of(mapped, sharded, jax.device_put(weight, NamedSharding(mesh, P())))
    assert whole != local == explicit == manual


def test_arguments_without_effect_are_not_in_the_key_of_an_op():
    query, key = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    assert labels_of(flash_attention, query, key, key) == labels_of(
        lambda *a: flash_attention(*a, q_offset=3, config=AttentionConfig(backend="xla")),
        query, key, key,
    )  # fmt: skip


@pytest.mark.parametrize(("value", "where"), [
    (object(), r"argument 'extra' of test_probe@v1 is a builtins\.object"),
    ({"a": [1, threading.Lock()]}, r"argument 'extra' of test_probe@v1\['a'\]\[1\]"),
    (Options(1, inner=object()), r"argument 'extra' of test_probe@v1\.inner"),
    (closed_over(object()), r"argument 'extra' of test_probe@v1"),
    (jax.jit(lambda x: x), r"argument 'extra' of test_probe@v1 is .*no value-based form"),
    (Adder(), r"argument 'extra' of test_probe@v1 is .*no value-based form"),
    (b"bytes", r"argument 'extra' of test_probe@v1 is a builtins\.bytes"),
])  # fmt: skip
def test_argument_without_a_value_based_form_is_refused_by_name(value, where):
    with pytest.raises(ConfigError, match=where):
        PROBE(X, extra=value)


def test_static_arguments_that_compare_equal_run_their_own_programs():
    class Typed(Probe):
        def run(self, x, option=None, *, extra=None, cfg):
            return jnp.full((), option), jnp.full((), cfg)

    kernel = Typed("test_typed")
    wanted = ["int32", "float32", "bool"]
    assert [kernel(X, value)[0].dtype.name for value in (1, 1.0, True)] == wanted
    assert [kernel(X, 1, cfg=value)[1].dtype.name for value in (1, 1.0, True)] == wanted


def test_text_that_looks_like_an_array_is_no_array():
    class Either(Probe):
        def run(self, x, option=None, *, extra=None, cfg):
            return 2 * option if isinstance(x, str) else 3 * x

    kernel = Either("test_either")
    assert float(kernel(np.float32(1), "array")) == 3
    assert float(kernel("array", np.float32(1))) == 2


def test_a_kernel_whose_attribute_changes_is_another_kernel():
    class Stateful(Probe):
        def run(self, x, option=None, *, extra=None, cfg):
            return x * self.factor

    kernel = Stateful("test_stateful")
    kernel.factor = 2
    assert float(kernel(np.float32(1))) == 2
    kernel.factor = 3
    assert float(kernel(np.float32(1))) == 3


# Names of kernels


def define(name):
    class Redefined(Probe):
        pass

    return Redefined(name)


def test_two_classes_of_one_name_and_version_are_an_error():
    define("test_taken")
    with pytest.raises(ConfigError, match=r"test_taken@v1 is the name of both .*Redefined and .*Probe"):
        Probe("test_taken")
    assert Probe("test_taken", version="2").op_id_v == "test_taken@v2"


def test_a_class_that_is_defined_again_replaces_itself_with_a_warning():
    before = define("test_again")
    with pytest.warns(UserWarning, match="defined again: it replaces test_again@v1"):
        after = define("test_again")
    assert before != after


@pytest.mark.parametrize("name", [
    "", ".", "..", "../x", "a/b", "a b", "a@b", "a#b", "a:b", "a~b", "é", "a\n", "a\0", "x" * 65, "~", "C:\\x"
])  # fmt: skip
def test_names_are_restricted_to_what_labels_and_paths_can_hold(name):
    if name:  # an empty one is not given
        with pytest.raises(ConfigError, match="expected 1 to 64"):
            Probe(name)
    if name.strip("."):
        with pytest.raises(ConfigError, match="expected 1 to 32"):
            Probe("test_version", version=name)


def test_name_and_op_id_are_one_thing():
    assert Probe(op_id="test_spelled").op_id_v == Probe("test_spelled").op_id_v == "test_spelled@v1"
    with pytest.raises(ConfigError, match="two spellings"):
        Probe("test_spelled", op_id="test_other")


def test_the_name_may_be_a_class_attribute_of_either_spelling_and_is_text():
    assert type("ByName", (Probe,), {"name": "test_by_name"})().op_id == "test_by_name"
    assert type("ByOpId", (Probe,), {"name": "", "op_id": "test_by_op_id"})().op_id == "test_by_op_id"
    with pytest.raises(ConfigError, match=r"name is a ndarray; expected text.*: Probe\(\)\(...\)"):
        Probe(X)


# Keys of several processes

SCRIPT = """
import hashlib, json, os, sys
import jax, jax.numpy as jnp
import ejkernel_ops
from ejkernel_ops import Kernel, RotaryScaling, find_labels_in_lowered, flash_attention, linear, rotary_embedding

class Own(Kernel):
    name = "test_process"
    def run(self, x, *, names, options, fn, cfg):
        return fn(x) * options["scale"]
    def heuristic_cfg(self, inv):
        return 1

own, turned = Own(), sys.argv[1] == "turned"
def loss(q, k, w):
    out = flash_attention(q, k, k, causal=True) if not turned else flash_attention(causal=True, value=k, key=k, query=q)
    scaling = RotaryScaling(kind="yarn", factor=2, original_length=64)
    out = rotary_embedding(out, jnp.arange(4), scaling=scaling)
    out = linear(out, w, activation="silu")
    options = {"scale": 2.0, "dtype": jnp.float32}
    options = dict(reversed(options.items())) if turned else options
    names = {"one", "two", "three", "four"}
    aux = own(jax.lax.stop_gradient(out), options=options, names=names, fn=lambda x: x if "a" in {"a", "b"} else -x)
    return (out ** 2).sum(), aux

q, k, w = jnp.zeros((2, 4, 2, 8)), jnp.zeros((2, 4, 1, 8)), jnp.zeros((8, 3))
lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(q, k, w)
lowered.compile()
digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
print(json.dumps([ejkernel_ops.__file__, sorted(find_labels_in_lowered(lowered)), digest]))
"""


def test_eight_processes_make_the_same_keys_and_programs_and_share_what_is_compiled(tmp_path):
    root = Path(ejkernel_ops.__file__).parent
    other = shutil.copytree(
        root, tmp_path / "other place" / "ejkernel_ops", ignore=shutil.ignore_patterns("__pycache__")
    )
    script, compiled = tmp_path / "script.py", tmp_path / "compiled"
    script.write_text(SCRIPT)

    def start(seed):
        package, turn = (other, "turned") if seed % 2 else (root, "straight")
        env = {
            "PYTHONPATH": str(package.parent), "PYTHONHASHSEED": str(seed), "PYTHONSAFEPATH": "1",
            "JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        cwd = root.parent if seed == 0 else tmp_path
        command = [sys.executable, script, turn]
        return subprocess.Popen(command, cwd=cwd, env=os.environ | env, stdout=subprocess.PIPE)

    found = [json.loads(start(0).communicate(timeout=120)[0])]
    programs = {file.name for file in compiled.iterdir() if file.name.endswith("-cache")}
    assert programs
    for pair in ((1, 2), (3, 4), (5, 6), (7,)):
        found += [json.loads(run.communicate(timeout=120)[0]) for run in [start(seed) for seed in pair]]
    assert [Path(file).parent for file, *_ in found] == [other if seed % 2 else root for seed in range(8)]
    assert len({json.dumps(rest) for _, *rest in found}) == 1
    assert {file.name for file in compiled.iterdir() if file.name.endswith("-cache")} == programs  # all were hits
    assert [text.partition("#")[2].partition("@")[0] for text in found[0][1]] == [
        "flash_attention", "flash_attention_bwd", "linear", "linear_bwd", "rotary_embedding", "rotary_embedding_bwd",
        "test_process",
    ]  # fmt: skip


def test_hashes_are_those_of_the_text():
    """The first digits of a hash that other tools can recompute."""
    form = stable_json([PROBE.op_id_v, PROBE.state(), [
        ["x", stable_json(jax.ShapeDtypeStruct((2, 3), np.float32))], ["option", "null"], ["extra", "null"]
    ], None, None])  # fmt: skip
    assert call_key(X) == hashlib.sha256(form.encode()).hexdigest()[:16]
    assert textwrap.shorten(form, 60, placeholder="").startswith('{"list":["test_probe@v1"')
