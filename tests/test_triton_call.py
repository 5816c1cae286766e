"""One call site runs a Triton kernel on every device, with each version of jax-triton."""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux only")

from ejkernel_ops import triton_call as module
from ejkernel_ops import triton_target
from ejkernel_ops.triton_call import triton_call, unavailable

from . import triton_kernels as kernels

ROOT = Path(__file__).parent.parent
F32 = jnp.float32


def added(x, y, *, shift=0, block=64, num_warps=4):
    return triton_call(
        kernels.add, x, y, out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype)], grid=(-(-x.size // block),),
        num_warps=num_warps, num_stages=2, name="add", SIZE=x.size, SHIFT=shift, BLOCK=block,
    )[0]  # fmt: skip


def normal(*shape, dtype=F32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# The call


def test_triton_can_be_used_here():
    assert unavailable() is None


def test_the_call_runs_eagerly_under_jit_and_without_jit():
    x, y = normal(100), normal(100, seed=1)
    for f in (added, jax.jit(added)):
        np.testing.assert_array_equal(f(x, y), x + y)
    with jax.disable_jit():
        np.testing.assert_array_equal(added(x, y), x + y)


def test_the_call_runs_in_scan_cond_and_remat():
    x = normal(64)

    @jax.jit
    def f(x):
        x, _ = jax.lax.scan(lambda c, _: (added(c, x), None), x, length=3)
        return jax.lax.cond(True, lambda x: jax.checkpoint(added)(x, x), lambda x: x, x)

    np.testing.assert_allclose(f(x), 8 * x, rtol=1e-6)


def written_over(x, aliases, dtype=F32):
    types = [jax.ShapeDtypeStruct(x.shape, t) for t in (dtype, F32)]
    return triton_call(
        kernels.write_then_read, x, out_types=types, grid=(1,), num_warps=4, num_stages=1, name="write_then_read",
        input_output_aliases=aliases, SIZE=x.size, BLOCK=64,
    )  # fmt: skip


def test_an_output_may_take_the_place_of_an_operand_which_itself_stays():
    x = normal(40)
    for aliases, seen in ((None, x), ({0: 0}, np.ones(40))):
        out, read, kept = jax.jit(lambda x, aliases=aliases: (*written_over(x, aliases), x + 0))(x)
        np.testing.assert_array_equal(out, np.ones(40))
        if jax.default_backend() == "cpu":  # a GPU may take the place, the interpreter does
            np.testing.assert_array_equal(read, seen)
        np.testing.assert_array_equal(kept, x)


def test_two_operands_cannot_share_the_memory_of_one_output():
    x = normal(40)
    with pytest.raises(ValueError, match="two operands cannot share"):
        triton_call(
            kernels.add, x, x, out_types=[jax.ShapeDtypeStruct(x.shape, F32)], grid=(1,), num_warps=4, num_stages=1,
            name="add", input_output_aliases={0: 0, 1: 0}, SIZE=40, SHIFT=0, BLOCK=64,
        )  # fmt: skip


@pytest.mark.parametrize(("aliases", "dtype"), [({1: 0}, F32), ({0: 2}, F32), ({0: 0}, jnp.bfloat16)], ids=str)
def test_an_alias_of_what_is_not_there_or_differs_is_an_error(aliases, dtype):
    [(operand, out)] = aliases.items()
    with pytest.raises(ValueError, match=f"input_output_aliases has {operand}: {out}; .*(counted from 0|differ)"):
        written_over(normal(40), aliases, dtype)


@pytest.mark.cpu
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_runs_its_shard(check_vma):
    mesh = four_devices()
    spec = PartitionSpec("x")
    x, y = normal(256), normal(256, seed=1)
    types = []

    def local(x, y):
        out = added(x, y)
        types.append(jax.typeof(out))
        return out

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma))
    np.testing.assert_array_equal(f(x, y), x + y)
    assert types[0].shape == (64,)
    if check_vma:
        assert types[0].manual_axis_type.varying == {"x"}


def four_devices():
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.cpu
def test_calls_on_several_devices_with_large_operands_do_not_wait_for_each_other():
    x = normal(1 << 20)
    spec = PartitionSpec("x")
    f = functools.partial(functools.reduce, lambda a, _: added(a, jnp.ones_like(a), block=1 << 18), range(3))
    f = jax.jit(jax.shard_map(f, mesh=four_devices(), in_specs=spec, out_specs=spec))
    np.testing.assert_allclose(f(f(x)), x + 6, rtol=1e-5, atol=1e-5)


@pytest.mark.cpu
def test_large_operands_and_many_calls_do_not_wait_for_each_other():
    x = normal(1 << 20)
    f = jax.jit(lambda x: functools.reduce(lambda a, _: added(a, x, block=1 << 18), range(4), x))
    outs = [f(x + i) for i in range(4)]
    np.testing.assert_allclose(outs[3], 5 * (x + 3), rtol=1e-5, atol=1e-5)


