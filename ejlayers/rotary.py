"""Rotary position embedding, as an option of our attention layers."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel_ops import RotaryConfig, RotaryScaling, rotary_embedding

from .batch_axes import joined, joining_order, split
from .pins import changed_pins, check_pins


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of a layer: `ejkernel_ops.rotary_embedding` with these options.

    Args:
        theta: base of the frequencies.
        fraction: of the features of a head that are turned, the first ones.
        interleaved: whether pairs are neighbours, not halves.
        scaling: a `RotaryScaling` for longer sequences.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> Rotary(theta=500000.0)(jnp.ones((2, 3, 4, 8)), jnp.arange(3)).shape
        (2, 3, 4, 8)
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling | None = None
    config: RotaryConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    config_type: ClassVar[type] = RotaryConfig

    def __post_init__(self):
        check_pins(self)

    def pin(self, **fields: Any) -> Rotary:
        """A rotary embedding with another `config` or `backend`."""
        return dataclasses.replace(self, **changed_pins(self, fields))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Heads `(..., length, num_heads, head_dim)`, turned by positions `(length,)` or `(..., length)`."""
        batch, order = x.shape[:-3], joining_order(x, x.ndim - 3)
        if positions.ndim > 1:
            pairs = zip(positions.shape[::-1], x.shape[-3::-1])
            if positions.ndim > x.ndim - 2 or any(a not in (1, b) for a, b in pairs):
                raise ValueError(f"positions has shape {positions.shape}; expected what broadcasts to {x.shape[:-2]}")
            positions = joined(jnp.broadcast_to(positions, x.shape[:-2]), order)
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return split(rotary_embedding(joined(x, order), positions, **options), batch, order)
