"""Pinned mode: the same result gives the same program in every process, and nothing is tuned, timed or looked up."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ejkernel_ops as ek
from ejkernel_ops.kernels import LINEAR
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.meta import split_label

ROOT = Path(__file__).parent.parent
MODEL = """
import hashlib, json, random, sys
import jax, jax.numpy as jnp
import ejkernel_ops as ek

def loss(params, x):
    def layer(x, weight):
        return ek.rms_norm(ek.linear(x, weight, activation="gelu"), params["scale"]), None
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["weights"])
    return jax.vmap(lambda x: ek.linear(x, params["head"]))(x[:, None]).sum()

sizes = {"weights": (3, 8, 8), "scale": (8,), "head": (8, 4)}
def step(order):
    params = {name: jnp.ones(sizes[name]) for name in order}
    return jax.jit(jax.grad(loss)), params, jnp.ones((6, 8))
"""
CHILD = (
    MODEL
    + """
class NoClock:
    def __getattr__(self, name):
        raise AssertionError(f"pinned, and yet asked for time.{name}")

for name, module in list(sys.modules.items()):
    if name.startswith(("ejkernel_ops", "ejlayers")) and hasattr(module, "time"):
        module.time = NoClock()
ek.set_default_selector(ek.ConfigSelectorChain(policy=ek.AutotunePolicy(mode="pinned", tune_on_call=True)))
order = sorted(sizes)
random.Random(int(sys.argv[2])).shuffle(order)
fn, *args = step(order)
result = ek.AutotuningResult.load(sys.argv[1])
with result:
    lowered = fn.lower(*args)
    lowered.compile()
text = lowered.as_text()
print(json.dumps({
    "program": hashlib.sha256(text.encode()).hexdigest(), "labels": sorted(ek.find_labels_in_lowered(lowered)),
    "digest": result.digest, "pinned": text.count(":overlay"), "other": text.count(":heuristic"),
}))
"""
)


def pinned(path):
    """A result with, for each call of the model, a config that its heuristic does not choose where there is one."""
    scope = {}
    exec(MODEL, scope)
    fn, *args = scope["step"](["head", "scale", "weights"])
    device, entries = ek.device_fingerprint(), []
    for label in ek.find_labels_in_lowered(fn.lower(*args)):
        key = ek.Key(device, *split_label(label))
        inv = find_call(key)
        cfg = [*inv.kernel.all_candidates(inv)][-1]
        entries.append(ek.Entry(key.op_id_v, key.call_key, cfg))
    ek.AutotuningResult(device, tuple(entries)).save(path)
    return len(entries)


@pytest.mark.cpu  # on a GPU this process has the memory that the others would need
@pytest.mark.once
@pytest.mark.slow
def test_eight_processes_make_one_program_from_one_result(tmp_path):
    count = pinned(tmp_path / "result.json")
    elsewhere = tmp_path / "elsewhere"
    for package in ("ejkernel_ops", "ejlayers"):
        shutil.copytree(ROOT / package, elsewhere / package, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = tmp_path / "compiled"

    def run(index):
        folder = tmp_path / f"cwd{index}"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", CHILD, tmp_path / "result.json", str(index)],
            cwd=folder, capture_output=True, text=True, timeout=300,
            env=os.environ | {
                "PYTHONPATH": str(elsewhere if index % 2 else ROOT), "PYTHONHASHSEED": str(index),
                "JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout, {path.name for path in compiled.glob("*-cache")}

    first, stored = run(0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = list(pool.map(run, range(1, 8)))
    assert {output for output, _ in others} == {first}
    found = json.loads(first)
    assert len(found["labels"]) == count
    assert found["pinned"] >= count
    assert found["other"] == 0
    assert stored
    assert others[-1][1] == stored  # a label is part of the key of JAX's own cache: every later process hits


class Asked(Exception):
    """Raised by every part of a selector that pinned mode leaves alone."""


class Refuses:
    def asked(self, *args, **kwargs):
        raise Asked

    get = put = discard = tune = asked


@pytest.mark.parametrize(("mode", "error"), [("pinned", ek.ConfigError), ("auto", Asked), ("cached", Asked)])
def test_a_call_that_the_result_lacks_is_an_error_that_names_it_and_nothing_else_is_asked(mode, error):
    policy = ek.AutotunePolicy(mode=mode, tune_on_call=mode != "cached")
    selector = ek.ConfigSelectorChain(Refuses(), Refuses(), Refuses(), policy)
    inv = ek.Invocation(LINEAR, (jnp.ones((5, 5)), jnp.ones((5, 5))))
    with pytest.raises(error) as told:
        selector.choose(inv)
    if mode == "pinned":
        assert f"Invocation(linear@v1, float32[5, 5], float32[5, 5]) has no config (key {inv.call_key})" in str(
            told.value
        )
