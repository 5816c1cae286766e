"""A choice takes each field from the strongest tier that the policy allows, and says from which."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from ejkernel_ops import (
    AttentionConfig,
    AutotunePolicy,
    BwdParams,
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

from .told import KEY, ONE, SLOPE, TOLD, Told, configs_of, key_of, told

X, W = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)


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


@pytest.mark.parametrize("cfg", [[2], "2", True, 2.5], ids=repr)
def test_a_kernel_that_declares_no_type_takes_from_caches_and_files_that_of_its_heuristic(cfg, selector):
    selector.cache.put(KEY, cfg)
    selector.persistent = PersistentCache(selector.persistent.path)
    selector.persistent.put(KEY, cfg)
    with overlay_cache({KEY: cfg}):
        assert told()(ONE) == 1
    selector.persistent.put(KEY, 7)
    assert told()(ONE) == 7
    assert jax.jit(lambda x: TOLD(x, cfg=2.5))(ONE) == 2.5  # what a person gives is theirs


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


def test_eager_calls_are_tuned_once_in_each_direction_and_jitted_ones_never():
    tuner = Tuner()
    set_default_selector(ConfigSelectorChain(tuner=tuner, autotune=True))
    assert jax.jit(SLOPE)(ONE) == 1
    with policy_override(autotune=False):
        assert SLOPE(ONE) == 1
    assert tuner.asked == []
    assert [SLOPE(ONE) for _ in range(3)] == [42] * 3
    assert jax.grad(SLOPE)(ONE) == jax.jit(jax.grad(SLOPE))(ONE) == 42
    assert tuner.asked == ["test_slope@v1", "test_slope_bwd@v1"]


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
    with pytest.raises(ConfigError, match=r"cfg names \['lin'\]; expected a LinearConfig, or configs by .*bwd"):
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
    with pytest.raises(ConfigError, match=r"test_bare@v1 defines no heuristic_cfg; define it, or pass a config"):
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
