"""One of two processes of `jax.distributed` on one machine: does what `test_hosts.py` asks for, and prints it."""

import concurrent.futures
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import jax

FOLDER, PORT, RANK = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background of a shell ignore
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK)  # before anything asks for a device

import jax.numpy as jnp
import numpy as np
from told import TOLD

import ejkernel_ops as ek
import ejlayers
from ejkernel_ops.execution import hosts
from ejkernel_ops.execution.trial import Tuned

OPS = 50


class Noisy:
    """A tuner that times with a noise of its own in each process, as real ones do."""

    def __init__(self):
        self.tuned = 0
        self.rng = np.random.default_rng(RANK)

    def tune(self, inv, on_event=None):
        self.tuned += 1
        return Tuned(int(self.rng.integers(2, 6)), 1, 1.0, 2.0, ())


class Fails(Noisy):
    def tune(self, inv, on_event=None):
        raise ValueError("no such\ndevice")


class Dies(Noisy):
    def tune(self, inv, on_event=None):
        os._exit(3)


class Refuses:
    def asked(self, *args, **kwargs):
        raise AssertionError("asked")

    get = put = discard = tune = asked


def selector(tuner, **parts):
    return ek.ConfigSelectorChain(tuner=tuner, **parts)


def lowered(size=OPS):
    """A program with a call of each length, so that each is tuned by itself."""
    return jax.jit(lambda: [TOLD(jnp.ones(n + 1)) for n in range(size)]).lower()


def programs():
    """A digest of the program of each call."""
    each = (jax.jit(lambda n=n: TOLD(jnp.ones(n + 1))).lower().as_text() for n in range(OPS))
    return [hashlib.sha256(text.encode()).hexdigest()[:8] for text in each]


def raised(work):
    """The error of some work, and whether the processes can still compute together after it."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error), summed()]
    return [None, "", summed()]


def mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def spread(width=8):
    """An array of ones whose rows are spread over the devices of both processes."""
    sharding = jax.NamedSharding(mesh(), jax.P("data", None))
    return jax.make_array_from_callback(
        (jax.device_count(), width), sharding, lambda at: np.ones((1, width), np.float32)
    )


def summed():
    """A collective of the user's."""
    return float(jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh(), jax.P()))(spread()))


def synced():
    tuner = Noisy()
    result = ek.autotune_lowered(selector(tuner), lowered(), sync=True)
    with result:
        return {"programs": programs(), "digest": result.digest, "tuned": tuner.tuned, "entries": len(result.entries)}


def alone():
    result = ek.autotune_lowered(selector(Noisy()), lowered())
    with ek.overlay_cache(result.as_overlay()):
        return {"programs": programs(), "digest": result.digest}


def result_of(cfg):
    inv = ek.Invocation(TOLD, (jnp.ones(1),))
    return ek.AutotuningResult(ek.device_fingerprint(), (ek.Entry(inv.op_id_v, inv.call_key, cfg),))


def same():
    with result_of(7), result_of(8), result_of(7):
        pass
    outside = float(jax.jit(TOLD)(jnp.ones(1))[0])
    with result_of(7):
        return [outside, float(jax.jit(TOLD)(jnp.ones(1))[0]), summed()]


def different():
    return raised(result_of(10 + RANK).__enter__)


def nested_in_another_order():
    first, second = (result_of(9), result_of(7)) if RANK else (result_of(7), result_of(9))

    def enter():
        with first, second:
            pass

    return raised(enter)


def one_tunes_and_one_enters():
    if RANK:
        return raised(result_of(12).__enter__)
    return raised(lambda: ek.autotune_lowered(selector(Noisy()), lowered(1), sync=True))


def first_fails():
    return raised(lambda: ek.autotune_lowered(selector(Fails()), lowered(1), sync=True))


def second_has_no_program():
    tuner = Noisy()
    program = lowered(2).compile() if RANK else lowered(2)
    return [*raised(lambda: ek.autotune_lowered(selector(tuner), program, sync=True)), tuner.tuned]


def other_programs():
    tuner = Noisy()
    return [*raised(lambda: ek.autotune_lowered(selector(tuner), lowered(1 + RANK), sync=True)), tuner.tuned]


def calls_ask_nobody():
    parts = selector(Refuses(), persistent=Refuses(), policy=ek.AutotunePolicy(tune_on_call=True))
    return float(ek.Executor(parts)(TOLD, jnp.ones(1))[0])


