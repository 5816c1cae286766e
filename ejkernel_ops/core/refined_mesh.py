"""How XLA says that arrays are split, as specs over a mesh whose axes are of prime sizes.

Shardy splits mesh axes where a dimension is too small for a whole one: four devices that share out two key heads, and
two query heads of each. Over axes of prime sizes each such part has a name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .dims import Spec


def primes(number: int) -> tuple[int, ...]:
    """The prime factors of a number, the least first; none of 1."""
    factor = next((p for p in range(2, math.isqrt(number) + 1) if number % p == 0), number)
    return () if number == 1 else (factor, *primes(number // factor))


def refined(axis_sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The meshes of prime axes that a mesh may be taken for: each of its axes as its factors, in any order."""
    ways = [sorted(set(itertools.permutations(primes(size)))) for size in axis_sizes]
    return (tuple(itertools.chain(*way)) for way in itertools.product(*ways))


def axis_name(index: int) -> str:
    """The name of an axis of a mesh of prime axes, which no axis of a user's has."""
    return f"ejkernel_ops part {index}"


def specs_over_primes(
    shardings: Sequence[Any], ranks: Sequence[int], axis_sizes: Sequence[int]
) -> tuple[tuple[int, ...], list[Spec]]:
    """A mesh of prime axes, and over it the specs of arrays.

    Args:
        shardings: how XLA splits each array: an `HloSharding`, or `None` where it does not.
        ranks: their numbers of axes.
        axis_sizes: the mesh.

    Returns:
        The sizes of the prime axes, and for each array the names of those that split each of its axes.

    Raises:
        UnsupportedError: arrays that are not split along the axes of the mesh.
    """
    tiles = [_tiles(sharding) for sharding in shardings]
    for sizes in refined(axis_sizes):
        specs = [_spec(tile, rank, sizes) for tile, rank in zip(tiles, ranks)]
        if None not in specs:
            return sizes, specs  # type: ignore[return-value]
    raise UnsupportedError(
        f"arrays are split as {[str(s) for s in shardings]}, which no axes of a mesh of sizes {tuple(axis_sizes)} do; "
        "give jax.jit shardings over one mesh"
    )


def _tiles(sharding: Any) -> np.ndarray | None:
    """The devices of each part of an array; `None` where each device has all of it."""
    if sharding is None or not sharding.is_tiled():
        return None
    return np.array(sharding.tile_assignment_devices()).reshape(sharding.tile_assignment_dimensions())


def _spec(tiles: np.ndarray | None, rank: int, sizes: Sequence[int]) -> Spec | None:
    """The axes that split each axis of an array, the slowest first; `None` where no axes of this mesh do."""
    if tiles is None:
        return ((),) * rank
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    devices = np.arange(math.prod(sizes))
    digits = [devices // stride % size for stride, size in zip(strides, sizes)]
    places = np.empty((tiles.ndim, tiles.size), int)  # of each device, which part along each axis of the array
    places[:, tiles.ravel()] = np.indices(tiles.shape).reshape(tiles.ndim, -1)
    spec = []
    for place in places[:rank]:
        steps = [int(place[stride]) for stride in strides]  # by how many parts a step along each mesh axis goes
        if (sum(step * digit for step, digit in zip(steps, digits)) != place).any():
            return None
        order = sorted((i for i, step in enumerate(steps) if step), key=lambda i: -steps[i])
        spec.append(tuple(map(axis_name, order)))
    return tuple(spec)
