"""Threads and tasks: each sees the configs that it entered, none loses a count, and nothing stays behind."""

import asyncio
import concurrent.futures
import contextvars
import sys
import threading

import pytest

from ejkernel_ops import (
    AutotuningResult,
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Entry,
    Invocation,
    Key,
    PersistentCache,
    device_fingerprint,
    overlay_cache,
)

from .told import KEY, ONE, TOLD, told

pytestmark = pytest.mark.once


def result(config):
    return AutotuningResult(device_fingerprint(), (Entry(KEY.op_id_v, KEY.call_key, config),))


def together(work, count):
    """What `work(number)` returns in `count` threads that start at the same moment."""
    start = threading.Barrier(count)

    def begin(number):
        start.wait()
        return work(number)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.fixture
def eager_switches():
    """Threads take turns at almost every step, so that one which is not safe shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_32_threads_with_a_result_each_get_3200_right_answers_and_the_default_after():
    step = told()

    def work(number):
        with result(100 + number):
            return [float(step(ONE)) for _ in range(100)] + [float(told()(ONE))]

    assert together(work, 32) == [[100 + number] * 101 for number in range(32)]
    assert step(ONE) == 1


def test_32_threads_may_enter_one_result_at_the_same_time():
    step, shared = told(), result(5)

    def work(number):
        found = []
        for _ in range(20):
            with shared, shared:
                found.append(float(step(ONE)))
            found.append(float(step(ONE)))
        return found

    assert together(work, 32) == [[5, 1] * 20] * 32


def test_a_new_thread_sees_no_result_and_a_wrapped_function_carries_it():
    step = told()
    with result(5), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(step, ONE).result() == 1
        assert pool.submit(result(7).wrap(step), ONE).result() == 7
        assert pool.submit(contextvars.copy_context().run, step, ONE).result() == 1
        assert step(ONE) == 5
    assert step(ONE) == 1


def test_a_wrapped_function_runs_in_interleaved_tasks_and_their_threads():
    step = told()
    wrapped = {config: result(config).wrap(step) for config in range(2, 50)}

    async def task(config):
        await asyncio.sleep(0)
        here = float(wrapped[config](ONE))
        there = float(await asyncio.to_thread(wrapped[config], ONE))
        return here, there, float(step(ONE)), float(await asyncio.to_thread(step, ONE))

    async def tasks():
        return await asyncio.gather(*map(task, wrapped))

    assert asyncio.run(tasks()) == [(config, config, 1, 1) for config in wrapped]
    assert step(ONE) == 1


@pytest.mark.parametrize("enter", [result, lambda config: overlay_cache({KEY: config})])
def test_tasks_that_await_inside_the_with_are_told_and_leave_nothing_behind(enter):
    step = told()

    async def task(config, turns):
        with enter(config):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def tasks():
        return await asyncio.gather(task(5, 1), task(7, 3), task(9, 2), return_exceptions=True)

    errors = [error for error in asyncio.run(tasks()) if error is not None]
    assert errors
    assert all(isinstance(error, ConfigError) and "do not `await`" in str(error) for error in errors)
    assert step(ONE) == 1
    with enter(4):
        assert step(ONE) == 4
    assert step(ONE) == 1


def test_a_generator_that_yields_inside_the_with_is_told_and_leaves_nothing_behind():
    step = told()

    def batches(config):
        with overlay_cache({KEY: config}):
            yield float(step(ONE))

    first, second = batches(5), batches(7)
    assert (next(first), next(second)) == (5, 7)
    with pytest.raises(ConfigError, match="do not `await` or `yield`"):
        next(first)
    assert next(second, None) is None
    assert step(ONE) == 1


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_16_threads_lose_no_entry_and_no_count(kind, tmp_path, eager_switches):
    cache = ConfigCache() if kind == "memory" else PersistentCache(tmp_path, cfg_type=int)
    each = 1000 if kind == "memory" else 50

    def work(number):
        for i in range(each):
            cache.put(f"{number}-{i}", i)
            assert cache.get(f"{number}-{i}") == i
            if i % 100 == 0:
                cache.keys()

    together(work, 16)
    assert len(cache.keys()) == 16 * each
    if kind == "disk":
        assert cache.stats == {"written": 800, "hit": 800}


def test_a_broken_disk_is_told_once_by_all_threads(tmp_path, eager_switches):
    cache = PersistentCache(tmp_path / "file" / "cache", cfg_type=int)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="config cache: could not read") as caught:
        together(lambda number: [cache.get(f"{number}-{i}") for i in range(20)], 16)
    assert len(caught) == 1
    assert cache.stats == {"read failed: ENOTDIR": 320}


def test_threads_that_choose_for_one_call_agree(monkeypatch):
    answers = iter(range(2, 100))
    monkeypatch.setattr(type(TOLD), "heuristic_cfg", lambda self, inv: next(answers))
    chain = ConfigSelectorChain()
    chosen = together(lambda number: chain.choose(Invocation(TOLD, (ONE,))), 16)
    assert len(set(chosen)) == 1


def test_configs_that_are_put_while_threads_choose_are_seen_whole():
    chain, key = ConfigSelectorChain(), Key(*KEY)

    def work(number):
        for config in range(50):
            if number == 0:
                chain.cache.put(key, config)
            assert chain.choose(Invocation(TOLD, (ONE,))) in range(50)

    together(work, 8)
    assert chain.choose(Invocation(TOLD, (ONE,))) == 49
