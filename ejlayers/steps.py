"""Train steps of every kind: how they are lowered."""

from __future__ import annotations

import sys
from typing import Any

import jax


def jitted(step: Any, args: tuple, kwargs: dict) -> Any:
    """A step that can be lowered: itself if it is jitted, else under the `jit` of its arguments' framework."""
    if hasattr(step, "lower"):
        return step
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and any(isinstance(x, nnx.Module | nnx.Optimizer) for x in [*args, *kwargs.values()]):
        return nnx.jit(step)
    return jax.jit(step)


def lower(step: Any, args: tuple, kwargs: dict) -> Any:
    """The lowered program of a step. Arguments may be abstract."""
    return jitted(step, args, kwargs).lower(*args, **kwargs)
