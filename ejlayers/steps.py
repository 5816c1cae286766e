"""Train steps of every kind: how they are lowered."""

from __future__ import annotations

import sys
from typing import Any

import jax


def jitted(step: Any, args: tuple, kwargs: dict) -> Any:
    """A step that can be lowered: itself if it is jitted, else under the `jit` of its arguments' framework."""
    if hasattr(step, "lower"):
        return step
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and _has((args, kwargs), (nnx.Module, nnx.Optimizer)):
        return nnx.jit(step)
    if eqx is not None and _has((args, kwargs), (eqx.Module,)):
        return eqx.filter_jit(step)
    return jax.jit(step)


def _has(tree: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a pytree holds an object of these types anywhere."""
    return any(isinstance(x, kinds) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)))


def lower(step: Any, args: tuple, kwargs: dict) -> Any:
    """The lowered program of a step. Arguments may be abstract."""
    return jitted(step, args, kwargs).lower(*args, **kwargs)
