"""Types of arrays inside `shard_map`: over which mesh axes a value varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def varying(x: Any) -> frozenset:
    """The mesh axes over which an array varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def equally_varying(arrays: Sequence[Any], *others: Any) -> list[Any]:
    """The arrays, marked as varying over every axis that any of them, or of `others`, varies over."""
    union = frozenset().union(*(varying(x) for x in (*arrays, *others)))
    return [jax.lax.pcast(x, tuple(union - v), to="varying") if union - (v := varying(x)) else x for x in arrays]
