"""How a vmapped axis enters a call: as more rows of one call where it can, else as a loop of calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def fold_or_loop(
    bind: functools.partial,
    args: Sequence[Any],
    dims: Sequence[int | None],
    kinds: Sequence[bool | str | None],
    out_kinds: Sequence[bool | str | None],
    out_types: Sequence[Any],
    groups: Sequence[int] | None = None,
) -> tuple[list[Any], list[int]]:
    """Batches one bind over a new axis.

    Args:
        bind: runs the call on unbatched arguments.
        args: arguments, batched along `dims` where that is no `None`.
        dims: the batched axis of each.
        kinds: row kind of each argument (see `Kernel.rows`).
        out_kinds: row kind of each output.
        out_types: types of the unbatched outputs.
        groups: for each argument, one that must be treated alike (an operand and its tangent).

    Returns:
        Outputs with the new axis first, and their batch axes (all 0).
    """
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    lead = [_lead(x, d) for x, d in zip(args, dims)]
    rows = max([n for n, kind in zip(lead, kinds) if kind and n is not None], default=1)
    batched = [d is not None for d in dims]
    if groups is not None:
        batched = [b or batched[g] for b, g in zip(batched, groups)]
    own_gradient = any(kind == "broadcast" for kind in out_kinds)  # one for each example: no sharing across them

    def joins(kind, n, moved):
        """Whether more rows may join the leading axis of this array; `None` if only a loop is right."""
        if kind != "broadcast":
            return kind if n is not None else None
        if rows == 1:
            return moved or own_gradient
        return n == rows

    join = [joins(kind, n, b) for kind, n, b in zip(kinds, lead, batched)]
    join_out = [joins(kind, t.shape[0] if t.shape else None, True) for kind, t in zip(out_kinds, out_types)]
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    foldable = all(j or (j is False and d is None) for j, d in zip(join, dims))
    if not foldable or not all(join_out):
        return _loop(bind, args, dims)

    # Rows are independent, so in any order; the one that leaves a sharded axis of rows in front moves no data.
    axis = int(any(j and _is_sharded(x, 0 if d is None else 1) for x, j, d in zip(args, join, dims)))

    def fold(x, j, d):
        if not j:
            return x
        if d is None:
            x = jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))
        else:
            x = jnp.moveaxis(x, 0, axis)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    outs = bind(*[fold(x, j, d) for x, j, d in zip(args, join, dims)])
    leads = [(t.shape[0], size) if axis else (size, t.shape[0]) for t in out_types]
    return [out.reshape(*lead, *out.shape[1:]) for out, lead in zip(outs, leads)], [axis] * len(outs)


def _is_sharded(x: Any, axis: int) -> bool:
    """Whether the type of an array says that an axis is split over devices."""
    sharding = jax.typeof(x).sharding
    return not sharding.mesh.empty and sharding.spec[axis] is not None


def _lead(x: Any, dim: int | None) -> int | None:
    """Length of the leading axis of one example; `None` for a scalar."""
    shape = [n for axis, n in enumerate(x.shape) if axis != dim]
    return shape[0] if shape else None


def _loop(bind: functools.partial, args: Sequence[Any], dims: Sequence[int | None]) -> tuple[list[Any], list[int]]:
    if any(isinstance(x, Tracer) for x in args):
        outs = _over_examples(bind, dims, args)
    else:  # outside a trace a new loop would be compiled for each call
        outs = _compiled_loop(bind.func, tuple(sorted(bind.keywords.items())), tuple(dims))(*args)
    return outs, [0] * len(outs)


@functools.lru_cache(maxsize=1024)
def _compiled_loop(bind: Callable, params: tuple, dims: tuple) -> Callable:
    return jax.jit(lambda *args: _over_examples(functools.partial(bind, **dict(params)), dims, args))


def _over_examples(bind: Callable, dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    moved = [x for x, d in zip(args, dims) if d is not None]

    def one(xs):
        given = iter(xs)
        return bind(*[x if d is None else next(given) for x, d in zip(args, dims)])

    return jax.lax.map(one, moved)
