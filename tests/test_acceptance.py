"""The documented flow, end to end, with what must hold around it.

Further promises of the same flow: saved calls (`test_saved_calls`), labels in every form of a program (`test_labels`),
keys (`test_keys`), caches (`test_caches`), gradients as methods (`test_gradient_methods`), gradients of bias and sinks
(`test_attention`), imports (`test_project`).
"""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import ejlayers
from ejkernel_ops import (
    AttentionConfig,
    Autotuner,
    AutotuningResult,
    BwdParams,
    ConfigSelectorChain,
    Entry,
    Executor,
    FwdParams,
    LinearConfig,
    NormConfig,
    PersistentCache,
    autotune_lowered,
    device_fingerprint,
    find_labels_in_lowered,
    flash_attention,
    linear,
    overlay_cache,
    policy_override,
    rms_norm,
)
from ejkernel_ops.config.selection import heuristic
from ejkernel_ops.execution.trial import Tuned
from ejkernel_ops.utils.meta import call_sites, split_label

from .fakes import FAKE, FakeConfig
from .ops import close, normal, recorded
from .told import KEY, ONE, SLOPE, TOLD, Traced, configs_of, told

WIDTH, HEADS, LAYERS = 8, 2, 24
X, WEIGHT = normal(0, 4, 6, WIDTH), normal(1, WIDTH, WIDTH) / 4

CHOICE = {
    "flash_attention": AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=2, kv_blocksize=4)),
    "flash_attention_bwd": AttentionConfig(backend="xla", bwd=BwdParams(q_blocksize=4, kv_blocksize=2)),
    "linear": LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=3)),
    "linear_bwd": LinearConfig(backend="xla", bwd=BwdParams(blocksize_m=5)),
}


WITH_NORMS = CHOICE | {
    "rms_norm": NormConfig(backend="xla", fwd=FwdParams(blocksize_m=3)),
    "rms_norm_bwd": NormConfig(backend="xla", bwd=BwdParams(blocksize_m=5)),
}


class Picks:
    """A tuner that knows what it wants."""

    def tune(self, inv, on_event=None):
        return Tuned(WITH_NORMS[inv.op_id], heuristic(inv), 1.0, 2.0, ())


def block(x, weight):
    """Attention and a linear map, as a model uses them."""
    heads = linear(x, weight).reshape(*x.shape[:-1], HEADS, -1)
    return x + linear(flash_attention(heads, heads, heads, causal=True).reshape(x.shape), weight)


def layer(x, weight):
    """Three ops; however many layers there are, no number grows."""
    return rms_norm(block(x, weight))


