"""Labels carry keys into programs, where they are found, counted, and never obeyed."""

import dataclasses
import time
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ejkernel_ops import (
    LABEL_RE,
    ConfigSelectorChain,
    FwdParams,
    Kernel,
    Key,
    LabelError,
    LinearConfig,
    PersistentCache,
    device_fingerprint,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
    linear,
)
from ejkernel_ops.utils.meta import call_sites, count_labels

X = np.zeros((2, 3), np.float32)
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


def test_a_jitted_function_is_to_be_lowered_first():
    with pytest.raises(LabelError, match=r"jitted function; lower it first.*function\.lower\(\*args\)"):
        find_labels_in_lowered(jax.jit(lambda x: x))


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

    class Printed(Kernel):
        def run(self, x, *, cfg):
            return x + 1

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
LOOP = "%c = stablehlo.constant dense<999999999999999999> : tensor<i64>\n%1 = stablehlo.compare LT, %0, %c\n} do {\n"
SLOW = {
    "prefixes": lambda size: "ejkernel_ops#" * (size // 13),
    "one name": lambda size: "ejkernel_ops#" + "a" * size,
    "almost labels": lambda size: f"ejkernel_ops#{'a' * 64}@v{'1' * 32}:{HEX[:-1]}" * (size // 128),
    "at signs": lambda size: "ejkernel_ops#a" + "@v1" * (size // 3),
    "quotes": lambda size: "func.func @f {\n" + '"' * size,
    "escaped quotes": lambda size: 'func.func @f {\n "' + '\\"' * (size // 2),
    "attributes": lambda size: "func.func @f {\n" + 'ejkernel_call = "' * (size // 17),
    "functions": lambda size: "func.func @" * (size // 11),
    "braces": lambda size: "func.func @f {\n" + "{\n" * (size // 2),
    "loops": lambda size: "func.func @f {\n" + "} do {\n" * (size // 7),
    "long loops": lambda size: "func.func @f {\n" + LOOP * (size // 110),
    "huge number": lambda size: f"func.func @f {{\n%c = stablehlo.constant dense<{'9' * size}> : tensor<i64>\n",
    "call chain": lambda size: "".join(CALLS.format(i, i + 1) for i in range(size // 32)),
    "call chain, turned": lambda size: "".join(CALLS.format(i + 1, i) for i in range(size // 32)),
    "call cycle": lambda size: (
        "func.func @main {\n call @f0\n}\n" + "".join(CALLS.format(i, i ^ 1) for i in range(size // 32))
    ),
    "many callers": lambda size: (
        "func.func @f {\n}\n" + "".join(f"func.func @g{i} {{\n call @f\n}}\n" for i in range(size // 32))
    ),
}


def search_seconds(text):
    start = time.process_time()
    extract_labels_from_hlo_text(text)
    assert call_sites(text) == []
    return time.process_time() - start


@pytest.mark.parametrize("kind", SLOW)
def test_time_for_hostile_text_is_linear(kind):
    """Half a megabyte in well under a second of processor time; in quadratic time it would be minutes."""
    assert search_seconds(SLOW[kind](SIZE)) < 2


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", SLOW)
def test_four_times_the_hostile_text_takes_four_times_the_time(kind):
    """In quadratic time it would be 16 times; others on the machine do not disturb the least of three, in turns."""
    texts = [SLOW[kind](size << 20) for size in (1, 4)]
    short, long = (min(times) for times in zip(*(map(search_seconds, texts) for _ in range(3)), strict=True))
    assert long < 8 * short
