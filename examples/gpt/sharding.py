"""Which devices have which part of the parameters and of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .frameworks import Training
from .launch import AXES, Refused
from .sizes import Size

TOKENS = P(("data", "fsdp"), "context")  # of arrays (batch, length)

RULES = (  # a parameter's path -> the mesh axes that split its own axes; an optimizer's moments are split alike
    (r"(query|key|value|up|gate|head|Dense_0)/kernel$", P("fsdp", "model")),  # (in, out) or (in, heads, head_dim)
    (r"out/kernel$", P("model", None, "fsdp")),  # (heads, head_dim, out)
    (r"(down|Dense_1)/kernel$", P("model", "fsdp")),
    (r"(query_proj|key_proj|value_proj|up|head)/weight$", P("model", "fsdp")),  # of Equinox: (out, in)
    (r"(output_proj|down)/weight$", P("fsdp", "model")),
    (r"(up|Dense_0)/bias$", P("model")),
    (r"bytes/(embedding|weight)$", P(("model", "fsdp"))),
)


def spec_of(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """How a parameter is split: as the first rule says that its path ends with, where the axes divide its sizes."""
    rule = next((spec for pattern, spec in RULES if re.search(pattern, path)), P())
    parts = (math.prod(sizes[axis] for axis in _axes(of_axis)) for of_axis in rule)
    return P(*(of_axis if size % number == 0 else None for size, of_axis, number in zip(shape, rule, parts)))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@dataclasses.dataclass(frozen=True)
class Spread:
    """The devices of a run: those of a mesh, or without one the first device."""

    mesh: Mesh | None

    @classmethod
    def over(cls, sizes: Mapping[str, int] | None, size: Size) -> Spread:
        """The first devices as a mesh with all of `AXES`, of length 1 where no size is given.

        Raises:
            Refused: there are not so many devices, or a batch cannot be split so.
        """
        if sizes is None:
            if jax.process_count() == 1:
                return cls(None)
            sizes = {"data": jax.device_count()}
        sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        count, there = math.prod(sizes.values()), jax.device_count()
        if count > there or (count < there and jax.process_count() > 1):
            raise Refused(f"--mesh has {count} devices; there are {there}{_HINT if there == 1 else ''}")
        parts = {"batch": sizes["data"] * sizes["fsdp"], "context": sizes["context"]}
        for name, number in parts.items():
            if (whole := getattr(size, name)) % number:
                raise Refused(f"--mesh splits the {name} of {whole} into {number} parts; expected a divisor")
        return cls(jax.make_mesh(tuple(sizes.values()), AXES, (AxisType.Auto,) * 4, devices=jax.devices()[:count]))

    def __str__(self) -> str:
        if self.mesh is None:
            return "1 device"
        return " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "1 device"

    def entered(self) -> contextlib.AbstractContextManager:
        """Context in which JAX makes arrays, and programs, for these devices."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def state(self, training: Training, make: Callable[[], Any]) -> Any:
        """A new state whose parts are made where they stay: no device ever has all of it."""
        if self.mesh is None:
            return make()

        def arrays() -> Any:
            return training.arrays_of(make())

        made = jax.jit(arrays, out_shardings=self._shardings(jax.eval_shape(arrays)))()
        return training.with_arrays(training.abstract(make), made)

    def _shardings(self, arrays: Any) -> Any:
        def sharding(path: Any, x: Any) -> NamedSharding:
            assert self.mesh is not None
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return NamedSharding(self.mesh, spec_of(name, x.shape, self.mesh.shape))

        return jax.tree_util.tree_map_with_path(sharding, arrays)

    def batch(self, rows: np.ndarray) -> Any:
        """A batch of tokens `(batch, context + 1)`, of which each process hands over what its devices work on."""
        if self.mesh is None:
            return rows
        sharding = NamedSharding(self.mesh, P(TOKENS[0]))
        own = [part[0].indices(len(rows)) for part in sharding.addressable_devices_indices_map(rows.shape).values()]
        first, last = min(start for start, _, _ in own), max(stop for _, stop, _ in own)
        return jax.make_array_from_process_local_data(sharding, rows[first:last], rows.shape)

    def whole(self, x: jax.Array) -> jax.Array:
        """An array of which every device, and so every process, has all."""
        return x if self.mesh is None else jax.device_put(x, NamedSharding(self.mesh, P()))


_HINT = "; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four"