def own_tuning_changes_no_call():
    parts = selector(Noisy(), persistent=ek.PersistentCache(FOLDER / f"own{RANK}"))
    sources = [[e.source for e in ek.autotune_lowered(parts, lowered(3), sync=False).entries] for _ in range(2)]
    return [sources, float(ek.Executor(parts)(TOLD, jnp.ones(1))[0])]


def disk_of_the_first():
    parts = selector(Refuses() if RANK else Noisy(), persistent=ek.PersistentCache(FOLDER / f"disk{RANK}"))
    return [[e.source for e in ek.autotune_lowered(parts, lowered(3), sync=True).entries] for _ in range(2)]


def whole_step():
    weight = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh(), jax.P(None, None)))
    step = jax.jit(jax.grad(lambda w, x: ek.linear(x, w).sum()))
    parts = selector(ek.Autotuner(num_iters=1))
    result = ejlayers.tune(step, weight, spread(), selector=parts, sync=True)
    with result:
        step(weight, spread())
    return [result.digest, result.step_ms, list(result.notes)]


def sharded_training(features=8):
    """A train step, a weight split by columns, and rows split over the other axis of a mesh of both processes."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def ones(shape, *spec):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.make_array_from_callback(shape, sharding, lambda at: np.ones(shape, np.float32)[at])

    step = jax.jit(jax.value_and_grad(lambda w, x: ek.linear(x, w).sum()))
    return mesh, step, (ones((features, 8), None, "model"), ones((8, features), "data"))


def sharded_step():
    mesh, step, arrays = sharded_training()
    with jax.set_mesh(mesh):
        plain = step.lower(*arrays)
        result = ejlayers.tune(step, *arrays, selector=selector(ek.Autotuner(num_iters=1)), sync=True)
        with result:
            tuned = step.lower(*arrays)
            loss, grad = step(*arrays)
    # JAX names whom XLA asks how to share a call out by an address, which its own cache leaves out as well.
    texts = [re.sub(r'backend_config = "\d+"', "", lowered.as_text()) for lowered in (plain, tuned)]
    programs = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in (*texts, tuned.compile().as_text())]
    shapes = sorted(entry.shapes for entry in result.entries)
    return {"programs": programs, "digest": result.digest, "shapes": shapes, "loss": float(loss),
            "grad": float(grad.addressable_shards[0].data.max())}  # fmt: skip


def sharded_steps_that_differ():
    mesh, step, arrays = sharded_training(8 + 8 * RANK)
    tuner = Noisy()
    with jax.set_mesh(mesh):
        error = raised(lambda: ejlayers.tune(step, *arrays, selector=selector(tuner), sync=True))
    return [*error, tuner.tuned]


def whole_step_alone():
    return list(ejlayers.tune(jax.jit(lambda x: TOLD(x)), jnp.ones(1), selector=selector(Noisy())).notes)


def appears(name):
    """Whether the other process has made a file, before long."""
    deadline = time.monotonic() + 10.0
    while not (FOLDER / name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return (FOLDER / name).exists()


def entered_while_another_thread_waits():
    with result_of(7):
        pass
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waits = pool.submit(hosts.from_first, "tuning", lambda: appears("entered1"))
        time.sleep(0.5)
        with result_of(7):
            (FOLDER / f"entered{RANK}").touch()
        return waits.result()


def entered_by_two_threads_at_once():
    """In process 0; in process 1 by one, a little later."""
    if RANK == 1:
        time.sleep(1)

    def enter(_):
        with result_of(8):
            return True

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(enter, range(2 - RANK)))


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def interrupted(first=False):
    """Process 1 gets a Ctrl-C while it waits, or before, and process 0 works until that is heard."""
    if RANK == 0:
        came = []
        error = raised(lambda: hosts.from_first("waiting", lambda: came.append(appears(f"heard{first}"))))
        return [*came, *error[:2]]
    try:
        if first:
            hosts.together("waiting", interrupt, str)
        threading.Timer(0.5, interrupt).start()
        hosts.from_first("waiting", str)
    except KeyboardInterrupt as error:
        (FOLDER / f"heard{first}").touch()
        summed()
        return type(error).__name__


def interrupted_at_work():
    return interrupted(first=True)


def late():
    time.sleep(2.0 * RANK)
    return raised(lambda: hosts.together("waiting", str, str, 0.5))


def first_dies():  # the only one of its run
    return raised(lambda: ek.autotune_lowered(selector(Dies()), lowered(1), sync=True))


if __name__ == "__main__":
    for name in sys.argv[4:]:
        try:
            outcome = globals()[name]()
        except Exception:
            outcome = traceback.format_exc()
        print(json.dumps([name, outcome]), flush=True)
