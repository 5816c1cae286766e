"""The interpreter of Triton kernels computes what a GPU would, and refuses what a GPU would not notice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux only")

from ejkernel_ops.triton_assembly import IF_BIT
from ejkernel_ops.triton_interpreter import interpret

from . import triton_kernels as kernels

pytestmark = pytest.mark.once

F32 = jnp.float32


def run(kernel, *arrays, out, grid=(1,), **constants):
    """A kernel through the interpreter; `out` are pairs of shape and dtype."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out]
    outs = interpret(kernel, grid, [np.asarray(a) for a in arrays], types, constants)
    return outs[0] if len(outs) == 1 else outs


def normal(*shape, dtype=F32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# What the interpreter refuses


def test_a_load_outside_its_array_is_refused():
    x = normal(100)
    with pytest.raises(IndexError, match=r"kernel add, program \(1, 0, 0\): load at x_ptr\[100\], which has 100 elem"):
        run(kernels.add, x, x, out=[((100,), F32)], grid=(2,), SIZE=100, SHIFT=4, BLOCK=64)
    with pytest.raises(IndexError, match=r"load at x_ptr\[-3\].*; 3 of 64 lanes are outside"):
        run(kernels.add, x, x, out=[((100,), F32)], grid=(2,), SIZE=100, SHIFT=-3, BLOCK=64)
    with pytest.raises(IndexError, match=r"load at y_ptr\[8\], which has 8 elements"):
        run(kernels.add, x, x[:8], out=[((100,), F32)], grid=(2,), SIZE=100, SHIFT=0, BLOCK=64)


@pytest.mark.parametrize("index", [8, -1, 1 << 30, -(1 << 30)])
def test_a_store_outside_its_array_is_refused_however_far(index):
    with pytest.raises(IndexError, match=re.escape(f"store at out_ptr[{index}], which has 8 elements")):
        run(kernels.store_at, out=[((8,), F32)], INDEX=index)


def test_an_atomic_outside_its_array_is_refused():
    with pytest.raises(IndexError, match=r"atomic at out_ptr\[9\]"):
        run(kernels.count, np.full(16, 9, np.int32), out=[((8,), F32)], N=16, BINS=8)


def test_masked_lanes_may_point_anywhere():
    np.testing.assert_array_equal(run(kernels.count, np.full(16, -7, np.int32), out=[((8,), F32)], N=16, BINS=8), 0)


def test_assembly_computes_what_it_says_and_what_is_unknown_is_refused():
    bits = 1 << np.arange(32, dtype=np.uint32)
    words = np.full(32, 0x80000005, np.uint32)
    x = np.where(np.arange(32) == 7, np.nan, np.arange(32)).astype(np.float32)
    got = run(kernels.if_bit, x, words, bits, out=[((32,), F32)], TEXT=IF_BIT.value, N=32)
    np.testing.assert_array_equal(got, np.where(np.isin(np.arange(32), (0, 2, 31)), x, -np.inf))
    with pytest.raises(NotImplementedError, match=r"IN_NUMPY: mov\.b32"):
        run(kernels.if_bit, x, words, bits, out=[((32,), F32)], TEXT="mov.b32 $0, $1;", N=32)


def test_operands_are_only_read():
    with pytest.raises(ValueError, match="store at x_ptr: operands are only read"):
        run(kernels.store_to_operand, normal(8), out=[((8,), F32)])


def test_a_block_is_no_condition():
    with pytest.raises(TypeError, match=r"use & \| ~ on blocks"):
        run(kernels.block_condition, normal(16), out=[((16,), F32)], N=16)


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8])
def test_what_is_not_written_does_not_look_right(dtype):
    out = run(kernels.store_at, out=[((8,), dtype)], INDEX=3)
    assert out[3] == 1
    rest = np.delete(out, 3)
    assert np.isnan(rest).all() if jnp.issubdtype(dtype, jnp.floating) else (rest > 80).all()


def test_what_is_masked_without_other_is_undefined():
    out = run(kernels.copy, normal(5), out=[((8,), F32)], SIZE=5, BLOCK=8)
    np.testing.assert_array_equal(out[:5], normal(5))
    assert np.isnan(out[5:]).all()


