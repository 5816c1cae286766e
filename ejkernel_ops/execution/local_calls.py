"""What each device runs of the calls that XLA shares out: found without compiling, by Shardy's own propagation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

from ..config.choice import describe
from ..config.selection import choose
from ..core.dims import Spec, spec_of
from ..core.invocation import Invocation
from ..core.primitive import kernel_p, tools
from ..core.refined_mesh import primes
from ..core.shards import on_shards, plan
from ..registry import SharedCall, find_shared, record
from ..utils.meta import SHARED, label

_PASSES = "builtin.module(sdy-propagation-pipeline)"
_SHARDING = "sdy.sharding"


def with_local_labels(text: str) -> str:
    """A program's text in which each call that XLA shares out has the labels of what one device runs of it.

    Those calls are recorded, as they are when XLA has compiled the program. A call that is not known in this process
    stays as it is.

    Args:
        text: StableHLO.
    """
    if SHARED not in text:
        return text
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        _inline(module)
        passmanager.PassManager.parse(_PASSES).run(module.operation)
        ops: list[Any] = [op.operation for op in module.body]
        meshes = {op.attributes["sym_name"].value: _axes(op) for op in ops if op.name == "sdy.mesh"}
        for op in _operations(module.operation):
            _localise(op, meshes)
        return str(module)


def _inline(module: Any) -> None:
    """Puts the body of each function in the place of its calls, as XLA does: Shardy alone sees none inside a loop."""
    functions = {
        op.attributes["sym_name"].value: op.operation for op in module.body if op.operation.name == "func.func"
    }
    flat: set[str] = set()

    def flatten(name: str) -> None:
        for call in [op for op in _operations(functions[name]) if op.name == "func.call"]:
            callee = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            if callee not in flat:
                flatten(callee)
            _put_in_place(call, functions[callee].clone())
        flat.add(name)

    for name in functions:
        if name not in flat:
            flatten(name)
    for function in functions.values():
        if _is_private(function):
            function.erase()


def _is_private(function: Any) -> bool:
    found = function.attributes
    return "sym_visibility" in found and ir.StringAttr(found["sym_visibility"]).value == "private"


def _put_in_place(call: Any, function: Any) -> None:
    """Moves the body of a function to where it is called, and takes the call away."""
    [body] = function.regions[0]
    for argument, value in zip(body.arguments, call.operands):
        argument.replace_all_uses_with(value)
    *ops, last = body.operations
    for op in ops:
        op.move_before(call)
    for result, value in zip(call.results, last.operands):
        result.replace_all_uses_with(value)
    call.erase()
    function.erase()


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from _operations(op.operation)


def _axes(mesh: Any) -> dict[str, int]:
    return {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(mesh.attributes["mesh"]).axes)}


def _localise(op: Any, meshes: dict[str, dict[str, int]]) -> None:
    """Puts the labels of the parts on a call, if it is one that is shared out."""
    if "mhlo.frontend_attributes" not in op.attributes:
        return
    marks = {mark.name: mark.attr for mark in ir.DictAttr(op.attributes["mhlo.frontend_attributes"])}
    if SHARED not in marks or (shared := find_shared(ir.StringAttr(marks[SHARED]).value)) is None:
        return
    found = list(_local_calls(shared, op, meshes))
    choices = [choose(inv, inv.call.snapshot, inv.call.generation) for inv in found]
    for inv in found:
        record(inv)
    labels = " ".join(label(inv.op_id_v, inv.call_key) for inv in found)
    configs = "\n".join(map(describe, choices))
    marks |= {"ejkernel_call": ir.StringAttr.get(labels), "ejkernel_cfg": ir.StringAttr.get(configs)}
    del marks[SHARED]
    op.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(marks)


def _local_calls(shared: SharedCall, op: Any, meshes: dict[str, dict[str, int]]) -> Iterator[Invocation]:
    """The calls that one device makes for a shared one, given how the operands and results of its op are split."""
    parts = _Parts(meshes, _manual_axes(op))
    specs = [parts.spec(_sharding(value), value.type.rank) for value in (*op.operands, *list(op.results)[1:])]
    found = plan(shared.arrays, specs, parts.sizes)
    split = [spec_of(array, found.axes) for array in shared.arrays.operands]
    local = [jax.ShapeDtypeStruct(_shape(x, spec, parts.sizes), x.dtype) for x, spec in zip(shared.operands, split)]
    calls: list[Invocation] = []

    def bind(*operands: Any, call: Any) -> list[Any]:
        calls.append(call.invocation(operands, shared.platform))
        return kernel_p.bind(*operands, call=call)

    def run(*operands: Any) -> list[Any]:
        return on_shards(tools(shared.platform, bind), shared.call, found, operands)

    jax.make_jaxpr(run, axis_env=list(parts.sizes.items()))(*local)
    return iter(calls)


def _shape(whole: Any, spec: Spec, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of a device's part of an array."""
    return tuple(size // math.prod(sizes[axis] for axis in axes) for size, axes in zip(whole.shape, spec))


def _sharding(value: Any) -> Any:
    """How Shardy splits a value; `None` where each device has all of it."""
    if isinstance(value.owner, ir.Block):
        owner, index = value.owner.owner.operation, ir.BlockArgument(value).arg_number
        if owner.name == "func.func":
            if "arg_attrs" not in owner.attributes:
                return None
            attributes = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[index])
            return attributes[_SHARDING] if _SHARDING in attributes else None
        if owner.name == "sdy.manual_computation":
            return sdy.TensorShardingPerValueAttr(owner.attributes["in_shardings"]).shardings[index]
        if owner.name != "stablehlo.while":  # whose results are split as the arguments of its body
            return None
    else:
        owner, index = value.owner, ir.OpResult(value).result_number
        if owner.name == "sdy.reshard":
            return owner.attributes["sharding"]
        if owner.name == "sdy.manual_computation":
            return sdy.TensorShardingPerValueAttr(owner.attributes["out_shardings"]).shardings[index]
    if _SHARDING not in owner.attributes:
        return None
    return sdy.TensorShardingPerValueAttr(owner.attributes[_SHARDING]).shardings[index]