@pytest.mark.cpu
def test_errors_of_the_interpreter_reach_the_caller():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"load at x_ptr\[100\], which has 100 elements"):
        added(normal(100), normal(100), shift=1).block_until_ready()


def test_one_and_true_are_different_constants():
    def out(shift):
        return added(normal(8), normal(8), shift=shift)

    a, b = (jax.make_jaxpr(lambda shift=shift: out(shift))().jaxpr.eqns[-1].params["launch"] for shift in (1, True))
    assert a != b
    assert a == jax.make_jaxpr(lambda: out(1))().jaxpr.eqns[-1].params["launch"]


def test_wrong_arguments_are_refused_where_they_are_given():
    x, options = normal(8), {"grid": (1,), "num_warps": 4, "num_stages": 1, "name": "add"}
    with pytest.raises(TypeError, match=r"expected a @triton\.jit function"):
        triton_call(lambda x: x, x, out_types=[x], **options)
    with pytest.raises(TypeError, match=r"takes 3 arrays \['x_ptr', 'y_ptr', 'out_ptr'\]; got 2"):
        triton_call(kernels.add, x, out_types=[x], **options, SIZE=8, SHIFT=0, BLOCK=8)
    with pytest.raises(TypeError, match=r"constants \['BLOCK', 'SHIFT', 'SIZE'\]; got \['BLOCK'\]"):
        triton_call(kernels.add, x, x, out_types=[x], **options, BLOCK=8)


# Lowering for CUDA


def lowered_for_cuda(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_the_call_lowers_for_cuda_without_a_gpu():
    text = lowered_for_cuda(added, normal(100), normal(100))
    assert text.count("triton_kernel_call") == 1
    assert "callback" not in text


def test_a_product_lowers_in_each_type():
    for dtype in (jnp.bfloat16, jnp.float16, F32):
        x = normal(32, 32, dtype=dtype)
        out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        f = functools.partial(triton_call, kernels.product, out_types=out, grid=(1,), num_warps=4, num_stages=1,
                              name="product", N=32, PRECISION="ieee")  # fmt: skip
        assert "triton_kernel_call" in lowered_for_cuda(f, x, x)


def test_export_for_cuda_contains_the_call():
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in triton_target.TARGETS]
    exported = jax.export.export(jax.jit(added), platforms=["cuda"], disabled_checks=checks)(normal(64), normal(64))
    assert "triton_kernel_call" in exported.mlir_module()


def test_where_jaxlib_loads_kernels_ahead_the_call_is_one_that_graphs_hold(monkeypatch):
    own, typed = f"@{triton_target.TARGET}(", "api_version = 4"
    text = lowered_for_cuda(added, normal(64), normal(64))
    assert (own in text) == triton_target.registered()
    assert (own in text) <= (typed in text and "opaque = " in text)
    monkeypatch.setattr(triton_target, "registered", lambda: False)
    text = lowered_for_cuda(lambda x, y: added(x, y), normal(64), normal(64))
    assert own not in text
    assert "triton_kernel_call" in text


@pytest.mark.parametrize(("stages", "fit"), [
    (["initialize", "execute"], True), (["instantiate", "initialize", "execute"], True),
    (["instantiate", "execute"], False), (["execute"], False), (None, False),
])  # fmt: skip
def test_only_kernels_that_are_loaded_before_their_launch_are_recorded(monkeypatch, stages, fit):
    found = {} if stages is None else {"triton_kernel_call_ffi": dict.fromkeys(stages, "capsule")}
    library = types.SimpleNamespace(registrations=lambda: found)
    monkeypatch.setattr(triton_target, "gpu_triton", types.SimpleNamespace(_cuda_triton=library))
    asked = []

    def register(name, *_, traits, **__):
        asked.append((name, bool(traits)))

    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    assert triton_target.registered.__wrapped__() == fit
    assert asked == ([] if stages is None else [(triton_target.TARGET, fit)])


def test_unused_calls_leave_the_program():
    def f(x):
        added(x, x)
        return jax.checkpoint(lambda x: (added(x, x), x))(x)[1]

    assert "triton_kernel_call" not in lowered_for_cuda(f, normal(64))


def test_each_kernel_that_is_interpreted_also_compiles():
    f32, i32 = jax.ShapeDtypeStruct((64,), F32), jax.ShapeDtypeStruct((64,), jnp.int32)
    u32, flags = jax.ShapeDtypeStruct((64,), jnp.uint32), jax.ShapeDtypeStruct((64,), jnp.bool_)
    for kernel, operands, out_types, constants in [
        (kernels.arithmetic, (f32, f32), [f32, flags, f32, f32], {"N": 64}),
        (kernels.row_tops, (f32,), [f32], {"ROWS": 4, "COLS": 8}),
        (kernels.members, (f32,), [f32], {"N": 16}),
        (kernels.philox, (u32,), [u32], {"N": 16, "ROUNDS": 10}),
        (kernels.loops, (i32, f32), [f32], {"STAGES": 2}),
        (kernels.count, (i32,), [f32], {"N": 64, "BINS": 8}),
    ]:
        f = functools.partial(triton_call, kernel, out_types=out_types, grid=(1,), num_warps=4, num_stages=1,
                              name="k", **constants)  # fmt: skip
        assert "triton_kernel_call" in lowered_for_cuda(f, *operands)


