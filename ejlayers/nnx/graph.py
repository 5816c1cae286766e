"""Walking NNX models: which modules there are, under which paths, and turning stock ones into ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .attention import Attention
from .embed import Embed
from .head import LMHead
from .linear import Einsum, Linear, LinearGeneral
from .mlp import GatedMLP
from .multi_head_attention import MultiHeadAttention
from .norm import LayerNorm, RMSNorm

REPLACEMENTS: dict[type, type] = {
    nnx.MultiHeadAttention: MultiHeadAttention,
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
    nnx.RMSNorm: RMSNorm,
    nnx.LayerNorm: LayerNorm,
    nnx.Embed: Embed,
}
OURS = tuple(REPLACEMENTS.values())
LAYERS = (*OURS, Attention, GatedMLP, LMHead)  # whose modules can pin a config


def is_model(tree: Any) -> bool:
    """Whether an object is an NNX module."""
    return isinstance(tree, nnx.Module)


def modules(tree: Any) -> Iterator[tuple[str, Any]]:
    """Each module of a pytree once, with its dotted path, outermost first and children in order."""
    found = [(path, node) for path, node in nnx.iter_graph(tree) if isinstance(node, nnx.Module)]
    yield from sorted(((".".join(map(str, path)), node) for path, node in found), key=lambda item: _order(item[0]))


def _order(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split(".") if part]


def to_ours(module: Any) -> None:
    """Makes a stock module one of ours, in place: same object, same Variables."""
    ours = REPLACEMENTS[type(module)]
    ours.adopt(module)
    object.__setattr__(module, "__class__", ours)


def to_stock(module: Any) -> None:
    """Undoes `to_ours`."""
    stock = next(old for old, new in REPLACEMENTS.items() if new is type(module))
    module.release()
    object.__setattr__(module, "__class__", stock)


def twin(tree: Any) -> Any:
    """A copy of modules that shares their Variables."""
    return nnx.clone(tree, variables=False)


def copied(tree: Any) -> Any:
    """A copy with arrays of its own: a step may donate or change it."""
    return nnx.clone(tree, arrays=True)


def value_and_grads(model: Any, inputs: tuple, kwargs: dict, combine: Any) -> tuple[Any, Any]:
    """Outputs of a model, and gradients of `combine(outputs)` with respect to parameters and float inputs."""
    graph, params, rest = nnx.split(nnx.clone(model), nnx.Param, ...)
    leaves, treedef = jax.tree.flatten((inputs, kwargs))
    arrays = (jax.Array, np.ndarray)
    floats = [i for i, x in enumerate(leaves) if isinstance(x, arrays) and jnp.issubdtype(x.dtype, jnp.floating)]

    @jax.jit
    def run(params, given):
        def loss(params, given):
            filled = [given[floats.index(i)] if i in floats else x for i, x in enumerate(leaves)]
            args, kw = jax.tree.unflatten(treedef, filled)
            out = nnx.merge(graph, params, rest, copy=True)(*args, **kw)
            return combine(out), out

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, given)
        return out, grads

    return run(params, [leaves[i] for i in floats])
