"""Names of dimensions: which axes of a call's arrays devices may split, and what is summed where one is split."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ..errors import ConfigError
from ..utils.fingerprint import is_array

Layout = tuple[tuple[str, ...], ...]  # for each axis of an array the factors that devices may split it by
Spec = Sequence[tuple[str, ...]]  # for each axis of an array the mesh axes that split it


@dataclasses.dataclass(frozen=True)
class Dims:
    """The names of the axes of a kernel's arrays, from which follows how devices share out a call.

    A name that is split means that each device has a part of every axis of that name, and an axis of length 1 of it
    whole. An output that lacks a split name is the sum of what the devices have. Names that nothing may split, as they
    are needed whole, need no name of their own: any will do.

    The text `"out | in"` is an array with one axis, `out`, that is the same on every device where `in` is split: such a
    bias's gradient is no sum over it, and neither is an output that `Kernel.on_shards` sums itself.

    Args:
        operands: by parameter, the names of an array's axes as text, `*r` for any number of axes; of a tree of arrays
            the text for all of them, or a tuple with an entry for each child.
        outputs: the same of the output. A backward kernel has none: a gradient's axes are those of its operand.
        split: the names that may be split, those of rows first: where arrays disagree, rows have their way.
        parts: names that are made of two, such as heads of key heads and of query heads of one key head: the second is
            split only where each device needs a single one of the first. If mesh axes cannot be divided, it may have
            all of those: `on_shards` then takes its own.
        residuals: as `outputs`, of what `fwd_with_residuals` returns besides.

    Raises:
        ConfigError: a name of `parts` that is not split.

    Example:
        >>> Dims(operands={"x": "*rows in", "weight": "in out"}, outputs="*rows out", split="*rows in out").split
        '*rows in out'
    """

    operands: Mapping[str, Any]
    outputs: Any = ()
    _: dataclasses.KW_ONLY
    split: str
    parts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    residuals: Any = ()

    def __post_init__(self):
        for name, parts in self.parts.items():
            if missing := sorted(set(parts) - set(self.split.split())):
                raise ConfigError(f"parts of {name!r} name {missing}, which split={self.split!r} does not")


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or output of a call, as far as splitting it goes.

    Args:
        shape: its shape.
        layout: the factors of each axis.
        unsummed: factors that it lacks and is not the sum over.
        name: the parameter of an operand, or that whose gradient an output is.
    """

    shape: tuple[int, ...]
    layout: Layout
    unsummed: frozenset[str] = frozenset()
    name: str = ""

    @property
    def factors(self) -> set[str]:
        """All of its factors."""
        return {factor for axis in self.layout for factor in axis}


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a call, and the sizes of their factors.

    Args:
        operands: in order.
        outputs: in order.
        sizes: of each factor.
        parts: pairs of factors of which the second is split only below a wholly split first.
        lead: the factors of rows.
    """

    operands: tuple[Array, ...]
    outputs: tuple[Array, ...]
    sizes: Mapping[str, int]
    parts: Mapping[str, str]
    lead: frozenset[str]

    def assign(self, specs: Sequence[Spec], axis_size: Callable[[str], int]) -> dict[str, tuple[str, ...]]:
        """Which mesh axes split each factor, given how the arrays come, and how the outputs are wanted.

        Where arrays are split differently along one mesh axis, most of them have their way, and those with rows where
        as many are for either: so a weight that is kept in parts comes whole to rows that are split alike, and rows
        that are split among other things come whole to a weight whose parts do the work. Each factor then takes the
        axes of the first array that has it split; what does not fit is left out, and the array comes whole.

        Args:
            specs: of each operand, then of each output.
            axis_size: the size of a mesh axis.
        """
        arrays = zip((*self.operands, *self.outputs), specs)
        pairs = sorted(arrays, key=lambda pair: not pair[0].factors & self.lead)
        splits = [(factors, axes) for array, spec in pairs for factors, axes in zip(array.layout, spec) if factors]
        votes: dict[str, Counter[str]] = {}
        for factors, axes in splits:
            for axis in axes:
                votes.setdefault(axis, Counter())[factors[0]] += 1
        owner = {axis: counts.most_common(1)[0][0] for axis, counts in votes.items()}  # the first of equals
        found: dict[str, tuple[str, ...]] = {}
        for factors, axes in splits:
            self._take(factors, [axis for axis in axes if owner[axis] == factors[0]], found, axis_size)
        return found

    def _take(self, factors: tuple[str, ...], axes: list[str], found: dict, axis_size: Callable[[str], int]) -> None:
        used = {axis for taken in found.values() for axis in taken}
        axes = [axis for axis in axes if axis not in used]
        for factor in factors:
            if factor not in found:
                taken: list[str] = []
                while axes and self.sizes[factor] % math.prod(map(axis_size, [*taken, axes[0]])) == 0:
                    taken.append(axes.pop(0))
                if taken:
                    found[factor] = tuple(taken)
                elif self._below(factor, math.prod(map(axis_size, axes))):
                    found[self.parts[factor]] = tuple(axes)
                    return
            if math.prod(map(axis_size, found.get(factor, ()))) != self.sizes[factor]:
                return

    def _below(self, factor: str, count: int) -> bool:
        """Whether so many devices, along axes that are not divided, may each have a part of one of a factor's pairs."""
        if factor not in self.parts or count == 1:
            return False
        size = self.sizes[factor]
        return count % size == 0 and size * self.sizes[self.parts[factor]] % count == 0


