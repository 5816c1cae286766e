"""Memory of a Triton kernel under interpretation: NumPy arrays, each access to which is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_TYPES = {
    tl.int1: np.dtype(bool), tl.int8: np.dtype(np.int8), tl.uint8: np.dtype(np.uint8),
    tl.int16: np.dtype(np.int16), tl.uint16: np.dtype(np.uint16), tl.int32: np.dtype(np.int32),
    tl.uint32: np.dtype(np.uint32), tl.int64: np.dtype(np.int64), tl.uint64: np.dtype(np.uint64),
    tl.float16: np.dtype(np.float16), tl.bfloat16: np.dtype(jnp.bfloat16),
    tl.float32: np.dtype(np.float32), tl.float64: np.dtype(np.float64),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_STRANGE = 0x5A  # each byte of an integer that nobody wrote
_SPAN = 40  # bits of address: an array has a terabyte for itself and starts in its middle


def numpy_type(dtype: Any) -> np.dtype:
    """How values of a Triton type are stored."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _TYPES[dtype.scalar]


def unwritten(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of NaN, or of strange integers."""
    array = np.empty(shape, dtype)
    if array.dtype in _NAMES and _NAMES[array.dtype].is_floating():
        array.fill(np.nan)
    else:
        array.reshape(-1).view(np.uint8).fill(array.dtype == bool or _STRANGE)
    return array


class Memory:
    """The arrays of one call. An address says which array it is meant for, however far outside it lies."""

    def __init__(self, kernel: triton.JITFunction, arrays: Sequence[np.ndarray], num_operands: int):
        self.kernel, self.arrays, self.num_operands = kernel, arrays, num_operands
        self.pointers = [_pointer(i, array.dtype) for i, array in enumerate(arrays)]
        self.program: tuple[int, ...] = ()

    def load(self, addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Values at the addresses (a vector)."""
        values = np.empty(addresses.shape, dtype)
        for lanes, array, index in self._places(addresses, dtype, "load"):
            values[lanes] = array[index]
        return values

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Writes values to the addresses (vectors)."""
        for lanes, array, index in self._places(addresses, values.dtype, "store"):
            array[index] = values[lanes]

    def update(self, addresses: np.ndarray, dtype: np.dtype, new: Callable[[int, Any], Any]) -> np.ndarray:
        """Replaces each old value by `new(lane, old)`, one lane after the other; returns the old values."""
        old = np.empty(addresses.shape, dtype)
        numbers = np.arange(addresses.size)
        for lanes, array, index in self._places(addresses, dtype, "atomic"):
            for lane, i in zip(numbers[lanes], index):
                old[lane] = array[i]
                array[i] = new(lane, old[lane])
        return old

    def _places(self, addresses: np.ndarray, dtype: np.dtype, access: str) -> Iterator[tuple[Any, np.ndarray, Any]]:
        """Per array: the lanes that point into it, the array as `dtype`, and the elements."""
        if not addresses.size:
            return
        first, last = (self._owner(bound) for bound in (addresses.min(), addresses.max()))
        groups = [(slice(None), first)]
        if first != last:
            owners = np.clip(addresses >> _SPAN, first, last)
            groups = [(owners == owner, owner) for owner in range(first, last + 1)]
        shift = dtype.itemsize.bit_length() - 1
        for lanes, owner in groups:
            array, offset = self.arrays[owner], addresses[lanes] - _address(owner)
            outside = offset.view(np.uint64) >= array.nbytes  # the negative ones are huge
            if outside.any():
                first = int(offset[outside.argmax()]) // array.itemsize
                raise IndexError(
                    f"{self._where(access, owner)}[{first}], which has {array.size} elements; "
                    f"{outside.sum()} of {len(offset)} lanes are outside"
                )
            if access != "load" and owner < self.num_operands:
                raise ValueError(f"{self._where(access, owner)}: operands are only read; write to an output")
            yield lanes, array.view(dtype), offset >> shift

    def _owner(self, address: int) -> int:
        return min(max(int(address) >> _SPAN, 0), len(self.arrays) - 1)

    def _where(self, access: str, owner: int) -> str:
        name = self.kernel.params[owner].name
        return f"Triton kernel {self.kernel.__name__}, program {self.program}: {access} at {name}"


def _address(number: int) -> int:
    return (int(number) << _SPAN) + (1 << _SPAN - 1)


def _pointer(number: int, dtype: np.dtype) -> tl.tensor:
    if dtype not in _NAMES:
        raise TypeError(f"Triton's interpreter has no {dtype}; expected one of {', '.join(map(str, _NAMES))}")
    kind = tl.pointer_type(_NAMES[dtype])
    return tl.tensor(TensorHandle(np.array([_address(number)], np.uint64), kind), kind)
