"""Keys are equal for equal calls in every process and differ for different ones; labels carry them into programs."""

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
import time
from collections import Counter
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops
from ejkernel_ops import (
    LABEL_RE,
    AttentionConfig,
    ConfigError,
    ConfigSelectorChain,
    FwdParams,
    Invocation,
    Kernel,
    Key,
    LabelError,
    LinearConfig,
    PersistentCache,
    device_fingerprint,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    flash_attention,
    label,
    labels_to_configs,
    linear,
    stable_json,
)
from ejkernel_ops.utils.meta import call_sites, count_labels


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
], ids=str)  # fmt: skip
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


# Keys of several processes

SCRIPT = """
import hashlib, json, os, sys
import jax, jax.numpy as jnp
import ejkernel_ops
from ejkernel_ops import Kernel, find_labels_in_lowered, flash_attention, linear

class Own(Kernel):
    name = "test_process"
    def run(self, x, *, names, options, fn, cfg):
        return fn(x) * options["scale"]
    def heuristic_cfg(self, inv):
        return 1

own, turned = Own(), sys.argv[1] == "turned"
def loss(q, k, w):
    out = flash_attention(q, k, k, causal=True) if not turned else flash_attention(causal=True, value=k, key=k, query=q)
    out = linear(out, w, activation="silu")
    options = {"scale": 2.0, "dtype": jnp.float32}
    options = dict(reversed(options.items())) if turned else options
    names = {"one", "two", "three", "four"}
    aux = own(jax.lax.stop_gradient(out), options=options, names=names, fn=lambda x: x if "a" in {"a", "b"} else -x)
    return (out ** 2).sum(), aux

q, k, w = jnp.zeros((2, 4, 2, 8)), jnp.zeros((2, 4, 1, 8)), jnp.zeros((8, 3))
lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(q, k, w)
digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
print(json.dumps([ejkernel_ops.__file__, sorted(find_labels_in_lowered(lowered)), digest]))
"""


def test_other_processes_folders_and_hash_seeds_make_the_same_keys_and_programs(tmp_path):
    root = Path(ejkernel_ops.__file__).parent
    other = shutil.copytree(
        root, tmp_path / "other place" / "ejkernel_ops", ignore=shutil.ignore_patterns("__pycache__")
    )
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = []
    for package, cwd, seed, turn in (
        (root, root.parent, "0", "straight"), (root, tmp_path, "123", "turned"), (other, tmp_path, "7", "turned")
    ):  # fmt: skip
        env = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONHASHSEED": seed, "PYTHONSAFEPATH": "1"}
        runs.append(subprocess.Popen([sys.executable, script, turn], cwd=cwd, env=env, stdout=subprocess.PIPE))
    found = [json.loads(run.communicate(timeout=120)[0]) for run in runs]
    assert [Path(file).parent for file, _, _ in found] == [root, root, other]
    assert len({json.dumps(rest) for _, *rest in found}) == 1
    assert [text.partition("#")[2].partition("@")[0] for text in found[0][1]] == [
        "flash_attention", "flash_attention_bwd", "linear", "linear_bwd", "test_process"
    ]  # fmt: skip


# Labels

HEX = "0123456789abcdef"


def test_label_is_prefix_name_version_and_key():
    assert label("matmul@v1", HEX) == f"ejkernel_ops#matmul@v1:{HEX}"
    assert label("matmul@v1", HEX, prefix="mine#") == f"mine#matmul@v1:{HEX}"
    found = LABEL_RE.fullmatch(label("a.b-c_d@v2.0", HEX))
    assert found is not None
    assert (found["op"], found["key"]) == ("a.b-c_d@v2.0", HEX)


@pytest.mark.parametrize(("op", "key"), [
    ("matmul", HEX), ("matmul@1", HEX), ("@v1", HEX), ("a b@v1", HEX), ("a@v1", HEX[:-1]), ("a@v1", HEX.upper()),
    ("a@v1", HEX + "0"), ("a" * 65 + "@v1", HEX), ("a@v1\n", HEX), ("a@v1", HEX + "\n"),
])  # fmt: skip
def test_malformed_label_parts_are_refused(op, key):
    with pytest.raises(LabelError, match=r"expected name@vN and 16 hex digits"):
        label(op, key)


@pytest.mark.parametrize("prefix", ["mine", "a b#", "##", "#", "é#", "a" * 64 + "#", "a#\n"])
def test_malformed_prefixes_are_refused_wherever_they_come_from(prefix, monkeypatch):
    with pytest.raises(LabelError, match="prefix is"):
        label("a@v1", HEX, prefix=prefix)
    with pytest.raises(LabelError, match="prefix is"):
        extract_labels_from_hlo_text("", prefix=prefix)
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", prefix)
    with pytest.raises(LabelError, match="EJKERNEL_OPS_PREFIX is"):
        label("a@v1", HEX)


