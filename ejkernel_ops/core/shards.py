"""A call on the shards of one device: which part of each array it has, and what is summed over devices after it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .call import ARRAY, Call, make_call
from .dims import Arrays, Spec, spec_of, summed_axes


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the devices of a mesh share out a call.

    Args:
        axes: the mesh axes that split each factor of the call's arrays.
        operands: how each operand is split.
        outputs: how each output is split.
        sums: for each output the mesh axes over which the devices' outputs are added up.
        scatters: for each output `(axis, mesh axes)`: parts of its sum that each device keeps alone.
        mesh_axes: all axes of the mesh, in its order.
    """

    axes: Mapping[str, tuple[str, ...]]
    operands: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    sums: tuple[tuple[str, ...], ...]
    scatters: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]
    mesh_axes: tuple[str, ...]


def plan(arrays: Arrays, specs: Sequence[Spec], mesh: Mapping[str, int]) -> Plan:
    """The plan of a call, given how its operands come and how its outputs are wanted.

    Args:
        arrays: the call's.
        specs: of each operand, then of each output.
        mesh: the sizes of the mesh axes, in order.
    """
    axis_size = mesh.__getitem__
    axes = arrays.assign(specs, axis_size)
    outputs, sums, scatters = [], [], []
    for array, wanted in zip(arrays.outputs, specs[len(arrays.operands) :]):
        spec, left, kept = list(spec_of(array, axes)), list(summed_axes(array, axes)), []
        for dim, own in enumerate(spec):  # a gradient that is kept in parts need not be whole first
            more = tuple(a for a in wanted[dim] if a in left) if wanted[dim][: len(own)] == own else ()
            if more and array.shape[dim] % math.prod(map(axis_size, own + more)) == 0:
                spec[dim] = own + more
                kept.append((dim, more))
                left = [a for a in left if a not in more]
        outputs.append(_partition_spec(spec))
        sums.append(tuple(left))
        scatters.append(tuple(kept))
    operands = tuple(_partition_spec(spec_of(array, axes)) for array in arrays.operands)
    return Plan(axes, operands, tuple(outputs), tuple(sums), tuple(scatters), tuple(mesh))


def _partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))


@dataclasses.dataclass(frozen=True)
class Tools:
    """What running a call takes.

    Args:
        bind: binds a call, as `bind(*operands, call=call)`; its config and label are those of the operands' shapes.
        output_tree: the structure of a call's output, from the call and its operands.
        choose: the config of a call, from the call and its operands; `None` where it is not known yet.
    """

    bind: Callable[..., list[Any]]
    output_tree: Callable[[Call, Sequence[Any]], Any]
    choose: Callable[[Call, Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """The kernel of a call on other arguments: what its `on_shards` gets.

    Args:
        tools: what runs calls.
        call: the call of the whole arrays.
        mesh_axes: the axes of the mesh, in order.
    """

    tools: Tools
    call: Call
    mesh_axes: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Its output, or of a backward kernel the gradients by the forward's parameters."""
        call = self.call
        more = {"residuals": call.residuals} if call.forward is None else self._differentiated(args, kwargs)
        local, arrays = make_call(call.kernel, args, kwargs, call.explicit, call.snapshot, call.generation, **more)
        return _named(local, self.tools.bind(*arrays, call=local), lambda: self.tools.output_tree(local, arrays))

    def forward_cfg(self, *args: Any, **kwargs: Any) -> Any:
        """Of a backward kernel, the config of the forward of a call with these arguments; `None`: not known yet."""
        return self.tools.choose(*self._forward(args, kwargs))

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, list[Any]]:
        old = self.call.forward
        assert old is not None
        values = jax.tree.unflatten(old.treedef, old.leaves)
        count = len(inspect.BoundArguments(old.kernel.signature, dict(zip(old.names, values))).args)  # type: ignore[arg-type]
        state = self.call.explicit, self.call.snapshot, self.call.generation
        return make_call(old.kernel, tuple(args[:count]), dict(kwargs), *state, residuals=old.residuals)

    def _differentiated(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The forward of a backward call of these arguments, and which of its arrays want a gradient."""
        old, (forward, _) = self.call.forward, self._forward(args, kwargs)
        assert old is not None
        if forward.treedef == old.treedef:
            return {"forward": forward, "needs": self.call.needs}
        needs = iter(self.call.needs or ())
        values = jax.tree.unflatten(old.treedef, [leaf is ARRAY and next(needs) for leaf in old.leaves])
        wanted = {name: any(jax.tree.leaves(value)) for name, value in zip(old.names, values)}
        named = zip(forward.names, jax.tree.unflatten(forward.treedef, forward.leaves))
        found = [wanted[name] for name, value in named for leaf in jax.tree.leaves(value) if leaf is ARRAY]
        return {"forward": forward, "needs": tuple(found)}


def on_shards(tools: Tools, call: Call, found: Plan, operands: Sequence[Any]) -> list[Any]:
    """The outputs that a device has in the end, from its parts of the operands.

    Args:
        tools: what runs calls.
        call: the call of the whole arrays.
        found: how they are shared out.
        operands: the device's parts.
    """
    bound = call.arguments(operands)
    made = call.kernel.on_shards(Run(tools, call, found.mesh_axes), dict(found.axes), *bound.args, **bound.kwargs)
    outs = jax.tree.leaves(made if call.forward is None else [made.get(name) for name in call.forward.names])
    return [_reduced(out, sums, kept) for out, sums, kept in zip(outs, found.sums, found.scatters)]


def _named(call: Call, outs: Sequence[jax.Array], output_tree: Callable[[], Any]) -> Any:
    """What a call gives as its kernel's `on_shards` has it: the output, or gradients by the forward's parameters."""
    forward = call.forward
    if forward is None:
        return jax.tree.unflatten(output_tree(), outs)
    given, needs = iter(outs), iter(call.needs or ())
    leaves = [next(given) if leaf is ARRAY and next(needs) else None for leaf in forward.leaves]
    return dict(zip(forward.names, jax.tree.unflatten(forward.treedef, leaves)))


def _reduced(out: jax.Array, sums: tuple[str, ...], scatters: tuple[tuple[int, tuple[str, ...]], ...]) -> jax.Array:
    for dim, axes in scatters:
        out = jax.lax.psum_scatter(out, axes, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(out, sums) if sums else out
