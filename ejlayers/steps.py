"""Train steps of every kind: how they are lowered, and their arguments copied."""

from __future__ import annotations

import sys
from typing import Any

import jax


def jitted(step: Any, args: tuple, kwargs: dict) -> Any:
    """A step that can be lowered: itself if it is jitted, else under the `jit` of its arguments' framework."""
    if hasattr(step, "lower"):
        return step
    if _has_nnx((args, kwargs)):
        return sys.modules["flax.nnx"].jit(step)
    eqx = sys.modules.get("equinox")
    if eqx is not None and _has((args, kwargs), (eqx.Module,)):
        return eqx.filter_jit(step)
    return jax.jit(step)


def lower(step: Any, args: tuple, kwargs: dict) -> Any:
    """The lowered program of a step. Arguments may be abstract."""
    return jitted(step, args, kwargs).lower(*args, **kwargs)


def copied(tree: Any) -> Any:
    """Arguments with arrays of their own: a step may donate or change what it is given."""
    if _has_nnx(tree):  # which shares Variables that must stay shared
        return sys.modules["flax.nnx"].clone(tree, arrays=True)
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _has_nnx(tree: Any) -> bool:
    """Whether a pytree holds objects of Flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and _has(tree, (nnx.Module, nnx.Optimizer, nnx.Pytree))


def _has(tree: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a pytree holds an object of these types anywhere."""
    return any(isinstance(x, kinds) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)))
