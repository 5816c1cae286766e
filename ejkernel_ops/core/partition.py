"""Where a call meets a mesh: under Explicit axes it is mapped here, under Auto axes XLA asks how to share it out.

Source: `jax.experimental.custom_partitioning`, and Shardy's sharding rules, openxla.org/shardy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..environment import interpreting
from ..errors import ConfigError, UnsupportedError
from .dims import Array, Arrays, Spec
from .refined_mesh import axis_name, primes, specs_over_primes
from .shards import Plan, plan

_NO_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a program that is lowered.

    Args:
        axes: `(name, size, whether each device already sees its own part along it)` of the mesh; without a mesh one.
    """

    axes: tuple[tuple[str, int, bool], ...]

    @property
    def shared(self) -> int:
        """How many devices XLA shares arrays out to."""
        return math.prod(size for _, size, is_manual in self.axes if not is_manual)

    @property
    def count(self) -> int:
        """All of them."""
        return math.prod(size for _, size, _ in self.axes)


def devices_of(ctx: mlir.LoweringRuleContext) -> Devices:
    """The devices of the program that a rule lowers a part of."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        mesh = _mesh_of(ctx.avals_in)
        if mesh is not None and mesh.size == context.num_devices:
            return Devices(tuple((name, size, False) for name, size in mesh.shape.items()))
        return Devices((("devices", context.num_devices, False),))
    if isinstance(context, mlir.SPMDAxisContext):
        return Devices(tuple((name, size, name in context.manual_axes) for name, size in context.mesh.shape.items()))
    return Devices(())


def is_supported(ctx: mlir.LoweringRuleContext, platform: str) -> bool:
    """Whether XLA can ask this process how to share a call out: not of a program that is exported or interpreted."""
    shardy = jax.config.jax_use_shardy_partitioner  # pyright: ignore[reportAttributeAccessIssue]
    is_interpreted = platform == "cpu" and interpreting()
    return shardy and not ctx.module_context.lowering_parameters.for_export and not is_interpreted


def is_explicit(avals: Sequence[Any]) -> bool:
    """Whether the types of arrays say how they are split."""
    return (mesh := _mesh_of(avals)) is not None and AxisType.Explicit in mesh.axis_types


def _mesh_of(avals: Sequence[Any]) -> AbstractMesh | None:
    return next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty), None)


def is_shared_further(avals: Sequence[Any]) -> bool:
    """Whether XLA may share out what devices that see their parts already do."""
    mesh = _mesh_of(avals)
    kinds = zip(mesh.axis_sizes, mesh.axis_types) if mesh is not None else ()
    return any(size > 1 and kind == AxisType.Auto for size, kind in kinds)


def require_manual(kernel: Any, axes: Mapping[str, str], argument: str = "mesh_axes") -> None:
    """Refuses mesh axes that no `shard_map` around a call has, or a kernel that cannot be split over any.

    Raises:
        ConfigError: what came, and what is there.
    """
    if not axes:
        return
    if not kernel.has_dims:
        raise ConfigError(
            f"{argument} is {dict(axes)}, and {kernel.op_id_v} defines no dims: nothing says what they split"
        )
    mesh = jax.sharding.get_abstract_mesh()
    manual = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual]
    if wrong := [axis for axis in axes.values() if axis not in manual]:
        raise ConfigError(
            f"{argument} names {wrong[0]!r}, which is no mesh axis of a jax.shard_map around this call, whose axes are "
            f"{manual or 'none'}; elsewhere leave it out: there the shardings of the arrays say what is split"
        )


# Explicit axes


def mapped(body: Callable[..., list[Any]], arrays: Arrays, operands: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Outputs of a call whose types say how its operands are split, each device on its own parts.

    Args:
        body: from a plan and a device's parts of the operands to its parts of the outputs.
        arrays: those of the call.
        operands: its operands.
        types: those of its outputs.
    """
    avals = [*map(jax.typeof, operands), *types]
    mesh, explicit = _explicit(avals)
    specs = [_explicit_spec(aval, explicit) for aval in avals]
    found = plan(arrays, specs, mesh.shape)
    run = jax.shard_map(
        lambda *parts: tuple(body(found, *parts)), mesh=mesh, in_specs=found.operands, out_specs=found.outputs,
        axis_names=explicit, check_vma=False,
    )  # fmt: skip
    moved = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, found.operands)]
    return [jax.sharding.reshard(out, NamedSharding(mesh, aval.sharding.spec)) for out, aval in zip(run(*moved), types)]


