"""One snapshot decides: overlays and policies reach jitted functions at once, leave no trace, and never mix."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import os
import threading
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    AttentionConfig,
    AutotunePolicy,
    BwdParams,
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    Key,
    LinearConfig,
    PersistentCache,
    UnsupportedError,
    default_selector,
    device_fingerprint,
    flash_attention,
    linear,
    overlay_cache,
    policy_override,
    set_default_selector,
)
from ejkernel_ops.kernels import LINEAR
from ejkernel_ops.utils.meta import call_sites

X, W = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)


class Told(Kernel):
    """Returns its config, so that it is plain which one was used."""

    name = "test_told"

    def run(self, x, *, cfg):
        return x * 0 + cfg

    def heuristic_cfg(self, inv):
        return 1


class SlopeBackward(Told):
    name = "test_slope_bwd"

    def run(self, x, out, dout, *, cfg, needs):
        return dout * cfg


class Slope(Told):
    """The gradient is the config of the backward."""

    name = "test_slope"
    backward = SlopeBackward()


TOLD, SLOPE = Told(), Slope()
ONE = np.float32(1)


def key_of(kernel, *args, **kwargs):
    inv = Invocation(kernel, args, kwargs)
    return Key(inv.device_fingerprint, inv.op_id_v, inv.call_key)


KEY = key_of(TOLD, ONE)
SLOPE_KEY = Key(device_fingerprint(), "test_slope@v1", key_of(SLOPE, ONE).call_key)


class Traced:
    """A jitted function that counts how often it is traced."""

    def __init__(self, fn):
        self.traces = 0

        def counted(*args):
            self.traces += 1
            return fn(*args)

        self.jitted = jax.jit(counted)

    def __call__(self, *args):
        return self.jitted(*args)


def told():
    return Traced(TOLD)


# Retraces


def test_a_compiled_function_retraces_once_for_each_new_content_and_never_back():
    step, traces = told(), []

    def call(wanted):
        assert step(ONE) == wanted
        traces.append(step.traces)

    five = overlay_cache({KEY: 5})
    call(1)
    with five:
        call(5)
        call(5)
    call(1)
    with overlay_cache({KEY: 5}):  # equal content, another object
        call(5)
        with overlay_cache({KEY: 7}):
            call(7)
            with five:
                call(5)
        call(5)
    with overlay_cache({KEY: 7}):
        call(7)
    cache = ConfigCache()
    cache.put(*KEY, 5)
    with overlay_cache(cache), overlay_cache({}):
        call(5)
    call(1)
    assert traces == [1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]


def test_equal_configs_of_other_types_are_other_content():
    step = Traced(lambda x: TOLD(x) + 0.5)
    found = []
    for config in (1, True, 1.0):
        with overlay_cache({KEY: config}):
            found.append(step(ONE))
    with overlay_cache({KEY: 1}), overlay_cache({KEY: True}):
        found.append(step(ONE))
    assert found == [1.5] * 4
    assert step.traces == 3


def test_what_is_called_outside_the_with_never_retraces():
    step, other = told(), Traced(lambda x: x + 1)
    other(ONE)
    for config in (3, 4, 5):
        with overlay_cache({KEY: config}):
            assert step(ONE) == config
        other(ONE)
    assert other.traces == 1


def test_policies_retrace_once_for_each_new_content():
    step = told()
    default_selector().cache.put(*KEY, 9)
    for mode, wanted in (("auto", 9), ("off", 1), ("cached", 9), ("off", 1), ("auto", 9)):
        with policy_override(mode=mode):
            assert step(ONE) == wanted
    assert step(ONE) == 9
    assert step.traces == 4


def test_configs_that_are_put_later_do_not_retrace_but_new_traces_see_them():
    step = told()
    assert step(ONE) == 1
    default_selector().cache.put(*KEY, 6)
    assert (step(ONE), step.traces) == (1, 1)
    assert told()(ONE) == TOLD(ONE) == 6


def test_overlay_is_copied_when_it_is_made():
    configs = {KEY: 5}
    overlay = overlay_cache(configs)
    configs[KEY] = 6
    with overlay:
        assert told()(ONE) == 5


@pytest.mark.parametrize("key", ["key", ("a", "b"), ("a", "b", 3), 7])
def test_overlay_refuses_other_keys(key):
    with pytest.raises(ConfigError, match="overlay key is"):
        overlay_cache({key: 5})


def test_overlay_of_a_cache_takes_only_keys_of_calls():
    cache = ConfigCache()
    cache.put("anything", 4)
    cache.put(KEY, 5)
    assert overlay_cache(cache).configs == {KEY: 5}


def test_overlay_refuses_a_config_without_a_value_based_form():
    with pytest.raises(ConfigError, match="overlay"), overlay_cache({KEY: object()}):
        pass


# What is used


def configs_of(lowered):
    """The config of each call, by kernel."""
    return {site.label.partition("#")[2].partition("@")[0]: site.config for site in call_sites(lowered)}


def test_overlay_of_real_ops_is_what_their_programs_use():
    query, key = np.ones((1, 8, 2, 4), np.float32), np.ones((1, 8, 1, 4), np.float32)
    grad = jax.jit(jax.grad(lambda q, k: flash_attention(q, k, k).sum()))
    keys = {}
    for site in call_sites(grad.lower(query, key)):
        op, _, digits = site.label.partition("#")[2].partition(":")
        keys[op] = Key(device_fingerprint(), op, digits)
    overlay = {
        keys["flash_attention@v1"]: AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=2, kv_blocksize=4)),
        keys["flash_attention_bwd@v1"]: AttentionConfig(backend="xla", bwd=BwdParams(q_blocksize=4, kv_blocksize=2)),
    }
    wanted = grad(query, key)
    with overlay_cache(overlay):
        assert configs_of(grad.lower(query, key)) == {
            "flash_attention": "backend=xla fwd.q_blocksize=2 fwd.kv_blocksize=4 | "
            "backend:overlay,fwd.kv_blocksize:overlay,fwd.q_blocksize:overlay | ",
            "flash_attention_bwd": "backend=xla bwd.q_blocksize=4 bwd.kv_blocksize=2 | "
            "backend:overlay,bwd.kv_blocksize:overlay,bwd.q_blocksize:overlay | ",
        }
        np.testing.assert_allclose(grad(query, key), wanted, atol=1e-6)


def test_a_pullback_that_runs_outside_the_with_uses_the_configs_of_the_inside():
    backward = Key(device_fingerprint(), "test_slope_bwd@v1", "")
    out, lowered = SLOPE(ONE), jax.jit(jax.grad(SLOPE)).lower(ONE)
    assert out == jax.grad(SLOPE)(ONE) == 1
    (digits,) = [site.label[-16:] for site in call_sites(lowered) if "_bwd@" in site.label]
    overlay = overlay_cache({backward._replace(call_key=digits): 3, SLOPE_KEY: 2})
    with overlay:
        out, pullback = jax.vjp(SLOPE, ONE)
        jitted, later = jax.vjp(jax.jit(SLOPE), ONE)
    assert out == jitted == 2
    assert pullback(ONE) == later(ONE) == (3,)
    out, pullback = jax.vjp(SLOPE, ONE)
    with overlay:
        assert pullback(ONE) == (1,)


def test_short_lived_overlays_are_never_mistaken_for_each_other():
    """An identity in the key of compiled programs would be reused by the next object at the same address."""
    step = told()
    for number in range(200):
        config = number % 7
        with overlay_cache({KEY: config}):
            assert step(ONE) == config
        if config == 0:
            gc.collect()
    assert step.traces == 7


def test_one_object_may_be_entered_twice_and_inside_itself():
    step, five = told(), overlay_cache({KEY: 5})
    with five, five:
        assert step(ONE) == 5
        with five as again:
            assert again is five
        assert step(ONE) == 5
    assert step(ONE) == 1
    with five:
        assert step(ONE) == 5


def test_an_exception_inside_restores_what_was():
    step = told()
    with pytest.raises(KeyError), overlay_cache({KEY: 5}), policy_override(mode="cached"):
        raise KeyError
    assert step(ONE) == 1


def test_threads_have_overlays_of_their_own():
    five, step = overlay_cache({KEY: 5}), told()

    def work(number):
        found = [float(step(ONE))]
        with overlay_cache({KEY: 100 + number}):
            found += [float(step(ONE)) for _ in range(20)]
            with five:
                found.append(float(step(ONE)))
        return [*found, float(step(ONE))]

    with five, concurrent.futures.ThreadPoolExecutor(32) as pool:
        results = list(pool.map(work, range(32)))
        assert step(ONE) == 5
    assert results == [[1, *[100 + n] * 20, 5, 1] for n in range(32)]


def test_entering_leaves_nothing_behind_that_makes_calls_slower():
    step = jax.jit(lambda x: x + 1)

    def best():
        times = []
        for _ in range(7):
            start = time.process_time()
            for _ in range(300):
                step(ONE)
            times.append(time.process_time() - start)
        return min(times)

    step(ONE)
    before = best()
    for config in range(3000):
        with overlay_cache({KEY: config}):
            pass
    assert best() < 1.5 * before


@pytest.mark.parametrize("make", [lambda: overlay_cache({KEY: 5}), lambda: policy_override(mode="off")])
def test_leaving_in_another_order_is_an_error_and_breaks_nothing(make):
    outer, inner, step = make(), overlay_cache({KEY: 7}), told()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ConfigError, match="left in another order than it was entered"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="another order"):
        outer.__exit__(None, None, None)
    assert step(ONE) == 1


# Policies


def test_unknown_policy_fields_and_values_are_refused_with_a_hint():
    with pytest.raises(ConfigError, match=r"unknown policy field 'mod'; did you mean 'mode'\?"):
        policy_override(mod="off")
    with pytest.raises(ConfigError, match=r"unknown policy field 'zzz'; known: \['mode', 'tune_on_call'\]"):
        policy_override(zzz=1)
    with pytest.raises(ConfigError, match=r"mode is 'of'; expected one of auto, cached, pinned, off"):
        policy_override(mode="of")
    with pytest.raises(ConfigError, match="tune_on_call is 1"):
        AutotunePolicy(tune_on_call=1)
    assert policy_override(autotune=False).changes == policy_override(tune_on_call=False).changes


def test_selector_spells_tuning_on_calls_either_way():
    assert ConfigSelectorChain(autotune=True).policy == AutotunePolicy(tune_on_call=True)
    assert ConfigSelectorChain(policy=AutotunePolicy(mode="cached"), autotune=False).policy.mode == "cached"


@pytest.fixture
def selector(tmp_path):
    """The default selector, with a folder."""
    chosen = ConfigSelectorChain(persistent=PersistentCache(tmp_path, cfg_type=int))
    set_default_selector(chosen)
    return chosen


TIERS = ["call", "overlay", "memory", "disk", "heuristic"]  # each gives its position, counted from 10


@pytest.mark.parametrize(("mode", "allowed"), [
    ("auto", TIERS), ("cached", TIERS), ("pinned", TIERS[:2]), ("off", ["call", "heuristic"])
])  # fmt: skip
def test_modes_use_their_tiers_in_order(mode, allowed, selector):
    class Tiers(Told):
        def heuristic_cfg(self, inv):
            return 14

    kernel = Tiers(f"test_tiers_{mode}")
    key, config = key_of(kernel, ONE), dict(zip(TIERS, range(10, 15)))
    for present in range(len(TIERS)):  # drop the strongest tier, one after the other
        given = TIERS[present:]
        selector.cache.clear()
        selector.persistent = PersistentCache(selector.persistent.path / str(present), cfg_type=int)
        if "memory" in given:
            selector.cache.put(key, config["memory"])
        if "disk" in given:
            selector.persistent.put(key, config["disk"])
        wanted = next((tier for tier in given if tier in allowed), None)
        overlay = {key: config["overlay"]} if "overlay" in given else {}
        with policy_override(mode=mode), overlay_cache(overlay):
            call = jax.jit(lambda x, cfg=config["call"] if "call" in given else None: kernel(x, cfg=cfg))
            if wanted is None:
                with pytest.raises(
                    ConfigError, match=rf"policy is pinned, and .* has no config \(key {key.call_key}\)"
                ):
                    call(ONE)
            else:
                assert call(ONE) == config[wanted]


def test_override_for_one_selector_leaves_others_alone():
    mine, other = (ConfigSelectorChain() for _ in range(2))
    for each in (mine, other):
        each.cache.put(KEY, 8)
    with policy_override(mine, mode="off"):
        assert (Executor(mine)(TOLD, ONE), Executor(other)(TOLD, ONE)) == (1, 8)
        with policy_override(mode="auto"):
            assert Executor(mine)(TOLD, ONE) == 8
        with policy_override(mode="off"):
            assert Executor(other)(TOLD, ONE) == 1
    assert Executor(mine)(TOLD, ONE) == 8


def test_explicit_config_beats_the_overlay_and_is_never_stored(selector):
    with overlay_cache({KEY: 5}):
        assert TOLD(ONE, cfg=7) == jax.jit(lambda x: TOLD(x, cfg=7))(ONE) == 7
        assert TOLD(ONE) == 5
    assert TOLD(ONE) == 1  # the heuristic, which is not stored either
    assert len(selector.cache) == 0
    assert not list(selector.persistent.path.iterdir())
    assert selector.stats["call"] >= 1
    assert selector.stats["heuristic"] >= 1


def test_first_answer_sticks_until_something_is_stored(selector):
    (path := selector.persistent).put(KEY, 4)
    assert TOLD(ONE) == 4
    (path.path / next(path.path.iterdir()).name).unlink()
    assert jax.jit(lambda x: TOLD(x))(ONE) == 4
    selector.cache.put("another key", 1)
    assert TOLD(ONE) == 1


class Tuner:
    """Finds 42 for everything, and says what it was asked for."""

    def __init__(self):
        self.asked = []

    def tune(self, inv, on_event=None):
        self.asked.append(inv.op_id_v)
        return types.SimpleNamespace(cfg=42)


def test_what_was_chosen_inside_a_trace_does_not_stop_tuning_outside():
    tuner, events = Tuner(), []
    chain = ConfigSelectorChain(tuner=tuner, autotune=True, on_event=lambda name, **_: events.append(name))
    inv = Invocation(TOLD, (ONE,))

    def inside(x):
        assert chain.choose(inv) == 1
        return x

    jax.jit(inside)(ONE)
    assert (tuner.asked, events) == ([], ["untuned", "choice"])
    with policy_override(autotune=False):
        assert chain.choose(inv) == 1
    assert [chain.choose(inv) for _ in range(3)] == [42] * 3
    assert tuner.asked == ["test_told@v1"]
    assert jax.jit(lambda x: Executor(chain)(TOLD, x))(ONE) == 42


def test_a_default_selector_can_be_replaced_and_put_back():
    mine = ConfigSelectorChain()
    mine.cache.put(KEY, 8)
    before = set_default_selector(mine)
    assert default_selector() is mine
    assert TOLD(ONE) == told()(ONE) == 8
    assert set_default_selector(before) is mine
    assert TOLD(ONE) == told()(ONE) == 1
    with pytest.raises(ConfigError, match="expected something with a method choose"):
        set_default_selector(3)


def test_any_object_with_choose_is_a_chooser():
    class Fixed:
        def choose(self, inv, kernel):
            return 11

    fixed = Fixed()
    assert Executor(fixed)(TOLD, ONE) == 11
    set_default_selector(fixed)
    assert TOLD(ONE) == 11


# Partial configs

PARTIAL = LinearConfig(fwd=FwdParams(blocksize_m=2))


def test_fields_come_from_different_tiers_and_say_from_where():
    lowered = jax.jit(lambda x, w: linear(x, w, config=PARTIAL)).lower(X, W)
    assert configs_of(lowered) == {
        "linear": "backend=xla fwd.blocksize_m=2 | backend:heuristic,fwd.blocksize_m:call | "
    }
    key = Key(device_fingerprint(), "linear@v1", call_sites(lowered)[0].label[-16:])
    full = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=1))
    with overlay_cache({key: full}):
        assert configs_of(jax.jit(lambda x, w: linear(x, w, config=PARTIAL)).lower(X, W)) == {
            "linear": "backend=xla fwd.blocksize_m=2 | backend:overlay,fwd.blocksize_m:call | "
        }
        assert configs_of(jax.jit(lambda x, w: linear(x, w, backend="xla")).lower(X, W)) == {
            "linear": "backend=xla fwd.blocksize_m=1 | backend:call,fwd.blocksize_m:overlay | "
        }
    with overlay_cache({key: dataclasses.replace(full, backend="triton")}):  # not eligible here: passed over, visibly
        (config,) = configs_of(jax.jit(lambda x, w: linear(x, w, config=PARTIAL)).lower(X, W)).values()
        assert config.startswith(
            "backend=xla fwd.blocksize_m=2 | backend:heuristic,fwd.blocksize_m:call | overlay passed over"
        )
        (config,) = configs_of(jax.jit(lambda x, w: linear(x, w, backend="xla")).lower(X, W)).values()
        assert config.endswith("| overlay is for triton, xla was asked for")


def test_one_config_serves_both_directions():
    config = LinearConfig(fwd=FwdParams(blocksize_m=2), bwd=BwdParams(blocksize_m=3))
    lowered = jax.jit(jax.grad(lambda w: linear(X, w, config=config).sum())).lower(W)
    assert configs_of(lowered) == {
        "linear": "backend=xla fwd.blocksize_m=2 | backend:heuristic,fwd.blocksize_m:call | ",
        "linear_bwd": "backend=xla bwd.blocksize_m=3 | backend:heuristic,bwd.blocksize_m:call | ",
    }


def test_back_end_alone_is_completed_by_the_heuristic():
    np.testing.assert_allclose(linear(X, W, backend="xla"), X @ W)
    query = np.ones((1, 4, 2, 4), np.float32)
    np.testing.assert_allclose(
        jax.grad(lambda q: flash_attention(q, q, q, backend="xla").sum())(query).shape, query.shape
    )


@pytest.mark.parametrize(("config", "message"), [
    (LinearConfig(fwd=FwdParams(num_warps=4)), r"linear sets fwd.num_warps=4, which the xla back end does not"),
    (LinearConfig(backend="xla", fwd=FwdParams(q_blocksize=4)), r"sets fwd.q_blocksize=4.*it takes fwd.blocksize_m"),
    (AttentionConfig(backend="xla"), r"config is AttentionConfig.*expected a LinearConfig"),
    ("xla", r"config is 'xla'; expected a LinearConfig"),
])  # fmt: skip
def test_config_that_the_back_end_cannot_take_is_an_error(config, message):
    with pytest.raises(ConfigError, match=message):
        linear(X, W, config=config)


@pytest.mark.parametrize(("backend", "error", "message"), [
    ("triton", UnsupportedError, r"linear@v1: backend='triton' was asked for, but "),
    ("cudnn", UnsupportedError, r"backend='cudnn' was asked for, but "),
    ("pallas", UnsupportedError, r"backend='pallas' was asked for, but "),
    ("cuda", ConfigError, r"backend is 'cuda'; expected None or one of"),
])  # fmt: skip
def test_explicit_back_end_that_is_not_there_is_an_error(backend, error, message):
    with pytest.raises(error, match=message):
        linear(X, W, backend=backend)


def test_configs_by_name_of_the_kernel():
    config = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2))
    statics = dict(activation=None, weight_layout="io", out_dtype=np.dtype("float32"), precision=None)
    lowered = jax.jit(lambda x, w: LINEAR(x, w, cfg={"linear": config}, **statics)[0]).lower(X, W)
    assert configs_of(lowered)["linear"].startswith("backend=xla fwd.blocksize_m=2 |")
    with pytest.raises(ConfigError, match=r"cfg names \['lin'\]; expected some of \['linear', 'linear_bwd'\]"):
        LINEAR(X, W, cfg={"lin": config}, **statics)
    with pytest.raises(ConfigError, match="cannot be hashed"):
        TOLD(ONE, cfg=[1])


@dataclasses.dataclass(frozen=True)
class Optional:
    size: int = 3
    extra: int | None = None


def test_explicit_config_is_enough_for_a_kernel_without_a_heuristic():
    class Bare(Kernel):
        def run(self, x, *, cfg):
            return x * cfg.size

    kernel = Bare("test_bare")
    assert kernel(ONE, cfg=Optional()) == 3
    with policy_override(mode="pinned"):
        assert kernel(ONE, cfg=Optional(4)) == 4
    with pytest.raises(ConfigError, match=r"test_bare@v1 defines no heuristic_cfg; pass cfg="):
        kernel(ONE)


@dataclasses.dataclass(frozen=True)
class TwoEnds:
    backend: str | None = None
    size: int | None = None


def test_fields_that_no_tier_can_fill_are_an_error_and_not_a_crash():
    class Half(Kernel):
        config_cls, fields = TwoEnds, {"xla": ("size",), "pallas": ("size",)}

        def run_xla(self, x, *, cfg):
            return x * cfg.size

        run_pallas = run_xla

        def why_not(self, inv, backend):
            return None

        def heuristic_cfg(self, inv):
            return TwoEnds("xla", 3)

    kernel = Half("test_half_heuristic")
    assert kernel(ONE, cfg=TwoEnds("pallas", 2)) == 2
    assert kernel(ONE) == 3
    with pytest.raises(
        ConfigError, match=r"size=None\) leaves fields open .*heuristic is for xla, pallas was asked for"
    ):
        kernel(ONE, cfg=TwoEnds("pallas"))


def test_configs_of_another_type_are_passed_over():
    lowered = jax.jit(linear).lower(X, W)
    key = Key(device_fingerprint(), "linear@v1", call_sites(lowered)[0].label[-16:])
    with overlay_cache({key: 3}):
        (config,) = configs_of(jax.jit(linear).lower(X, W)).values()
    assert config.endswith(
        "backend:heuristic,fwd.blocksize_m:heuristic | overlay passed over: it is a int, not a LinearConfig"
    )


def test_configs_need_not_be_hashable_to_be_stored(selector):
    class Mapped(Kernel):
        def run(self, x, *, cfg):
            return x * cfg["size"]

    kernel = Mapped("test_mapped")
    with overlay_cache({key_of(kernel, ONE): {"size": 5}}):
        assert jax.jit(kernel)(ONE) == 5
    selector.cache.put(key_of(kernel, ONE), {"size": 6})
    assert jax.jit(kernel)(ONE) == 6


# Caches


def test_memory_cache_takes_both_call_forms():
    cache = ConfigCache()
    cache.put("cpu|cpu", "op@v1", "00", 3)
    cache.put(("any", 7), 4)
    assert cache.get("cpu|cpu", "op@v1", "00") == cache.get(Key("cpu|cpu", "op@v1", "00")) == 3
    assert cache.get(("any", 7)) == 4
    assert (("any", 7) in cache, "other" in cache, len(cache)) == (True, False, 2)
    assert cache.get("other") is None
    with pytest.raises(TypeError, match="expected one key, or device, op_id_v and call_key"):
        cache.get("cpu|cpu", "op@v1")
    with pytest.raises(TypeError, match="expected one key"):
        cache.put("cpu|cpu", "op@v1", 3)
    with pytest.raises(ConfigError, match="cfg is None"):
        cache.put("key", None)
    cache.clear()
    assert cache.keys() == cache.items() == []


def test_memory_cache_is_safe_in_threads():
    cache = ConfigCache()

    def work(number):
        for i in range(200):
            cache.put(f"{number}-{i}", i)
            assert cache.get(f"{number}-{i}") == i
            cache.items()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert len(cache) == 3200


def disk_files(cache):
    return sorted(p.name for p in cache.path.iterdir())


def test_disk_cache_takes_both_call_forms_and_reads_back_typed_configs(tmp_path):
    cache = PersistentCache(tmp_path / "new" / "folder", cfg_type=dict)
    config = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2))
    assert cache.get("cpu|cpu", "linear@v1", "00") is None
    cache.put("cpu|cpu", "linear@v1", "00", config)
    cache.put({"any": 7}, {"size": 4})
    again = PersistentCache(tmp_path / "new" / "folder", cfg_type=dict)
    assert again.get("cpu|cpu", "linear@v1", "00") == again.get(Key("cpu|cpu", "linear@v1", "00")) == config
    assert again.get({"any": 7}) == {"size": 4}
    assert ({"any": 7} in again, "other" in again) == (True, False)
    assert all(len(name) == 69 and name.endswith(".json") for name in disk_files(cache))
    assert (tmp_path / "new").stat().st_mode & 0o077 in (0, 0o055)
    with pytest.raises(ConfigError, match=r"cache key is a builtins\.object"):
        cache.put(object(), 3)
    with pytest.raises(ConfigError, match="cfg is None"):
        cache.put("key", None)
    with pytest.raises(ConfigError, match="no JSON form"):
        cache.put("key", object())


def entry(tmp_path):
    """A cache with one entry, its file, and the text of it."""
    cache = PersistentCache(tmp_path, cfg_type=int)
    cache.put("key", 32)
    (file,) = tmp_path.iterdir()
    return PersistentCache(tmp_path, cfg_type=int), file, file.read_text()


DAMAGE = {
    "torn": lambda file, text: file.write_text(text[: len(text) // 2]),
    "empty": lambda file, text: file.write_text(""),
    "garbage": lambda file, text: file.write_bytes(bytes(range(256))),
    "one digit": lambda file, text: file.write_text(text.replace("32", "33")),
    "other schema": lambda file, text: file.write_text(text.replace('"schema": 1', '"schema": 2')),
    "no checksum": lambda file, text: file.write_text('{"schema": 1, "key": "key", "config": 32}'),
    "a list": lambda file, text: file.write_text("[1, 2]"),
    "deep": lambda file, text: file.write_text("[" * 200_000),
    "huge": lambda file, text: file.write_text(text + " " * (1 << 20)),
    "not a number": lambda file, text: file.write_text(text.replace("32", "NaN")),
    "beyond floats": lambda file, text: file.write_text(text.replace("32", "1e999")),
    "many digits": lambda file, text: file.write_text(text.replace("32", "9" * 5000)),
    "name twice": lambda file, text: file.write_text(text.replace('"config"', '"config": 31,\n"config"')),
    "a folder": lambda file, text: (file.unlink(), file.mkdir()),
    "a pipe": lambda file, text: (file.unlink(), os.mkfifo(file)),
    "a link": lambda file, text: (file.rename(file.with_suffix(".x")), file.symlink_to(file.with_suffix(".x"))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_or_foreign_file_is_a_miss_and_one_warning(kind, tmp_path):
    cache, file, text = entry(tmp_path)
    DAMAGE[kind](file, text)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.warns(UserWarning, match="config cache: could not read") as caught:
        assert [cache.get("key") for _ in range(5)] == [None] * 5
    assert len(caught) == 1
    assert cache.stats == {"read_failed": 5}
    assert len(os.listdir("/proc/self/fd")) == opened
    if kind not in ("a folder", "a link"):
        cache.put("key", 32)  # repairs it
        assert cache.get("key") == 32


def test_entry_of_another_key_or_type_is_a_miss(tmp_path):
    cache, file, text = entry(tmp_path)
    cache.put("other", 33)
    other = next(p for p in tmp_path.iterdir() if p != file)
    other.write_text(text)
    with pytest.warns(UserWarning, match="holds another key"):
        assert cache.get("other") is None
    with pytest.warns(UserWarning, match="not a str"):
        assert PersistentCache(tmp_path, cfg_type=str).get("key") is None
    with pytest.warns(UserWarning, match="the config type of 'key' is not known"):
        assert PersistentCache(tmp_path).get("key") is None


def test_entry_with_an_unknown_field_or_an_illegal_value_is_a_miss(tmp_path):
    for config in ({"backend": "xla", "blocksize": 3}, {"backend": "cuda"}, {"fwd": {"blocksize_m": 0}}, {"fwd": 3}):
        PersistentCache(tmp_path, cfg_type=dict).put("cpu|cpu", "linear@v1", "00", config)
        cache = PersistentCache(tmp_path)
        with pytest.warns(UserWarning, match="could not read .* (unknown field|not a LinearConfig)"):
            assert cache.get("cpu|cpu", "linear@v1", "00") is None


def test_config_on_disk_of_a_back_end_that_is_not_here_is_passed_over(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    statics = dict(activation=None, weight_layout="io", out_dtype=np.dtype("float32"), precision=None)
    inv = Invocation(LINEAR, (X, W, None), statics)
    selector.persistent.put(inv.device_fingerprint, inv.op_id_v, inv.call_key, LinearConfig(backend="triton"))
    assert selector.choose(inv).backend == "xla"


@pytest.mark.parametrize("path", ["/proc/none/cache", "/dev/null/cache"])
def test_folder_that_cannot_be_written_costs_one_warning(path):
    cache = PersistentCache(path, cfg_type=int)
    with pytest.warns(UserWarning, match="config cache: could not write") as caught:
        [cache.put(f"key {number}", 32) for number in range(3)]
    assert len(caught) == 1
    assert cache.stats == {"write_failed": 3}
    with warnings.catch_warnings(), contextlib.suppress(UserWarning):
        warnings.simplefilter("error")
        assert cache.get("key 0") is None


def test_models_run_on_while_their_cache_is_broken(tmp_path):
    (tmp_path / "file").write_text("")
    set_default_selector(ConfigSelectorChain(persistent=PersistentCache(tmp_path / "file" / "cache")))
    with pytest.warns(UserWarning, match="config cache: could not read"):
        np.testing.assert_allclose(linear(X, W), X @ W)


def test_reading_never_makes_a_folder_and_the_environment_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "given"))
    cache = PersistentCache(cfg_type=int)
    assert cache.get("key") is None
    assert not (tmp_path / "given").exists()
    cache.put("key", 3)
    assert cache.path == tmp_path / "given"
    assert PersistentCache(cfg_type=int).get("key") == 3


def test_no_writer_in_a_crowd_loses_or_tears_an_entry(tmp_path):
    stop, torn = threading.Event(), []

    def read():
        cache = PersistentCache(tmp_path, cfg_type=int)
        while not stop.is_set():
            torn.append(cache.get("shared") not in (None, *range(8)))

    def write(number):
        cache = PersistentCache(tmp_path, cfg_type=int)
        for i in range(25):
            cache.put(f"{number}-{i}", i)
            cache.put("shared", number)

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        reader = pool.submit(read)
        list(pool.map(write, range(8)))
        stop.set()
        reader.result()
    assert not any(torn)
    cache = PersistentCache(tmp_path, cfg_type=int)
    assert [cache.get(f"{n}-{i}") for n in range(8) for i in range(25)] == list(range(25)) * 8
    assert len(list(tmp_path.iterdir())) == 201


# The snapshot under JAX's own machinery


def test_snapshot_travels_into_every_transform():
    @jax.jit
    def step(x):
        def layer(carry, _):
            return jax.vmap(jax.checkpoint(lambda x: TOLD(x) * x))(carry), None

        return jax.grad(lambda x: jax.lax.scan(layer, x, None, length=2)[0].sum())(x)

    x = jnp.ones(3)
    assert step(x).tolist() == [1, 1, 1]
    with overlay_cache({KEY: 3}):
        assert step(x).tolist() == [9, 9, 9]
    assert step(x).tolist() == [1, 1, 1]
