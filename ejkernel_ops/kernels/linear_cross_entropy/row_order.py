"""Axes of rows as one axis, also where types say that devices split one that is not the first."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The order of rows `(...)` as one axis: as they come, or device by device, where no data has to move for it.

    Args:
        shape: the axes of rows.
        mesh: that of the types, if these say how arrays are split; else `None`.
        spec: how they split each axis.
    """

    shape: tuple[int, ...]
    mesh: Any
    spec: tuple[Any, ...]

    @classmethod
    def of(cls, x: jax.Array) -> RowOrder:
        """That of an array `(..., features)`."""
        sharding, last = jax.typeof(x).sharding, x.ndim - 1
        spec = (*sharding.spec, *[None] * x.ndim)[:last]
        return cls(x.shape[:last], sharding.mesh if AxisType.Explicit in sharding.mesh.axis_types else None, spec)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split rows."""
        parts = [part if isinstance(part, tuple) else (part,) for part in self.spec if part is not None]
        return tuple(axis for part in parts for axis in part)

    def flat(self, x: jax.Array) -> jax.Array:
        """An array `(..., *others)` as `(rows, *others)`."""
        count = len(self.shape)
        if self.mesh is not None:  # as hidden states are split, so is what belongs to their rows
            others = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)[count : x.ndim]
            x = jax.sharding.reshard(x, NamedSharding(self.mesh, PartitionSpec(*self.spec, *others)))

        def run(x: jax.Array) -> jax.Array:
            return x.reshape(math.prod(x.shape[:count]), *x.shape[count:])

        return self._on_devices(run, self.spec, (self.axes,))(x) if any(self.spec[1:]) else run(x)

    def back(self, x: jax.Array) -> jax.Array:
        """An array `(rows,)` as `(...)`."""
        if self.mesh is None or not any(self.spec[1:]):
            return x.reshape(self.shape)
        local = NamedSharding(self.mesh, PartitionSpec(*self.spec)).shard_shape(self.shape)
        x = jax.sharding.reshard(x, NamedSharding(self.mesh, PartitionSpec(self.axes)))
        return self._on_devices(lambda x: x.reshape(local), (self.axes,), self.spec)(x)

    def _on_devices(self, run: Any, given: tuple[Any, ...], made: tuple[Any, ...]) -> Any:
        specs = PartitionSpec(*given), PartitionSpec(*made)
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], axis_names={*self.axes})