def test_prefix_of_the_environment_is_used_in_programs(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "mine#")
    lowered = jax.jit(linear).lower(X, np.zeros((3, 7), np.float32))
    (text,) = find_labels_in_lowered(lowered)
    assert text.startswith("mine#linear@v1:")
    assert list(count_labels(lowered)) == [text]
    assert find_labels_in_lowered(lowered.compile()) == [text]
    assert find_labels_in_lowered(lowered, prefix="ejkernel_ops#") == []


def test_labels_are_found_in_every_form_of_a_program():
    weight = np.zeros((3, 5), np.float32)
    jitted = jax.jit(lambda x, w: linear(linear(x, w), w.T))
    lowered = jitted.lower(X, weight)
    labels = find_labels_in_lowered(lowered)
    assert len(labels) == 2
    forms = [
        lowered.as_text(),
        lowered.as_text(debug_info=True),
        jitted.trace(X, weight),
        jax.export.export(jitted)(X, weight),
    ]
    forms += [nnx.jit(lambda x, w: linear(linear(x, w), w.T)).lower(X, weight)]
    forms += [eqx.filter_jit(lambda x, w: linear(linear(x, w), w.T)).lower(X, weight)]
    assert [find_labels_in_lowered(form) for form in forms] == [labels] * len(forms)
    assert set(find_labels_in_lowered(lowered.compile())) == set(labels)


def test_what_is_no_program_is_refused():
    with pytest.raises(LabelError, match="program is a int; expected a Lowered"):
        find_labels_in_lowered(3)


def test_finding_is_in_order_each_once_and_only_of_the_prefix():
    first, second = f"ejkernel_ops#b@v1:{HEX}", f"ejkernel_ops#a@v1:{HEX}"
    text = f"x {first} {second} {first} mine#a@v1:{HEX} ejkernel_ops#a@v1:{HEX[:-1]} ejkernel_ops#c~v3~{HEX}"
    assert extract_labels_from_hlo_text(text) == [first, second, f"ejkernel_ops#c@v3:{HEX}"]
    assert extract_labels_from_hlo_text(text, prefix="mine#") == [f"mine#a@v1:{HEX}"]


# Counts

SQUARE = np.zeros((3, 3), np.float32)


def counted(fn, *args):
    """Calls and executions of the only label of a program."""
    sites = call_sites(jax.jit(fn).lower(*args))
    assert len({site.label for site in sites}) == 1
    return sum(site.calls for site in sites), sum(site.executions for site in sites)


def scan(fn, length):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=length)[0]


def layer(x):
    return linear(x, SQUARE)


@pytest.mark.parametrize(("fn", "calls", "executions"), [
    (layer, 1, 1),
    (lambda x: layer(layer(layer(x))), 3, 3),
    (lambda x: jax.jit(layer)(jax.jit(layer)(x)), 2, 2),
    (scan(layer, 5), 1, 5),
    (scan(scan(layer, 3), 5), 1, 15),
    (scan(lambda x: layer(scan(layer, 3)(layer(x))), 5), 3, 25),
    (scan(jax.jit(lambda x: layer(layer(x))), 4), 2, 8),
    (lambda x: layer(scan(layer, 2)(layer(scan(layer, 3)(x)))), 4, 7),
    (lambda x: (lambda f: f(f(x)))(jax.jit(scan(jax.jit(layer), 3))), 2, 6),
    (lambda x: jax.lax.fori_loop(2, 6, lambda i, x: layer(x), x), 1, 4),
    (lambda x: jax.lax.fori_loop(0, x.sum().astype(int), lambda i, x: layer(x), x), 1, 1),  # not known: counted once
    (lambda x: jax.lax.cond(x.sum() > 0, layer, lambda x: layer(layer(x)), x), 3, 3),
    (scan(lambda x: jax.lax.switch(x.sum().astype(int), [layer, jnp.sin], x), 6), 1, 6),
], ids=range(13))  # fmt: skip
def test_calls_and_executions_are_counted(fn, calls, executions):
    assert counted(fn, X) == (calls, executions)


def test_rematerialized_forward_is_counted_in_each_pass_of_a_scan():
    def loss(x):
        return jnp.sum(scan(jax.checkpoint(layer), 4)(x) ** 2)

    sites = call_sites(jax.jit(jax.grad(loss)).lower(X))
    runs = Counter()
    for site in sites:
        runs[site.label.partition("#")[2].partition("@")[0]] += site.executions
    assert runs == {"linear": 8, "linear_bwd": 4}