# The flow, in every framework and under every transform


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return block(x, self.param("weight", nn.initializers.normal(), (WIDTH, WIDTH)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(self.attention(x, is_causal=True))


class EquinoxBlock(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return block(x, self.weight)


def linen():
    module, optimizer = LinenBlock(), optax.sgd(0.1)
    params = module.init(jax.random.key(0), X)
    state = optimizer.init(params)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (module.apply(p, x) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step), (params, state, X)


def flax_nnx():
    model = ejlayers.swap(NnxBlock(nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer, X)


def equinox():
    model = EquinoxBlock(WEIGHT)

    @eqx.filter_jit
    def step(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        return eqx.apply_updates(model, grads), loss

    return step, (model, X)


@pytest.mark.parametrize("framework", [linen, flax_nnx, equinox])
def test_a_train_step_is_lowered_tuned_and_traced_again_with_the_tuned_configs(framework):
    step, args = framework()
    lowered = step.lower(*args)
    result = autotune_lowered(ConfigSelectorChain(tuner=Picks()), lowered)
    assert {e.op_id_v.partition("@")[0] for e in result.entries} == set(CHOICE)
    assert not result.skipped
    with result:
        text = step.lower(*args)
        step(*args)  # the jitted step itself
    for site in call_sites(getattr(text, "lowered", text)):
        assert ":overlay" in site.config
        assert ":heuristic" not in site.config


def in_a_scan(x, weight):
    return jax.lax.scan(lambda x, _: (layer(x, weight), None), x, None, length=LAYERS)[0]


def unrolled(x, weight):
    for _ in range(LAYERS):
        x = layer(x, weight)
    return (x**3).sum()


def accumulated(x, weight):
    def part(total, x):
        return total + jax.grad(lambda w: (layer(x, w) ** 3).sum())(weight), None

    return jax.lax.scan(part, jnp.zeros_like(weight), x.reshape(2, 2, *x.shape[1:]))[0]


def sharded(x, weight):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(layer, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)(x, weight)


PROGRAMS = {
    "scan": in_a_scan,
    "remat": jax.checkpoint(layer),
    "remat in scan": lambda x, w: jax.lax.scan(lambda x, _: (jax.checkpoint(layer)(x, w), None), x, None, LAYERS)[0],
    "vmap": lambda x, w: jax.vmap(lambda x: layer(x[None], w)[0])(x),
    "shard_map": sharded,
    "gradient accumulation": accumulated,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_flow_holds_under(program):
    fn = PROGRAMS[program]
    step = jax.jit(fn if program == "gradient accumulation" else jax.grad(lambda *a: (fn(*a) ** 3).sum(), (0, 1)))
    args = (X, WEIGHT)
    lowered = step.lower(*args)
    result = autotune_lowered(ConfigSelectorChain(tuner=Picks()), lowered, strict=True)
    assert {f"ejkernel_ops#{e.op_id_v}:{e.call_key}" for e in result.entries} == set(find_labels_in_lowered(lowered))
    assert {e.op_id_v.partition("@")[0] for e in result.entries} == set(WITH_NORMS)
    wanted = lowered.compile()(*args)
    with result:
        again = step.lower(*args)
    assert all(":heuristic" not in site.config for site in call_sites(again))
    close(again.compile()(*args), wanted, 1e-4)


def test_what_many_layers_share_is_tuned_once():
    result = autotune_lowered(ConfigSelectorChain(tuner=Picks()), jax.jit(jax.grad(unrolled, (0, 1))).lower(X, WEIGHT))
    assert {entry.op_id_v.partition("@")[0] for entry in result.entries} == set(WITH_NORMS)
    assert len(result.entries) == len(WITH_NORMS)
    assert {entry.count for entry in result.entries if not entry.op_id_v.startswith("linear")} == {LAYERS}


# Directions are apart


def test_changing_only_the_backward_entry_changes_only_the_backward():
    step = jax.jit(jax.value_and_grad(SLOPE))
    labels = [split_label(text) for text in find_labels_in_lowered(step.lower(ONE))]
    (backward,) = [Entry(op, key, 7) for op, key in labels if "_bwd@" in op]
    (forward,) = [Entry(op, key, 5) for op, key in labels if "_bwd@" not in op]
    assert step(ONE) == (1, 1)
    with AutotuningResult(device_fingerprint(), (backward,)):
        assert step(ONE) == (1, 7)
    with AutotuningResult(device_fingerprint(), (forward,)):
        assert step(ONE) == (5, 1)
    assert step(ONE) == (1, 1)


# Contexts and overrides


def test_results_retrace_what_they_change_and_nothing_else():
    step, other = told(), Traced(lambda x: x + 1)
    result = AutotuningResult(KEY.device, (Entry(KEY.op_id_v, KEY.call_key, 5),))
    assert (step(ONE), other(ONE)) == (1, 2)
    for _ in range(3):
        with result:
            assert step(ONE) == 5
            with AutotuningResult(KEY.device, (Entry(KEY.op_id_v, KEY.call_key, 6),)):
                assert step(ONE) == 6
        assert (step(ONE), other(ONE)) == (1, 2)
    assert (step.traces, other.traces) == (3, 1)


@pytest.mark.parametrize("mode", ["auto", "cached", "pinned", "off"])
def test_an_explicit_config_beats_all_under_every_policy_and_is_not_stored(mode):
    selector = ConfigSelectorChain()
    selector.cache.put(*KEY, 4)
    with overlay_cache({KEY: 5}), policy_override(mode=mode):
        both = jax.jit(lambda x: (TOLD(x, cfg=7), TOLD(x, cfg=8)))  # two layers of one shape
        assert both(ONE) == (7, 8)
    assert selector.cache.items() == [(KEY, 4)]


# Nothing is timed inside a trace


def test_under_jit_nothing_is_timed_and_the_program_is_one_call():
    selector = ConfigSelectorChain(autotune=True, tuner=None)
    selector._tuner = type("Never", (), {"tune": lambda *a, **k: pytest.fail("timed inside a trace")})()
    run = Executor(selector)
    assert len(jax.make_jaxpr(lambda x: run(TOLD, x))(ONE).eqns) == 1
    lowered = jax.jit(jax.grad(lambda x: run(SLOPE, x))).lower(ONE)
    assert configs_of(lowered)["test_slope_bwd"].startswith("1 ")


# A heuristic that was compared with nothing is not stored as tuned


@pytest.mark.filterwarnings("ignore:.*keep their heuristic")
def test_where_every_other_candidate_fails_the_heuristic_runs_and_nothing_is_stored(monkeypatch, tmp_path):
    default = FakeConfig("right", 0.0)
    monkeypatch.setattr(type(FAKE), "candidates", (FakeConfig("fails"), FakeConfig("zeros", 0.0)))
    monkeypatch.setattr(type(FAKE), "default", default)
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path), tuner=Autotuner(num_iters=1))
    lowered = jax.jit(FAKE).lower(np.ones((4, 3), np.float32))
    (entry,) = autotune_lowered(selector, lowered).entries
    assert (entry.cfg, entry.source) == (default, "heuristic")
    assert [t.status for t in entry.trials] == ["timed", "compile_failed", "wrong"]
    assert selector.cache.items() == list(tmp_path.iterdir()) == []
    with policy_override(selector, autotune=True):
        Executor(selector)(FAKE, np.ones((4, 3), np.float32))
    assert selector.cache.items() == []


# Processes that take one result have one program

SCRIPT = """
import hashlib, json, sys
import jax, numpy as np
from ejkernel_ops import Autotuner, AutotuningResult, ConfigSelectorChain, autotune_lowered, flash_attention

def loss(q):
    return (flash_attention(q, q, q, causal=True) ** 2).sum()

step, q = jax.jit(jax.grad(loss)), np.ones((1, 300, 1, 8), np.float32)
path = sys.argv[1]
if sys.argv[2] == "tune":
    autotune_lowered(ConfigSelectorChain(tuner=Autotuner(num_iters=1)), step.lower(q)).save(path)
result = AutotuningResult.load(path)
with result:
    text = step.lower(q).as_text()
print(json.dumps([result.digest, hashlib.sha256(text.encode()).hexdigest()]))
"""


def test_processes_that_take_one_result_run_one_program(tmp_path):
    def run(role):
        paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
        env = os.environ | {"PYTHONPATH": paths, "EJKERNEL_CACHE_DIR": str(tmp_path / role)}
        command = [sys.executable, "-c", SCRIPT, tmp_path / "result.json", role]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run("tune") == run("take") == run("take too")


# What is recorded keeps nothing alive


def test_no_array_lives_on_in_the_registry():
    x = jnp.ones((64, 64)) * 2
    dead = weakref.ref(x)
    linear(x, x)
    jax.jit(jax.grad(lambda x: linear(x, x).sum())).lower(x)
    assert recorded()
    del x
    gc.collect()
    assert dead() is None