def test_the_language_is_left_as_it_was():
    import triton.language as tl
    from triton.runtime import interpreter

    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.tuple, tl.block_type, interpreter, type(kernels.add))
    before = [dict(vars(owner)) for owner in owners]
    names = set(vars(kernels))
    run(kernels.add, normal(8), normal(8), out=[((8,), F32)], SIZE=8, SHIFT=0, BLOCK=8)
    with pytest.raises(IndexError):
        run(kernels.store_at, out=[((8,), F32)], INDEX=9)
    assert [dict(vars(owner)) for owner in owners] == before
    assert set(vars(kernels)) == names


# What the interpreter computes


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16, jnp.float16])
def test_products_are_those_of_the_operands_in_float32(dtype, precision):
    a, b = normal(32, 32, dtype=dtype), normal(32, 32, dtype=dtype, seed=1)
    out = run(kernels.product, a, b, out=[((32, 32), F32)], N=32, PRECISION=precision)
    np.testing.assert_allclose(out, a.astype(F32) @ b.astype(F32).T, rtol=1e-5, atol=1e-5)


def test_a_product_rounds_to_nearest_bfloat16():
    a, b = normal(16, 16, dtype=jnp.bfloat16), normal(16, 16, dtype=jnp.bfloat16, seed=1)
    out = run(kernels.product, a, b, out=[((16, 16), jnp.bfloat16)], N=16, PRECISION="ieee")
    exact = a.astype(F32) @ b.astype(F32).T
    assert (np.abs(out.astype(F32) - exact) <= np.abs(exact) * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16, jnp.float16])
def test_arithmetic_comparisons_casts_and_reductions_in_each_type(dtype):
    x, y = normal(64, dtype=dtype), normal(64, dtype=dtype, seed=1)
    out, less, total, top = run(
        kernels.arithmetic, x, y, out=[((64,), dtype), ((64,), jnp.bool_), ((1,), dtype), ((1,), dtype)], N=64
    )
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    wanted = jnp.where(x < y, x.astype(F32) * y.astype(F32) - x.astype(F32), x.astype(F32) + y.astype(F32))
    np.testing.assert_allclose(out.astype(F32), wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(less, x < y)
    np.testing.assert_allclose(total.astype(F32), x.astype(F32).sum(), rtol=tolerance, atol=max(tolerance, 1e-5))
    assert top == y.max()


def test_helpers_return_tuples_and_maxima_pass_over_nan():
    x = np.array(normal(4, 8))
    x[1] = np.nan
    x[2, 3] = np.nan
    first, second = run(kernels.row_tops, x, out=[((2, 4), F32)], ROWS=4, COLS=8)
    ordered = np.sort(np.where(np.isnan(x), -np.inf, x), axis=1)
    rows = [0, 2, 3]
    np.testing.assert_array_equal(first[rows], ordered[rows, -1])
    np.testing.assert_array_equal(second[rows], ordered[rows, -2])
    assert np.isnan(first[1])


def test_members_of_values_and_builtins():
    x = normal(16, 16)
    out = run(kernels.members, x, out=[((3,), F32)], N=16)
    np.testing.assert_allclose(out, [(x.T * x).sum(), 0.5, 8], rtol=1e-4)


def test_random_bits_are_those_of_philox():
    seed = np.array([0xA4093822, 0x299F31D0], np.uint32)
    out = run(kernels.philox, seed, out=[((8, 4), np.uint32)], N=8, ROUNDS=10)
    np.testing.assert_array_equal(out, [philox_words((n, 0, 0, 0), seed) for n in range(8)])


def philox_words(counter, key):
    """Philox-4x32-10 in whole numbers. Source: Salmon et al. 2011, doi:10.1145/2063384.2063405."""
    c0, c1, c2, c3 = counter
    k0, k1 = map(int, key)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@pytest.mark.parametrize("bounds", [(0, 5), (3, 8), (4, 4)])
def test_loops_take_bounds_from_memory(bounds):
    x = normal(8)
    out = run(kernels.loops, np.array(bounds, np.int32), x, out=[((1,), F32)], STAGES=2)
    np.testing.assert_allclose(out[0], 3 * x[slice(*bounds)].sum(), rtol=1e-5)


def test_static_asserts_are_checked():
    with pytest.raises(AssertionError):
        run(kernels.loops, np.zeros(2, np.int32), normal(8), out=[((1,), F32)], STAGES=0)


def test_atomic_additions_to_one_place_all_count():
    x = np.array([0, 1, 1, 3, 3, 3, -1, 7] * 2, np.int32)
    out = run(kernels.count, x, out=[((8,), F32)], N=16, BINS=8)
    np.testing.assert_array_equal(out, [2, 4, 0, 6, 0, 0, 0, 2])