def _manual_axes(op: Any) -> set[str]:
    """The mesh axes along which an op sees one device's part already: those of each `shard_map` around it."""
    found: set[str] = set()
    while (op := op.parent) is not None:
        op = op.operation
        if op.name == "sdy.manual_computation":
            found |= set(re.findall(r'"([^"]*)"', str(op.attributes["manual_axes"])))
    return found


class _Parts:
    """The prime parts of mesh axes, and specs in them, some axes left out.

    Attributes:
        sizes: of each part.
    """

    def __init__(self, meshes: dict[str, dict[str, int]], without: set[str]):
        self._meshes, self._without = meshes, without
        self.sizes: dict[str, int] = {}

    def spec(self, attribute: Any, rank: int) -> Spec:
        """The parts that split each axis of an array."""
        if attribute is None:
            return ((),) * rank
        sharding = sdy.TensorShardingAttr(attribute)
        mesh = self._mesh(sharding)
        dims = [sdy.DimensionShardingAttr(dim) for dim in sharding.dimension_shardings]
        return tuple(
            tuple(part for axis in dim.axes for part in self._parts(sdy.AxisRefAttr(axis), mesh)) for dim in dims
        )

    def _mesh(self, sharding: Any) -> dict[str, int]:
        reference = sharding.mesh_or_ref
        if (name := str(reference)).startswith("@"):
            return self._meshes[name[1:]]
        return {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(reference).axes)}

    def _parts(self, axis: Any, mesh: dict[str, int]) -> list[str]:
        if axis.name in self._without:
            return []
        first, size = 1, mesh[axis.name]
        if axis.sub_axis_info is not None:
            sub = sdy.SubAxisInfoAttr(axis.sub_axis_info)
            first, size = sub.pre_size, sub.size
        names = []
        for prime in primes(size):
            names.append(f"{axis.name}.{first}")
            self.sizes[names[-1]] = prime
            first *= prime
        return names
