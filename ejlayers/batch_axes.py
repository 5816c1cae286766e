"""Arrays on a mesh: several batch axes as one, and back; results that are spread as a call asks."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def joining_order(x: jax.Array, count: int) -> tuple[int, ...]:
    """The order in which the first axes of an array become one: first those that a mesh with Explicit axes spreads.

    In this order JAX knows how the one axis is spread, and no data moves.

    Args:
        x: the array.
        count: how many axes.

    Returns:
        The axes.

    Example:
        >>> joining_order(jnp.ones((2, 3, 4)), 2)
        (0, 1)
    """
    spec = jax.typeof(x).sharding.spec
    return tuple(sorted(range(count), key=lambda axis: not spec[axis]))


def joined(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """An array whose first axes are one.

    Args:
        x: the array.
        order: its first axes, in the order in which they are joined.

    Returns:
        `(product, ...)`.

    Example:
        >>> joined(jnp.ones((2, 3, 4)), (1, 0)).shape
        (6, 4)
    """
    count = len(order)
    x = x.transpose(*order, *range(count, x.ndim))
    return x.reshape(math.prod(x.shape[:count]), *x.shape[count:])


def split(x: jax.Array, sizes: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """Undoes `joined`.

    Args:
        x: `(product, ...)`.
        sizes: those of the axes.
        order: as of `joined`.

    Returns:
        `(*sizes, ...)`.

    Example:
        >>> split(joined(jnp.ones((2, 3, 4)), (1, 0)), (2, 3), (1, 0)).shape
        (2, 3, 4)
    """
    apart = x.reshape(*(sizes[axis] for axis in order), *x.shape[1:])
    return jnp.moveaxis(apart, range(len(order)), order)


def resharded(x: jax.Array, sharding: Any) -> jax.Array:
    """An array that is spread over a mesh with Explicit axes as a call says, with `out_sharding` of the stock layers.

    Args:
        x: the array.
        sharding: a `PartitionSpec`, a `NamedSharding`, or `None` for however it comes.

    Returns:
        The array.

    Raises:
        ValueError: axes that are not Explicit, as from the stock layers; there XLA decides.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        >>> with jax.set_mesh(mesh):
        ...     jax.typeof(resharded(jnp.ones((2, 3)), jax.P("data")))
        ShapedArray(float32[2@data,3])
    """
    return x if sharding is None else jax.sharding.reshard(x, sharding)