def explicit_types(op: str, arrays: Arrays, operands: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The types of outputs with how they are split, which follows from how the operands are.

    Args:
        op: the name of the call's kernel.
        arrays: those of the call.
        operands: the types of its operands.
        outputs: the types of its outputs, nothing said of how they are split.

    Raises:
        ConfigError: an operand with rows is split along an axis that no device can have a part of.
    """
    mesh, explicit = _explicit(operands)
    specs = [_explicit_spec(aval, explicit) for aval in operands] + [((),) * len(aval.shape) for aval in outputs]
    found = plan(arrays, specs, mesh.shape)
    _refuse_unused(op, arrays, specs, found, mesh)
    like = max(operands, key=lambda aval: len(aval.manual_axis_type.varying))  # inside a `shard_map` outputs vary, too
    return [
        like.update(shape=x.shape, dtype=x.dtype, weak_type=x.weak_type, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(outputs, found.outputs)
    ]


def _refuse_unused(op: str, arrays: Arrays, specs: Sequence[Spec], found: Plan, mesh: AbstractMesh) -> None:
    """Refuses to gather what an explicit type says is split: who wants that says so, with `reshard`."""
    used = {axis for axes in found.axes.values() for axis in axes}
    for array, spec in zip(arrays.operands, specs):
        wrong = [(place, axis) for place, axes in enumerate(spec) for axis in axes if axis not in used]
        if not wrong or not array.factors & arrays.lead:  # a weight that is kept in parts may come whole
            continue
        place, axis = wrong[0]
        parts = math.prod(mesh.shape[name] for name in spec[place])
        cannot = f"{array.shape[place]} cannot be split so among its devices"
        kept = [tuple(name for name in part if name in used) or None for part in spec]
        wanted = ", ".join(repr(part[0] if part and len(part) == 1 else part) for part in kept)
        raise ConfigError(
            f"{array.name} of {op} has shape {array.shape}, and axis {place} of it is split over mesh axis {axis!r}, "
            f"{parts} ways; {cannot if array.layout[place] else 'each device needs it whole'}: pass "
            f"jax.sharding.reshard({array.name}, jax.P({wanted}))"
        )


def without_mesh() -> contextlib.AbstractContextManager:
    """Context in which there are no devices to share anything."""
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def _explicit(avals: Sequence[Any]) -> tuple[AbstractMesh, set[str]]:
    """The mesh of some types, and its axes that types know of."""
    mesh = _mesh_of(avals)
    assert mesh is not None
    return mesh, {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}


def _explicit_spec(aval: Any, explicit: set[str]) -> Spec:
    if aval.sharding.mesh.empty:
        return ((),) * len(aval.shape)
    axes = [() if part is None else part if isinstance(part, tuple) else (part,) for part in aval.sharding.spec]
    return tuple(tuple(axis for axis in part if axis in explicit) for part in axes)


# Auto axes


def partitioned(
    op: str,
    whole: Callable[..., list[Any]],
    body: Callable[..., list[Any]],
    arrays: Arrays,
    devices: Devices,
) -> Callable[..., list[Any]]:
    """A call that XLA shares out when it compiles, to be lowered with `in_context`.

    Its first output is nothing, which all devices have: inside a `shard_map` over other axes XLA numbers the devices
    as the first output is split, and what they tell each other goes by the order of the mesh.

    Args:
        op: the name of the call's kernel.
        whole: the call of whole arrays, whose types are all that is asked of it.
        body: from a plan and a device's parts of the operands to its parts of the outputs.
        arrays: those of the call.
        devices: those of the program.
    """
    settings = _settings()  # what is traced while XLA compiles may be in another thread, or under others' contexts

    def partition(_mesh: Any, operand_types: Sequence[Any], output_types: Sequence[Any]) -> Any:
        found, mesh, sub = _found(arrays, devices, [*operand_types, *output_types[1:]])

        def lower(*parts: Any) -> tuple[Any, ...]:
            with settings():
                traced = jax.make_jaxpr(functools.partial(body, found))(*parts)
                _refuse_callbacks(op, traced.jaxpr)
                with set_xla_metadata(inlineable="false"):  # else XLA overwrites the labels of the body
                    return (jnp.zeros(()), *jax.jit(jaxpr_as_fun(traced))(*parts))

        split = [tuple(NamedSharding(sub, spec) for spec in specs) for specs in (found.outputs, found.operands)]
        return mesh, lower, (NamedSharding(sub, PartitionSpec()), *split[0]), split[1]

    call = custom_partitioning(lambda *operands: (jnp.zeros(()), *whole(*operands)))
    call.def_partition(partition, sharding_rule=_rule(arrays), decode_shardings=False)
    return lambda *operands: list(call(*operands)[1:])


def _refuse_callbacks(op: str, jaxpr: Any) -> None:
    """Refuses code that calls back to Python: JAX does not keep what it calls alive in what XLA asks for."""
    for eqn in jaxpr.eqns:
        if "callback" in eqn.primitive.name:
            raise UnsupportedError(
                f"{op} calls back to Python ({eqn.primitive.name}), which JAX cannot do where XLA shares a call out "
                "over devices, as under Auto axes; call it in jax.shard_map, or use Explicit axes"
            )
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                _refuse_callbacks(op, inner)


def in_context(ctx: mlir.LoweringRuleContext, devices: Devices) -> mlir.LoweringRuleContext:
    """The context in which JAX lowers what is partitioned: it wants devices, though only their number matters."""
    context = mlir.ShardingContext(devices.count, (jax.local_devices()[0],) * devices.count)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))


def _found(arrays: Arrays, devices: Devices, types: Sequence[Any]) -> tuple[Plan, Mesh, Mesh]:
    """The plan for arrays that XLA has split, the mesh of all devices, and that of those that it shares them out to.

    Both are made of axes of prime sizes; in one that is manual already each device has its part, but sums over it and
    over other axes still need to know of it.
    """
    shared = [size for _, size, is_manual in devices.axes if not is_manual]
    hlo = [_hlo_sharding(t) for t in types]
    sizes, specs = specs_over_primes(hlo, [len(t.shape) for t in types], shared)
    names = [axis_name(i) for i in range(len(sizes))]
    found = plan(arrays, specs, dict(zip(names, sizes)))
    left = iter(zip(names, sizes))
    all_axes = [
        axis
        for name, size, is_manual in devices.axes
        for axis in ([(name, size)] if is_manual else itertools.islice(left, len(primes(size))))
    ]
    return found, _mesh(all_axes), _mesh(list(zip(names, sizes)))


def _hlo_sharding(type_: Any) -> Any:
    sharding = getattr(type_, "sharding", None)
    return None if sharding is None else sharding._to_xla_hlo_sharding(len(type_.shape))


def _mesh(axes: Sequence[tuple[str, int]]) -> Mesh:
    """A mesh of so many devices: XLA numbers them, and which they are is of no account."""
    count = math.prod(size for _, size in axes)
    devices = np.array([jax.local_devices()[0]] * count).reshape([size for _, size in axes])
    return Mesh(devices, [name for name, _ in axes])


def _rule(arrays: Arrays) -> SdyShardingRule:
    """How a split of one array goes on to others: by their common factors, and not at all along other axes.

    Nor does that of a vector which rows share, but to its gradient: where parameters are kept in parts, a bias would
    split the features of rows along the axis that splits the rows.
    """
    own, vectors = itertools.count(), {}

    def mapping(array: Array) -> ArrayMapping:
        goes_on = len(array.shape) > 1 or array.factors & arrays.lead or not array.name
        dims = [(factors if goes_on else ()) or (f"own{next(own)}",) for factors in array.layout]
        if not goes_on:
            dims = vectors.setdefault((array.name, array.shape), dims)
        return ArrayMapping(*(_factor(f[0]) if len(f) == 1 else CompoundFactor(*map(_factor, f)) for f in dims))

    operands, outputs = ([mapping(a) for a in group] for group in (arrays.operands, arrays.outputs))
    layouts = [axis for a in (*arrays.operands, *arrays.outputs) for axis in a.layout]
    alone = {axis[0] for axis in layouts if len(axis) == 1}
    inside = {factor for axis in layouts if len(axis) > 1 for factor in axis} - alone
    sizes: dict[str, Any] = {_factor(f): arrays.sizes[f] for f in sorted(inside)}
    return SdyShardingRule(tuple(operands), (ArrayMapping(), *outputs), **sizes)


def _factor(name: str) -> str:
    """A factor's name as Shardy takes names."""
    return "f" + "".join(c if c.isalnum() else "_" for c in name)


def _settings() -> Callable[[], contextlib.AbstractContextManager]:
    """What brings the settings of this moment back that products and types depend on."""
    precision, x64 = jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    @contextlib.contextmanager
    def again():
        with jax.default_matmul_precision(precision), jax.enable_x64(x64), without_mesh():
            yield

    return again
