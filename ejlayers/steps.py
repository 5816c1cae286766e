"""Train steps of every kind: how they are lowered, and their arguments copied."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import jax

from .frameworks import adapters


def unbound(step: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """A jitted step and all of its arguments, of a `functools.partial` of it too, nested or not.

    What is bound to a plain function stays so: it need be nothing that `jit` takes.
    """
    inner, bound, named = step, args, kwargs
    while isinstance(inner, _partials()):
        inner, bound, named = inner.func, (*inner.args, *bound), {**inner.keywords, **named}
    return (inner, bound, named) if hasattr(inner, "lower") else (step, args, kwargs)


def _partials() -> tuple[type, ...]:
    eqx = sys.modules.get("equinox")
    return (functools.partial,) if eqx is None else (functools.partial, eqx.Partial)


def jitted(step: Any, args: tuple, kwargs: dict) -> Any:
    """A step that can be lowered: itself if it is jitted, else under the `jit` of its arguments' framework."""
    if hasattr(step, "lower"):
        return step
    given = (args, kwargs, (step.args, step.keywords) if isinstance(step, _partials()) else ())
    if _has_nnx(given):
        return sys.modules["flax.nnx"].jit(step)
    eqx = sys.modules.get("equinox")
    if eqx is not None and _has(given, (eqx.Module,)):
        return eqx.filter_jit(step)
    return jax.jit(step)


def lower(step: Any, args: tuple, kwargs: dict) -> Any:
    """The lowered program of a step. Arguments may be abstract.

    Raises:
        ConfigError: a rule of a Linen model that is called matches none of its layers.
    """
    step, eqx = jitted(step, args, kwargs), sys.modules.get("equinox")
    with contextlib.ExitStack() as stack:
        for adapter in adapters():
            stack.enter_context(adapter.meeting_all())
        if eqx is not None and isinstance(step, eqx.Module) and is_abstract((args, kwargs)):
            return _lower_filtered(eqx, step, args, kwargs)
        return step.lower(*args, **kwargs)


def _lower_filtered(eqx: Any, step: Any, args: tuple, kwargs: dict) -> Any:
    """The program of an `eqx.filter_jit`, which takes abstract arrays for constants, inside that of a `jax.jit`."""
    arrays, rest = eqx.partition((args, kwargs), lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))

    def run(arrays):
        args, kwargs = eqx.combine(arrays, rest)
        return eqx.filter(step(*args, **kwargs), eqx.is_array)

    return jax.jit(run).lower(arrays)


def is_abstract(tree: Any) -> bool:
    """Whether a pytree has arrays that are only described."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


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