def test_interpreting_and_compiling_one_kernel_alternate():
    x = normal(64)
    texts = []
    for block in (16, 32, 64):
        f = functools.partial(added, block=block)
        np.testing.assert_array_equal(f(x, x), 2 * x)
        texts.append(lowered_for_cuda(f, x, x))
    assert len(set(texts)) == 3


def test_threads_may_interpret_and_compile_at_the_same_time():
    x, errors = normal(256), []

    def work(job, block):
        try:
            job(functools.partial(added, block=block))
        except Exception as error:
            errors.append(error)

    def interprets(f):
        np.testing.assert_array_equal(f(x, x), 2 * x)

    jobs = [(job, 1 << n) for n in range(4, 8) for job in (interprets, lambda f: lowered_for_cuda(f, x, x))]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_kernel_is_launched_with_the_warps_that_it_was_compiled_for():
    class Library:
        other = "kept"

        @staticmethod
        def TritonKernel(*args):
            return args

    launcher = module._Launcher(Library)
    assert launcher.other == "kept"
    assert launcher.TritonKernel("k", 4, 1, 0, ".visible .entry k()\n.reqntid 384\n", "ttir", 90)[1] == 12
    assert launcher.TritonKernel("k", 4, 1, 0, ".visible .entry k()\n", "ttir", 90)[1] == 4


def test_tritons_cache_folder_survives_the_import_of_jax_triton(tmp_path):
    code = (
        "import os; from ejkernel_ops.triton_call import unavailable; assert unavailable() is None, unavailable();"
        "print(os.environ.get('TRITON_CACHE_DIR'))"
    )
    for given, wanted in ((None, "None"), ("", "None"), (str(tmp_path), str(tmp_path))):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        env.pop("TRITON_CACHE_DIR", None)
        env |= {} if given is None else {"TRITON_CACHE_DIR": given}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == wanted, done.stderr


# Why Triton cannot be used


@pytest.mark.parametrize(
    ("package", "version", "match"),
    [
        ("triton", None, r"triton is not installed: pip install 'triton==3\.6\.\*'"),
        ("triton", "3.5.1", r"triton 3\.5\.1 does not fit.*pip install 'triton==3\.6\.\*'"),
        ("triton", "3.9.0", r"triton 3\.9\.0 does not fit.*pip install 'triton==3\.6\.\*'"),
        ("jax-triton", None, "jax-triton is not installed: pip install 'jax-triton>=0.3.1'"),
        ("jax-triton", "0.3.0", "jax-triton 0.3.0 is too old: pip install --no-deps jax-triton==0.3.1"),
    ],
)
def test_a_missing_or_unfit_package_is_a_reason_with_a_remedy(package, version, match, monkeypatch):
    real = importlib.metadata.version

    def found(name):
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert_reason(match)


def test_a_new_jax_triton_on_an_old_python_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"triton": "3.6.0", "jax-triton": "0.4.1"}.__getitem__)
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    assert_reason("jax-triton 0.4.1 needs Python 3.12: pip install --no-deps jax-triton==0.3.1")


def test_jax_without_its_gpu_plugin_is_a_reason(monkeypatch):
    from jaxlib import gpu_triton

    monkeypatch.delattr(gpu_triton, "TritonKernel")
    version = importlib.metadata.version("jax")
    assert_reason(rf"no support for Triton here.*pip install --no-deps jax-cuda13-plugin=={version}, or with a GPU")


def test_an_import_that_fails_is_a_reason(monkeypatch):
    def fails():
        raise SystemError("undefined symbol")

    monkeypatch.setattr(module, "_jax_triton", fails)
    assert_reason("cannot be imported .SystemError: undefined symbol.: pip install")


def test_tritons_own_interpreter_is_a_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert_reason("TRITON_INTERPRET is set, so kernels cannot be compiled: unset it")


def assert_reason(match):
    unavailable.cache_clear()
    try:
        reason = unavailable()
        assert reason is unavailable()
    finally:
        unavailable.cache_clear()
    assert re.search(match, reason), reason


# Inside CUDA graphs


@pytest.mark.gpu
def test_kernels_that_graphs_hold_give_the_same_numbers_run_after_run_wherever_their_buffers_are():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x, y):
        for _ in range(8):
            x = added(x, y) - y
        return x, x.sum()

    x, y = jnp.arange(64.0), jnp.ones(64)
    for i in range(6):
        x, total = step(x, y)
        jnp.zeros(1 << (10 + i)).block_until_ready()  # the next buffers are elsewhere
        assert total == 2016
