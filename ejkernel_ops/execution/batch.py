"""`vmap_with_config` and `pmap_with_config`: one choice of a config for all examples, or for all devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..config.selection import ConfigSelectorChain
from ..core.kernel import Kernel
from ..core.snapshot import current, uid_of
from ..errors import UnsupportedError
from ..utils.fingerprint import abstractify, is_array
from ..utils.values import stable_json
from .executor import Executor, default_executor


def vmap_with_config(kernel: Any, *others: Any, in_axes: Any = None, executor: Executor | None = None) -> Callable:
    """Vectorizes a kernel over an axis of its arguments, with one config for all examples.

    The config is chosen once, from the shapes of the whole batch where the kernel folds it into its rows, and from
    those of one example where it does not; nothing is run to choose it.

    Args:
        kernel: the kernel. An executor may come before or after it: `vmap_with_config(executor, kernel, in_axes)`.
        *others: `in_axes`, `executor`, in any order.
        in_axes: the axis to map over, for all positional arguments or one for each (`None`: not mapped; a pytree for
            an argument that is one); default 0. Scalars, static values and keyword arguments are passed through.
        executor: what runs it; default the default executor.

    Returns:
        A function of the kernel's arguments, whose outputs have the mapped axis first.

    Raises:
        TypeError: no kernel among the arguments.
        ValueError: `in_axes` does not fit the arguments, or no argument has an axis to map over.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops.kernels import LINEAR
        >>> batched = vmap_with_config(LINEAR, in_axes=(0, None))
        >>> batched(jnp.ones((5, 2, 3)), jnp.ones((3, 4)))[0].shape
        (5, 2, 4)
    """
    given = _sorted_out("vmap_with_config", kernel, others, {"in_axes": in_axes, "executor": executor})
    op, run, axes = given["kernel"], given["executor"], given["in_axes"]

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree, places = _axes_of(op, args, axes)

        if op.rows is None:  # a loop over examples, each one call
            _tune_first(run, op, _one_example(leaves, tree, places), kwargs)

        def one(*arrays):
            return run(op, *_filled(leaves, tree, places, arrays), **kwargs)

        return jax.vmap(one, tuple(places.values()))(*[leaves[i] for i in places])

    return mapped


def pmap_with_config(
    kernel: Any,
    *others: Any,
    axis_name: str | None = None,
    in_axes: Any = None,
    executor: Executor | None = None,
    devices: Sequence[Any] | None = None,
) -> Callable:
    """Runs a kernel on several devices at once, each on its part, with one config for all.

    Made of `jax.shard_map`. The config is chosen once, from the shapes of one device's part.

    Args:
        kernel: the kernel. An executor may come before or after it.
        *others: `axis_name`, `in_axes`, `executor`, in any order.
        axis_name: name of the mapped axis, for collectives in the kernel; default `"devices"`.
        in_axes: the axis that is split over devices, for all positional arguments or one for each (`None`: every
            device gets all of it); default 0. Its length is the number of devices. Scalars, static values and keyword
            arguments are passed through.
        executor: what runs it; default the default executor.
        devices: default those that a sharded argument is on, else the first ones.

    Returns:
        A function of the kernel's arguments, whose outputs have the mapped axis first, sharded over the devices.

    Raises:
        TypeError: no kernel among the arguments.
        ValueError: `in_axes` does not fit the arguments, lengths differ, or there are fewer devices.
        UnsupportedError: inside a program that has a mesh already.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops.kernels import LINEAR
        >>> parallel = pmap_with_config(LINEAR, in_axes=(0, None))
        >>> parallel(jnp.ones((1, 2, 3)), jnp.ones((3, 4)))[0].shape
        (1, 2, 4)
    """
    options = {"axis_name": axis_name, "in_axes": in_axes, "executor": executor}
    given = _sorted_out("pmap_with_config", kernel, others, options)
    op, run, axes, axis = given["kernel"], given["executor"], given["in_axes"], given["axis_name"]

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree, places = _axes_of(op, args, axes)
        parts = [jnp.moveaxis(leaves[i], dim, 0) for i, dim in places.items()]
        mesh = Mesh(np.asarray(_devices(op, devices, parts)), (axis,), axis_types=(AxisType.Auto,))
        rest, rest_tree = jax.tree.flatten(([None if i in places else x for i, x in enumerate(leaves)], kwargs))
        shared = tuple(i for i, x in enumerate(rest) if is_array(x))
        static = _Static([None if i in shared else x for i, x in enumerate(rest)], op)
        _tune_first(run, op, _one_example(leaves, tree, places), kwargs)
        program = _program(op, run, uid_of(run.chooser), static, rest_tree, shared, tree, tuple(places), mesh)
        placed = [_put(x, mesh, PartitionSpec(axis)) for x in parts]
        placed += [_put(rest[i], mesh, PartitionSpec()) for i in shared]
        if jax.sharding.get_abstract_mesh().empty:
            return program(*placed)
        if any(isinstance(x, Tracer) for x in placed):
            raise UnsupportedError(
                "pmap_with_config has a mesh of its own; in a program that has one use jax.shard_map"
            )
        with jax.set_mesh(mesh):
            return program(*placed)

    return mapped


class _Static:
    """The static leaves of a call, compared by value: what a compiled program is kept for may hold no arrays."""

    def __init__(self, leaves: list[Any], kernel: Kernel):
        self.leaves = leaves
        self.text = stable_json(leaves, where=f"an argument of {kernel.op_id_v}")

    def __eq__(self, other):
        return isinstance(other, _Static) and self.text == other.text

    def __hash__(self):
        return hash(self.text)


@functools.lru_cache(maxsize=256)
def _program(
    kernel: Kernel, run: Executor, chooser: int, static: _Static, rest_tree: Any, shared: tuple[int, ...], tree: Any,
    places: tuple[int, ...], mesh: Mesh,
) -> Callable:  # fmt: skip
    """The program of all devices, of arrays that are split and then of arrays that each device has whole."""

    def local(*arrays):
        split, whole = arrays[: len(places)], dict(zip(shared, arrays[len(places) :]))
        rest = [whole.get(i, leaf) for i, leaf in enumerate(static.leaves)]
        leaves, kwargs = jax.tree.unflatten(rest_tree, rest)
        out = run(kernel, *_filled(leaves, tree, places, [x[0] for x in split]), **kwargs)
        return jax.tree.map(lambda x: x[None], out)

    over = PartitionSpec(*mesh.axis_names)
    specs = (over,) * len(places) + (PartitionSpec(),) * len(shared)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=over))


def _sorted_out(name: str, first: Any, others: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by what they are: both orders, kernel first and executor first, are documented."""
    found = {k: v for k, v in options.items() if v is not None}
    for value in (first, *others):
        kind = (
            "kernel" if isinstance(value, Kernel) else "executor" if isinstance(value, Executor)
            else "axis_name" if isinstance(value, str) else "in_axes"
        )  # fmt: skip
        if value is None:
            continue
        if kind in found or kind not in ("kernel", *options):
            raise TypeError(f"{name}: {value!r} is one {kind} too many; expected a kernel and {', '.join(options)}")
        found[kind] = value
    if "kernel" not in found:
        raise TypeError(f"{name}: no kernel among the arguments; expected a Kernel, got {first!r}")
    for key, kinds, expected in (
        ("executor", Executor, "an Executor"), ("axis_name", str, "a name"),
        ("in_axes", (int, tuple, list), "an int, or one entry for each argument"),
    ):  # fmt: skip
        if not isinstance(found.get(key), (kinds, type(None))):
            raise TypeError(f"{name}: {key} is {found[key]!r}; expected {expected}")
    return {"executor": default_executor(), "in_axes": 0, "axis_name": "devices"} | found