def test_config_of_a_call_is_readable_whatever_it_holds():
    @dataclasses.dataclass(frozen=True)
    class Config:
        text: str

    class Printed(Probe):
        def heuristic_cfg(self, inv):
            return Config('quote " brace } { newline \n tab \t é ejkernel_call = "x" call @main')

    (site,) = call_sites(jax.jit(Printed("test_printed")).lower(X))
    assert site.executions == 1
    assert site.config.startswith('text=quote " brace } { newline \n tab \t ')
    assert site.config.endswith('ejkernel_call = "x" call @main | text:heuristic | ')


# Configs of labels


def test_labels_to_configs_looks_in_memory_then_on_disk(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    lowered = jax.jit(lambda x, w: linear(linear(x, w), w.T)).lower(X, np.zeros((3, 6), np.float32))
    first, second = find_labels_in_lowered(lowered)
    assert labels_to_configs(lowered, selector) == [(first, None), (second, None)]
    configs = [LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=n)) for n in (1, 2, 3)]
    keys = [Key(device_fingerprint(), "linear@v1", text[-16:]) for text in (first, second)]
    selector.persistent.put(keys[0], configs[0])
    selector.persistent.put(keys[1], configs[1])
    selector.cache.put(keys[1], configs[2])
    assert labels_to_configs(lowered, selector) == [(first, configs[0]), (second, configs[2])]
    assert labels_to_configs([second], selector) == [(second, configs[2])]
    with pytest.raises(LabelError, match="expected prefix#name@vN"):
        labels_to_configs(["linear"], selector)


def test_forged_labels_are_listed_and_lead_to_nothing():
    forged = f"ejkernel_ops#os.system@v1:{HEX}"
    text = f"""
      func.func public @main() {{
        %0 = stablehlo.add {{mhlo.frontend_attributes = {{ejkernel_call = "{forged}", ejkernel_cfg = "x"}}}}
        %1 = stablehlo.add {{mhlo.frontend_attributes = {{ejkernel_call = "ejkernel_ops#not a label"}}}}
      }}"""
    assert find_labels_in_lowered(text) == [forged]
    assert [site.label for site in call_sites(text)] == [forged]
    assert labels_to_configs(text) == [(forged, None)]


# Text that was made to be slow

SIZE = 1 << 19
CALLS = "func.func @f{0} {{\n call @f{1}\n}}\n"
SLOW = {
    "prefixes": "ejkernel_ops#" * (SIZE // 13),
    "almost labels": f"ejkernel_ops#{'a' * 64}@v{'1' * 32}:{HEX[:-1]}" * (SIZE // 128),
    "at signs": "ejkernel_ops#a" + "@v1" * (SIZE // 3),
    "quotes": "func.func @f {\n" + '"' * SIZE,
    "escaped quotes": 'func.func @f {\n "' + '\\"' * (SIZE // 2),
    "attributes": "func.func @f {\n" + 'ejkernel_call = "' * (SIZE // 17),
    "functions": "func.func @" * (SIZE // 11),
    "braces": "func.func @f {\n" + "{\n" * (SIZE // 2),
    "loops": "func.func @f {\n" + "} do {\n" * (SIZE // 7),
    "long loops": "func.func @f {\n"
    + ("%c = stablehlo.constant dense<999999999999999999> : tensor<i64>\n%1 = stablehlo.compare LT, %0, %c\n} do {\n")
    * (SIZE // 110),
    "huge number": f"func.func @f {{\n%c = stablehlo.constant dense<{'9' * SIZE}> : tensor<i64>\n",
    "call chain": "".join(CALLS.format(i, i + 1) for i in range(SIZE // 32)),
    "call chain, turned": "".join(CALLS.format(i + 1, i) for i in range(SIZE // 32)),
    "call cycle": "func.func @main {\n call @f0\n}\n" + "".join(CALLS.format(i, i ^ 1) for i in range(SIZE // 32)),
    "many callers": "func.func @f {\n}\n" + "".join(f"func.func @g{i} {{\n call @f\n}}\n" for i in range(SIZE // 32)),
}


@pytest.mark.parametrize("kind", SLOW)
def test_time_for_hostile_text_is_linear(kind):
    """Half a megabyte in well under a second of processor time; in quadratic time it would be minutes."""
    start = time.process_time()
    extract_labels_from_hlo_text(SLOW[kind])
    assert call_sites(SLOW[kind]) == []
    assert time.process_time() - start < 2


def test_hashes_are_those_of_the_text():
    """The first digits of a hash that other tools can recompute."""
    form = stable_json([PROBE.op_id_v, PROBE.state(), [
        ["x", stable_json(jax.ShapeDtypeStruct((2, 3), np.float32))], ["option", "null"], ["extra", "null"]
    ], None, None])  # fmt: skip
    assert call_key(X) == hashlib.sha256(form.encode()).hexdigest()[:16]
    assert textwrap.shorten(form, 60, placeholder="").startswith('{"list":["test_probe@v1"')
