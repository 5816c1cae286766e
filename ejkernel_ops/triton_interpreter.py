"""Runs a Triton kernel's source on NumPy arrays, so that kernels are tested where there is no GPU.

Built on Triton's interpreter, with what that lacks: each access is checked against the array that it is meant for,
bfloat16 is right, neither torch nor `TRITON_INTERPRET` is needed, and the same process can compile the same kernel.
Products of float32 are exact (a GPU's default is TF32), and programs run one after the other: it shows no races.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .triton_assembly import IN_NUMPY
from .triton_memory import Memory, numpy_type, unwritten

# While a kernel runs here, `triton.language` is the interpreter's: nothing may compile then.
LOCK = threading.RLock()

_ABSENT = object()


def interpret(
    kernel: triton.JITFunction,
    grid: Sequence[int],
    operands: Sequence[np.ndarray],
    out_types: Sequence[Any],
    constants: Mapping[str, Any],
    aliases: Sequence[tuple[int, int]] = (),
) -> list[np.ndarray]:
    """Runs every program of a kernel, one after the other.

    Args:
        kernel: a `@triton.jit` function whose parameters are operands, then outputs, then constants.
        grid: number of programs in up to three dimensions.
        operands: arrays, which are only read.
        out_types: objects with the `shape` and `dtype` of each output.
        constants: values of the `tl.constexpr` parameters.
        aliases: operand and output, by number, that share memory; the operand itself stays as it is.

    Returns:
        The outputs: NaN, or a strange integer, where the kernel wrote nothing.

    Raises:
        IndexError: an access outside every array, with the kernel, the program, the array and the element.
        ValueError: a store to an operand.

    Example:
        `interpret(add, (4,), [x, y], [jax.ShapeDtypeStruct(x.shape, x.dtype)], {"BLOCK": 64})`
    """
    outs = [unwritten(t.shape, t.dtype) for t in out_types]
    arrays = [np.ascontiguousarray(a).reshape(-1) for a in operands]
    for operand, out in aliases:
        outs[out] = np.array(operands[operand])
        arrays[operand] = outs[out].reshape(-1)
    arrays += [a.reshape(-1) for a in outs]
    memory = Memory(kernel, arrays, len(operands))
    with LOCK, _interpreted_language(), np.errstate(all="ignore"):
        _BUILDER.memory = memory
        _BUILDER.set_grid_dim(*grid, *[1] * (3 - len(grid)))
        run = _python_function(kernel)
        try:
            for program in itertools.product(*map(range, _BUILDER.grid_dim)):
                _BUILDER.set_grid_idx(*program)
                memory.program = program
                run(*memory.pointers, **constants)
        finally:
            del _BUILDER.memory
    return outs


def _wide(data: np.ndarray) -> np.ndarray:
    """Narrow numbers in 32 bits, in which sums and products are exact enough."""
    if data.dtype.itemsize >= 4:
        return data
    return data.astype(np.int32 if data.dtype.kind in "bui" else np.float32)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a @ b` in pieces below the size at which BLAS wakes its threads: with cores shared, five times as fast."""
    rows = max(1, (1 << 18) // max(1, b.shape[-1] * b.shape[-2]))
    return np.concatenate([a[..., i : i + rows, :] @ b for i in range(0, a.shape[-2], rows)], axis=-2)


# Operations


class _Builder(interpreter.InterpreterBuilder):
    """Triton's operations on NumPy arrays, with checked memory and with bfloat16."""

    memory: Memory
    grid_dim: tuple[int, int, int]

    def __init__(self):
        super().__init__()
        # Asserts of the device run. Overflow may be meant: random bits are made of it.
        self.options = dataclasses.replace(self.options, debug=True, sanitize_overflow=False)

    def create_load(self, ptr, *options):
        return self.create_masked_load(ptr, None, None)

    def create_masked_load(self, ptrs, mask, other, *options, **more):
        kind = ptrs.get_element_ty()
        dtype, addresses = numpy_type(kind), ptrs.data.view(np.int64)
        if other is not None:
            values = other.data.astype(dtype)
        elif addresses.size == 1:  # Triton takes a scalar `other=0` for none
            values = np.zeros(addresses.shape, dtype)
        else:
            values = unwritten(addresses.shape, dtype)
        lanes = _lanes(mask, addresses)
        values[lanes] = self.memory.load(addresses[lanes], dtype)
        return interpreter.TensorHandle(values, kind)

    def create_store(self, ptr, val, *options):
        self.create_masked_store(ptr, val, None)

    def create_masked_store(self, ptrs, value, mask, *options):
        addresses = ptrs.data.view(np.int64)
        lanes = _lanes(mask, addresses)
        self.memory.store(addresses[lanes], value.data.astype(numpy_type(ptrs.get_element_ty()), copy=False)[lanes])

    def create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope):
        lanes, operation = _lanes(mask, ptr.data), _ATOMICS[rmwOp]
        given = val.data[lanes]
        return self._update(ptr, val, lanes, lambda lane, old: operation(old, given[lane]))

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        lanes = _lanes(None, ptr.data)
        expected, given = cmp.data[lanes], val.data[lanes]
        return self._update(ptr, val, lanes, lambda lane, old: given[lane] if old == expected[lane] else old)

    def _update(self, ptr, val, lanes, new):
        old = np.zeros(val.data.shape, val.data.dtype)
        old[lanes] = self.memory.update(ptr.data.view(np.int64)[lanes], old.dtype, new)
        return interpreter.TensorHandle(old, val.dtype.scalar)

    def cast_impl(self, src, dst_type):
        return interpreter.TensorHandle(src.data.astype(numpy_type(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"Triton's interpreter has no rounding mode {rounding_mode}")
        return self.cast_impl(src, dst_type)

    def create_dot(self, a, b, d, *options):
        data = _product(_wide(a.data), _wide(b.data)) + d.data
        return interpreter.TensorHandle(data.astype(d.data.dtype, copy=False), d.dtype.scalar)

    def create_umulhi(self, lhs, rhs):
        if lhs.data.dtype.itemsize != 4:
            return super().create_umulhi(lhs, rhs)
        product = lhs.data.view(np.uint32).astype(np.uint64) * rhs.data.view(np.uint32)
        return interpreter.TensorHandle((product >> 32).astype(lhs.data.dtype), lhs.dtype.scalar)

    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)  # of NaN and a number: the number

    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(self, arg, lo, hi, propagate_nans):
        if propagate_nans == interpreter._ir.PROPAGATE_NAN.ALL:
            return self.ternary_op(arg, lo, hi, np.clip)
        return self.create_minnumf(self.create_maxnumf(arg, lo), hi)

    def create_inline_asm(self, text, constraints, values, types, is_pure, pack):
        if text not in IN_NUMPY:
            raise NotImplementedError(f"no NumPy form of this assembly is known, add one to IN_NUMPY: {text}")
        (kind,) = types
        return _Results([interpreter.TensorHandle(IN_NUMPY[text](*[x.data for x in values]), kind.scalar)])

    def get_all_ones_value(self, type):
        return interpreter.TensorHandle(~np.zeros(1, numpy_type(type)), type.scalar)


@dataclasses.dataclass(frozen=True)
class _Results:
    values: list[interpreter.TensorHandle]

    def get_result(self, i: int) -> interpreter.TensorHandle:
        return self.values[i]


def _lanes(mask: Any, addresses: np.ndarray) -> np.ndarray:
    """Which lanes are active; Triton gives a mask, none, or the array of one."""
    if mask is None:
        return np.ones(addresses.shape, bool)
    return mask.data if isinstance(mask, interpreter.TensorHandle) else mask


_RMW = interpreter._ir.ATOMIC_OP
_ATOMICS = {
    _RMW.ADD: np.add, _RMW.FADD: np.add, _RMW.MIN: np.minimum, _RMW.UMIN: np.minimum, _RMW.MAX: np.maximum,
    _RMW.UMAX: np.maximum, _RMW.AND: np.bitwise_and, _RMW.OR: np.bitwise_or, _RMW.XOR: np.bitwise_xor,
    _RMW.XCHG: lambda old, new: new,
}  # fmt: skip


class _Reduction(interpreter.ReduceOps):
    """`tl.max`, `tl.min` and `tl.sum`; the rest is Triton's."""

    def apply_impl(self, input):
        ufuncs = {"_elementwise_max": np.fmax, "_elementwise_min": np.fmin, "_sum_combine": np.add}
        name = self.combine_fn.__name__
        if name not in ufuncs or self.combine_fn is not getattr(tl.standard, name):
            return super().apply_impl(input)
        data = ufuncs[name].reduce(_wide(input[0].handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, input[0].dtype)


def _reduce(x, axis, combine_fn, keep_dims=False, **_):
    return _Reduction(axis, combine_fn, keep_dims).apply(x)


class _Semantic(TritonSemantic):
    """Triton's rules of types; it broadcasts as NumPy does, which is faster."""

    def broadcast_impl_value(self, lhs, rhs):
        left, right = (x.handle.data.shape if x.type.is_block() else () for x in (lhs, rhs))
        if left == right:
            return lhs, rhs
        shape = np.broadcast_shapes(left, right)
        return self._broadcast(lhs, left, shape), self._broadcast(rhs, right, shape)

    def _broadcast(self, x, shape, wanted):
        if shape == wanted:
            return x
        handle = interpreter.TensorHandle(np.broadcast_to(x.handle.data, wanted), x.dtype)
        return self.tensor(handle, tl.block_type(x.dtype, wanted))


_BUILDER = _Builder()
_SEMANTIC = _Semantic(_BUILDER)


# Language


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Makes `triton.language`, and calls of `@triton.jit` functions, work on NumPy arrays."""
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in _changes()]
    try:
        for owner, name, value in _changes():
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)


@functools.cache
def _changes() -> list[tuple[Any, str, Any]]:
    """Owner, name and value of all that is changed; found once, because looking takes a while."""
    found: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def change(owner: Any, name: str, value: Any) -> None:
        found[id(owner), name] = owner, name, value

    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                change(owner, name, _builtin(member))
            elif owner is tl.tensor and isinstance(member, triton.JITFunction):  # such as `x.sum()`
                change(owner, name, _method(member))
    scope: Any = types.SimpleNamespace(set_attr=change)
    for module in (tl, tl.core):
        interpreter._patch_lang_core(module, scope)
        change(module, "range", _range)
        change(module, "reduce", _reduce)
    change(tl.tensor, "__bool__", lambda x: x.type.is_block() or bool(x.handle.data.item()))
    change(tl.tensor, "__index__", lambda x: int(x.handle.data.item()))
    change(tl.tensor, "T", property(lambda x: tl.trans(x)))
    change(triton.JITFunction, "__call__", _call)
    # Most of the time otherwise: types are made anew, with their names, for each value.
    change(tl.tuple, "__init__", _make_tuple)
    change(tl.tuple, "type", _TUPLE_TYPE)
    change(tl.block_type, "__init__", _make_block_type)
    change(tl.tensor, "__init__", _make_tensor)
    change(interpreter, "_get_np_dtype", numpy_type)
    return list(found.values())


def _builtin(member: Callable) -> Callable:
    def call(*args, _semantic=None, **kwargs):
        return member(*args, **kwargs, _semantic=_SEMANTIC)

    return call


def _method(member: triton.JITFunction) -> Callable:
    return lambda self, *args, **kwargs: _call(member, self, *args, **kwargs)


def _call(kernel: triton.JITFunction, *args, _semantic=None, _generator=None, **kwargs):
    return _python_function(kernel)(*args, **kwargs)


def _range(start, stop=None, step=1, **_pipelining):
    """`range` and `tl.range`: numbers are tensors, as in compiled code."""
    bounds: list[Any] = [_SEMANTIC.to_tensor(x) for x in ((0, start, step) if stop is None else (start, stop, step))]
    kind = tl.int64 if any(x.dtype.primitive_bitwidth == 64 for x in bounds) else tl.int32
    for number in range(*map(int, bounds)):
        yield _SEMANTIC.cast(_SEMANTIC.to_tensor(number), kind)


def _min(*values):
    return functools.reduce(tl.minimum, values) if any(isinstance(x, tl.tensor) for x in values) else min(*values)


def _max(*values):
    return functools.reduce(tl.maximum, values) if any(isinstance(x, tl.tensor) for x in values) else max(*values)


# Values and their types, faster than Triton's

_SCALAR = tl.tuple([]), tl.constexpr(1)  # shape and size
_TUPLE_TYPE = functools.cached_property(lambda self: tl.core._type_for_tuple_values(self.values))
_TUPLE_TYPE.__set_name__(tl.tuple, "type")


def _make_tuple(self, args, type=None):
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _make_block_type(self, element_ty, shape):
    self.shape, self.numel, self.shape_and_size, text = _block(tuple([getattr(size, "value", size) for size in shape]))
    self.element_ty, self.name = element_ty, f"<{text}, {element_ty.name}>"


@functools.lru_cache(maxsize=4096)
def _block(shape, make=tl.block_type.__init__):
    one = object.__new__(tl.block_type)
    make(one, tl.float32, list(shape))
    return one.shape, one.numel, (tl.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(one.numel)), str(one.shape)


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.shape_and_size if type.is_block() else _SCALAR


# Source

_FUNCTIONS: dict[types.FunctionType, Callable] = {}


def _python_function(kernel: triton.JITFunction) -> Callable:
    """The kernel as plain Python; rewritten once, under the lock."""
    if kernel.fn not in _FUNCTIONS:
        lines, first = inspect.getsourcelines(kernel.fn)
        decorators = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
        tree = ast.fix_missing_locations(_AsCompiled().visit(kernel.parse()))
        ast.increment_lineno(tree, first + decorators - 1)
        flags = __future__.annotations.compiler_flag  # so that they are not evaluated
        code = compile(tree, kernel.fn.__code__.co_filename, "exec", flags, dont_inherit=True)
        # A copy, so that nothing is left in the kernel's own module.
        scope = kernel.get_capture_scope() | {
            "range": _range, "min": _min, "max": _max, "_assigned": _assigned, "_condition": _condition,
        }  # fmt: skip
        exec(code, scope)
        _FUNCTIONS[kernel.fn] = scope[kernel.fn.__name__]
    return _FUNCTIONS[kernel.fn]


class _AsCompiled(ast.NodeTransformer):
    """Where Triton's compiler and Python differ: what is assigned becomes a tensor, and a block is no condition."""

    def visit_Assign(self, node):
        node.value = _calling("_assigned", self.visit(node.value))
        return node

    def _visit_test(self, node):
        self.generic_visit(node)
        node.test = _calling("_condition", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _visit_test

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        node.values = [_calling("_condition", value) for value in node.values]
        return node

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _calling("_condition", node.operand)
        return node


def _calling(name: str, value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [value], [])


def _assigned(value):
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_assigned, value))
    return _SEMANTIC.to_tensor(value.value if isinstance(value, tl.constexpr) else value, False)


def _condition(value):
    if isinstance(value, tl.tensor) and len(value.shape) > 0:
        raise TypeError("a block of values is no condition: use & | ~ on blocks, or tl.where")
    return value