def _axes_of(kernel: Kernel, args: tuple, in_axes: Any) -> tuple[list[Any], Any, dict[int, int]]:
    """The leaves of the arguments, their structure, and the axis to map over of each leaf that has one."""
    axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
    if len(axes) != len(args):
        raise ValueError(f"in_axes has {len(axes)} entries for {len(args)} positional arguments of {kernel.op_id}")
    leaves, tree = jax.tree.flatten(args)
    none = {"is_leaf": lambda x: x is None}
    try:
        spread = [jax.tree.leaves(jax.tree.broadcast(a, x, **none), **none) for a, x in zip(axes, args)]
        per_leaf = [a for values, x in zip(spread, args) for a in values[: len(jax.tree.leaves(x))]]
    except ValueError as error:
        raise ValueError(f"in_axes {in_axes!r} does not fit the arguments of {kernel.op_id}: {error}") from None
    places = {}
    for index, (leaf, axis) in enumerate(zip(leaves, per_leaf)):
        if axis is None or not is_array(leaf) or not leaf.ndim:
            continue
        if not isinstance(axis, int) or not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"in_axes has {axis!r} for an array of shape {leaf.shape}, an argument of {kernel.op_id}")
        places[index] = axis
    if not places:
        raise ValueError(f"no argument of {kernel.op_id} has an axis to map over: in_axes is {in_axes!r}")
    return leaves, tree, places


def _filled(leaves: Sequence[Any], tree: Any, places: Iterable[int], arrays: Sequence[Any]) -> tuple:
    """The arguments with arrays in the given places."""
    found = dict(zip(places, arrays))
    return jax.tree.unflatten(tree, [found.get(i, leaf) for i, leaf in enumerate(leaves)])


def _one_example(leaves: Sequence[Any], tree: Any, places: dict[int, int]) -> tuple:
    """The arguments of one example, or one device, as shapes."""
    shapes = [
        jax.ShapeDtypeStruct(tuple(np.delete(x.shape, places[i]).tolist()), x.dtype, weak_type=x.weak_type)
        for i, x in zip(places, abstractify([leaves[i] for i in places]))
    ]
    return _filled(leaves, tree, places, shapes)


def _tune_first(run: Executor, kernel: Kernel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Where calls are tuned when they are first made: now, for what follows is a trace, in which nothing is timed."""
    chooser = run.chooser
    if isinstance(chooser, ConfigSelectorChain) and chooser.policy_under(current()).tune_on_call:
        run.choose_config(kernel, *args, **kwargs)


def _devices(kernel: Kernel, devices: Sequence[Any] | None, parts: Sequence[Any]) -> list[Any]:
    sizes = sorted({x.shape[0] for x in parts})
    if len(sizes) > 1:
        raise ValueError(f"the mapped axes of {kernel.op_id}'s arguments have lengths {sizes}; expected one")
    if devices is None:
        devices = jax.devices()
        for x in parts:
            sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh.size == sizes[0]:
                devices = list(np.asarray(sharding.mesh.devices).flat)
                break
        devices = devices[: sizes[0]]
    if len(devices) != sizes[0]:
        raise ValueError(
            f"the mapped axis of {kernel.op_id}'s arguments has length {sizes[0]}, for {len(devices)} devices; "
            "its length is the number of devices"
        )
    return list(devices)


def _put(x: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """An array where the program wants it; what is traced moves inside the program."""
    return x if isinstance(x, Tracer) else jax.device_put(x, NamedSharding(mesh, spec))
