"""One snapshot decides: overlays and policies reach jitted functions at once, leave no trace, and never mix."""

import asyncio
import concurrent.futures
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    AttentionConfig,
    BwdParams,
    ConfigCache,
    ConfigError,
    FwdParams,
    Key,
    default_selector,
    device_fingerprint,
    flash_attention,
    overlay_cache,
    policy_override,
)
from ejkernel_ops.utils.meta import call_sites

from .told import KEY, ONE, SLOPE, TOLD, Traced, configs_of, key_of, told

SLOPE_KEY = Key(device_fingerprint(), "test_slope@v1", key_of(SLOPE, ONE).call_key)


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
        if number % 50 == 0:
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
            found += [float(step(ONE)) for _ in range(100)]
            with five:
                found.append(float(step(ONE)))
        return [*found, float(step(ONE))]

    with five, concurrent.futures.ThreadPoolExecutor(32) as pool:
        results = list(pool.map(work, range(32)))
        assert step(ONE) == 5
    assert results == [[1, *[100 + n] * 100, 5, 1] for n in range(32)]
    assert step(ONE) == 1


def test_asyncio_threads_see_no_overlay_and_leave_none_behind():
    """Python copies its context variables into such a thread, JAX its contexts not: two sources would disagree."""
    step = told()

    def poisoned():
        with overlay_cache({KEY: 7}):
            return asyncio.run(asyncio.to_thread(step, ONE)), step(ONE)

    async def tasks():
        async def task(config):
            await asyncio.sleep(0)
            with overlay_cache({KEY: config}):
                found = step(ONE)
            await asyncio.sleep(0)
            return float(found), float(step(ONE))

        return await asyncio.gather(*[task(n) for n in range(2, 50)])

    assert asyncio.run(tasks()) == [(n, 1) for n in range(2, 50)]
    assert poisoned() == (1, 7)
    assert step(ONE) == 1


def test_entering_leaves_nothing_behind_that_makes_calls_slower():
    step, other = jax.jit(lambda x: x + 1), np.ones(())

    def seconds(call):
        start = time.process_time()
        for _ in range(300):
            call()
        return time.process_time() - start

    def cost():  # in calls of NumPy, for the processor is not always as fast: others use it too
        return np.median([seconds(lambda: step(ONE)) / seconds(lambda: np.add(other, other)) for _ in range(25)])

    step(ONE)
    before = cost()
    for config in range(3000):
        with overlay_cache({KEY: config}):
            pass
    assert min(cost() for _ in range(3)) < 1.2 * before


@pytest.mark.parametrize("make", [lambda: overlay_cache({KEY: 5}), lambda: policy_override(mode="off")])
def test_leaving_in_another_order_is_an_error_and_breaks_nothing(make):
    outer, inner, step = make(), overlay_cache({KEY: 7}), told()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ConfigError, match="left in another order than it was entered"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)  # and with it the outer one, which was left
    assert step(ONE) == 1
    with pytest.raises(ConfigError, match="another order"):
        outer.__exit__(None, None, None)
    assert step(ONE) == 1


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
