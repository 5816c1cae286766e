"""`vmap_with_config` and `pmap_with_config` choose one config, from shapes alone, and pass the rest through."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel_ops import (
    ConfigError,
    ConfigSelectorChain,
    Executor,
    Kernel,
    UnsupportedError,
    get_invocations,
    overlay_cache,
    pmap_with_config,
    vmap_with_config,
)
from ejkernel_ops.execution.trial import Tuned

from .ops import close, normal
from .told import TOLD, key_of

DEVICES = 4
X, W, B = normal(0, DEVICES, 2, 3), normal(1, 3, 5), normal(2, 5)


class Batched(Kernel):
    """Takes arrays, a dict, a scalar, text and keywords; rows fold."""

    name = "test_batched"
    rows, out_rows = (True, False, False, False, False), (True, False)
    ran = 0

    def heuristic_cfg(self, inv):
        return 1

    def run(self, x, params=None, scale=1.0, mode="plus", ids=None, *, cfg, bias=None, shift=0.0):
        type(self).ran += 1
        weight = 1.0 if params is None else params["weight"]
        out = jnp.dot(x, weight) * scale + shift
        return (out if bias is None else out + bias) * (1 if mode == "plus" else -1), jnp.float32(cfg)


BATCHED = Batched()


def plain(x, weight, scale, bias):
    return -(x @ weight * scale + 1.0 + bias)


def executor(**events):
    chosen = []

    def on_event(name, **data):
        if name == "choice":
            chosen.append(data["op_id_v"])

    return Executor(ConfigSelectorChain(on_event=on_event)), chosen


@pytest.mark.parametrize("make", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
def test_scalars_text_keywords_and_unmapped_arrays_are_passed_through(make):
    run, chosen = executor()
    fn = make(BATCHED, in_axes=(0, {"weight": None}, 0, 0, 0), executor=run)
    out, cfg = fn(X, {"weight": W}, 2.0, "minus", None, bias=B, shift=1.0)
    close(out, plain(X, W, 2.0, B))
    assert cfg.tolist() == [1] * DEVICES
    assert set(chosen) == {"test_batched@v1"}


@pytest.mark.parametrize("make", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
def test_kernel_and_executor_come_in_either_order(make):
    run, _ = executor()
    wanted = X * 2.0
    for fn in (
        make(BATCHED), make(BATCHED, 0), make(BATCHED, (0, None), run), make(BATCHED, in_axes=(0, None), executor=run),
        make(run, BATCHED), make(run, BATCHED, (0, None)), make(run, BATCHED, in_axes=[0, None]),
    ):  # fmt: skip
        close(fn(X, None, scale=2.0)[0], wanted)
    with pytest.raises(TypeError, match="no kernel among the arguments; expected a Kernel, got <function"):
        make(lambda x: x)
    with pytest.raises(TypeError, match="is one executor too many"):
        make(run, BATCHED, executor=run)


@pytest.mark.parametrize(("make", "rows"), [(vmap_with_config, 4 * 7), (pmap_with_config, 7)], ids=["vmap", "pmap"])
def test_the_config_is_chosen_once_from_shapes_without_running_the_kernel(make, rows):
    run, chosen = executor()
    x, traced = np.ones((DEVICES, 7, 3), np.float32), []

    class Counted(Batched):
        def run(self, x, *, cfg):
            traced.append(isinstance(x, jax.core.Tracer))
            return x * cfg

        rows = out_rows = (True,)

    kernel = Counted(f"test_counted_{make.__name__}")
    make(kernel, executor=run)(x)
    assert all(traced)
    (call,) = get_invocations()[kernel.op_id_v].values()
    assert call[1][0].shape == (rows, 3)
    assert len(get_invocations()[kernel.op_id_v]) == 1
    before = len(chosen)
    make(kernel, executor=run)(x)
    assert len(chosen) == before


def test_results_and_explicit_configs_reach_batched_calls():
    x = np.ones((DEVICES,), np.float32)
    fn = pmap_with_config(TOLD)
    assert fn(x).tolist() == [1] * DEVICES
    with overlay_cache({key_of(TOLD, np.float32(1)): 5}):
        assert fn(x).tolist() == [5] * DEVICES
    assert fn(x, cfg=3).tolist() == [3] * DEVICES
    assert vmap_with_config(TOLD)(x, cfg=3).tolist() == [3] * DEVICES


@pytest.mark.parametrize("make", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
def test_batched_calls_are_differentiated_jitted_and_mapped_along_any_axis(make):
    fn = make(BATCHED, (1, None))
    x = np.moveaxis(X, 0, 1)

    def loss(x, w):
        return (fn(x, {"weight": w})[0] ** 2).sum()

    wanted = jax.grad(lambda x, w: ((jnp.moveaxis(x, 1, 0) @ w) ** 2).sum(), (0, 1))(x, W)
    close(jax.jit(jax.grad(loss, (0, 1)))(x, W), wanted)
    close(jax.grad(loss, (0, 1))(x, W), wanted)


def test_pmap_takes_sharded_inputs_and_keeps_their_devices():
    devices = jax.devices()[3::-1]
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    out, _ = pmap_with_config(BATCHED)(x)
    close(out, X)
    assert [s.device for s in sorted(out.addressable_shards, key=lambda s: s.index[0].start)] == devices
    half = pmap_with_config(BATCHED, devices=devices[:2])(X[:2])[0]
    assert half.sharding.device_set == set(devices[:2])
    on_one = jax.device_put(X, jax.devices()[3])  # committed elsewhere: moved
    close(pmap_with_config(BATCHED)(on_one)[0], X)


def test_collectives_see_the_axis_name():
    class Summed(Batched):
        rows = out_rows = None

        def run(self, x, *, cfg, axis):
            return jax.lax.psum(x, axis)

    kernel = Summed("test_summed")
    out = pmap_with_config(kernel, "ranks")(X, axis="ranks")
    close(out, np.broadcast_to(X.sum(0), X.shape))
    out = pmap_with_config(kernel)(X, axis="devices")
    close(out, np.broadcast_to(X.sum(0), X.shape))


@pytest.mark.parametrize(("make", "arguments", "options", "message"), [
    (vmap_with_config, (X,), {"in_axes": (0, 0)}, r"in_axes has 2 entries for 1 positional arguments of test_batched"),
    (vmap_with_config, (X,), {"in_axes": (None,)}, r"no argument of test_batched has an axis to map over"),
    (vmap_with_config, (2.0,), {}, r"no argument of test_batched has an axis to map over"),
    (vmap_with_config, (X,), {"in_axes": 3}, r"in_axes has 3 for an array of shape \(4, 2, 3\)"),
    (vmap_with_config, (X, {"weight": W}), {"in_axes": (0, {"w": 0})}, r"in_axes .* does not fit the arguments"),
    (pmap_with_config, (np.ones((9, 2)),), {}, r"has length 9, for 8 devices"),
    (pmap_with_config, (X, {"weight": np.ones((2, 3))}), {}, r"have lengths \[2, 4\]; expected one"),
])  # fmt: skip
def test_what_cannot_be_mapped_says_why(make, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make(BATCHED, **options)(*arguments)


def test_a_static_argument_without_a_value_is_refused():
    with pytest.raises(ConfigError, match="no value-based form"):
        pmap_with_config(BATCHED)(X, mode=object())


@pytest.mark.parametrize("make", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
@pytest.mark.parametrize("rows", [None, (True,)], ids=["loop", "fold"])
def test_with_tuning_on_calls_the_call_that_runs_is_tuned_once(make, rows):
    tuned = []

    class Tuner:
        def tune(self, inv, on_event=None):
            tuned.append(inv.args[0].shape)
            return Tuned(7, 1, 1.0, 2.0, ())

    class Eager(Kernel):
        out_rows = rows

        def run(self, x, *, cfg):
            return x * 0 + cfg

        def heuristic_cfg(self, inv):
            return 1

    Eager.rows = rows
    kernel = Eager(f"test_eager_{make.__name__}_{rows}".replace("(", "").replace(",)", ""))
    run = Executor(ConfigSelectorChain(tuner=Tuner(), autotune=True))
    x = np.ones((DEVICES, 3), np.float32)
    for _ in range(2):
        assert (make(kernel, executor=run)(x) == 7).all()
    folded = rows is not None and make is vmap_with_config
    assert tuned == [(DEVICES * 3,) if folded else (3,)]


def test_the_program_of_pmap_is_kept_for_equal_calls_and_keeps_no_array_alive():
    traces = []

    class Traced(Batched):
        rows = out_rows = None

        def run(self, x, w, *, cfg, factor=1.0):
            traces.append(factor)
            return x @ w * factor

    fn = pmap_with_config(Traced("test_traced_pmap"), in_axes=(0, None))
    w = jnp.asarray(W) + 0
    fn(X, w)
    dead, once = weakref.ref(w), len(traces)
    for _ in range(3):
        fn(X, w + 1)
        pmap_with_config(Traced("test_traced_pmap"), in_axes=(0, None))(X, W)
    assert len(traces) == once
    fn(X, W, factor=2.0)
    assert len(traces) > once
    del w
    gc.collect()
    assert dead() is None
    with jax.checking_leaks():
        jax.jit(lambda x, w: fn(x, w, factor=3.0)).lower(X, W)


def test_pmap_runs_under_a_mesh_of_others_outside_programs():
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))):
            close(pmap_with_config(BATCHED)(X)[0], X)
            with pytest.raises(UnsupportedError, match="in a program that has one use"):
                jax.jit(lambda x: pmap_with_config(BATCHED)(x)[0]).lower(X)


def test_a_loop_over_examples_is_compiled_once():
    compiled = []

    class Looped(Kernel):
        def run(self, x, *, cfg):
            compiled.append(x.shape)
            return jnp.sin(x)

        def heuristic_cfg(self, inv):
            return 1

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            compiled.append("backward")
            return (cotangents[0] * jnp.cos(primals[0]),)

    kernel = Looped("test_looped")
    for fn in (jax.vmap(kernel), vmap_with_config(kernel), jax.vmap(jax.grad(lambda x: kernel(x).sum()))):
        fn(X)
        before = len(compiled)
        for _ in range(3):
            fn(X + 1)
        assert len(compiled) == before


def test_weak_types_are_tuned_as_they_are_called():
    selector = ConfigSelectorChain(autotune=True)
    selector._tuner = type("Tuner", (), {"tune": lambda self, inv, **k: Tuned(5, 1, 1.0, 2.0, ())})()
    for make in (vmap_with_config, pmap_with_config):
        assert make(TOLD, executor=Executor(selector))(jnp.full((DEVICES,), 1.0)).tolist() == [5] * DEVICES