def spec_of(array: Array, axes: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis of an array."""
    return tuple(tuple(axis for factor in factors for axis in axes.get(factor, ())) for factors in array.layout)


def summed_axes(output: Array, axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The mesh axes over which an output is the sum of what devices have."""
    own = output.factors | output.unsummed
    return tuple(axis for factor, taken in axes.items() if factor not in own for axis in taken)


def lacking(array: Array, axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The mesh axes along which every device has the same of an array."""
    return tuple(axis for factor, taken in axes.items() if factor not in array.factors for axis in taken)


# From names to factors


def arrays_of(
    call: Any, operands: Sequence[Any], outputs: Sequence[Any], output_tree: Any, kinds: Any
) -> Arrays | None:
    """How a call's arrays may be split; `None` where nothing is known of them.

    Args:
        call: the call.
        operands: its arrays, or their types.
        outputs: the types of its outputs.
        output_tree: their structure; `None` of a backward call.
        kinds: the row kind of each output.
    """
    bound = call.arguments([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands])
    dims = call.kernel.dims(**bound.arguments)
    if dims is None:
        return _by_rows(call, operands, outputs, kinds)
    operand_names = [name for name, value in bound.arguments.items() for _ in _texts("", value)]
    names = [text for name, value in bound.arguments.items() for text in _texts(dims.operands.get(name, ""), value)]
    if call.forward is None:
        out = jax.tree.unflatten(output_tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs])
        wanted = (dims.outputs, dims.residuals) if call.residuals else dims.outputs
        out_names = _texts(wanted, out)
        gradients = [""] * len(out_names)
    else:
        forward = call.forward.arguments([jax.ShapeDtypeStruct((), bool)] * len(call.needs)).arguments
        pairs = [(name, text) for name, value in forward.items() for text in _texts(dims.operands.get(name, ""), value)]
        pairs = [pair for pair, needed in zip(pairs, call.needs) if needed]
        gradients, out_names = [name for name, _ in pairs], [text for _, text in pairs]
    found = _arrays(dims, (*names, *out_names), (*operands, *outputs), len(operands))
    return dataclasses.replace(
        found, operands=_named_as(found.operands, operand_names), outputs=_named_as(found.outputs, gradients)
    )


def _named_as(arrays: Sequence[Array], names: Sequence[str]) -> tuple[Array, ...]:
    return tuple(dataclasses.replace(array, name=name) for array, name in zip(arrays, names))


def _arrays(dims: Dims, texts: Sequence[str], arrays: Sequence[Any], num_operands: int) -> Arrays:
    split = dims.split.split()
    own, without = zip(*(text.partition("|")[::2] for text in texts))
    axes = [_axis_names(text, len(x.shape)) for text, x in zip(own, arrays)]
    sizes: dict[str, int] = {}
    for each, x in zip(axes, arrays):
        for name, size in zip(each, x.shape):
            sizes[name] = max(size, sizes.get(name, 1))
    below = {}
    for name, (first, second) in dims.parts.items():
        if name in sizes:
            sizes[second] = sizes[name] // sizes.setdefault(first, 1)
            below[first] = second
    splits = {name for name in sizes if _named(name) in split}

    def factors(name: str, size: int) -> tuple[str, ...]:
        parts = dims.parts.get(name, (name,))
        return () if size == 1 else tuple(p for p in parts if p in splits and sizes[p] > 1)

    def array(names: list[str], x: Any, without: str) -> Array:
        same = frozenset(name for name in splits if _named(name) in without.split())
        return Array(tuple(x.shape), tuple(map(factors, names, x.shape)), same)

    found = tuple(map(array, axes, arrays, without))
    lead = frozenset(name for name in splits if split and _named(name) == split[0])
    return Arrays(found[:num_operands], found[num_operands:], sizes, below, lead)


def _axis_names(text: str, rank: int) -> list[str]:
    """The name of each axis; those of `*r` are `*r.0`, `*r.1` and so on."""
    names = text.split()
    extra = rank - len(names) + 1
    return [n for name in names for n in ([f"{name}.{i}" for i in range(extra)] if name[0] == "*" else [name])]


def _named(name: str) -> str:
    return name.split(".")[0]


def _texts(names: Any, value: Any) -> list[str]:
    """The text of each array in a value, from one for all of them or a tuple of those of its children."""
    leaves = jax.tree.leaves(value)
    if isinstance(names, str):
        return [names] * sum(map(is_array, leaves))
    return [text for name, child in zip(names, value) for text in _texts(name, child)]


def _by_rows(call: Any, operands: Sequence[Any], outputs: Sequence[Any], kinds: Iterable[Any]) -> Arrays | None:
    """Of a kernel that says which arrays have rows: those may be split, and gradients of what they share summed."""
    kinds = tuple(kinds)
    if None in (*call.kinds, *kinds):
        return None
    rows = max((x.shape[0] for x, kind in zip(operands, call.kinds) if kind and x.shape), default=1)

    def has_rows(x: Any, kind: Any) -> bool:
        return kind is True or (kind == "broadcast" and x.shape[:1] == (rows,))

    def array(x: Any, kind: Any) -> Array:
        first = ("rows",) if has_rows(x, kind) and rows > 1 else ()
        return Array(tuple(x.shape), (first, *[()] * (len(x.shape) - 1))[: len(x.shape)])

    if call.forward is None and not all(map(has_rows, outputs, kinds)):
        return None  # an output that rows share may be anything of them, not only their sum
    found, made = (tuple(map(array, *pair)) for pair in ((operands, call.kinds), (outputs, kinds)))
    return Arrays(found, made, {"rows": rows}, {}, frozenset({"rows"}))
