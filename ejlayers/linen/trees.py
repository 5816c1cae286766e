"""Pytrees with Linen models in them: as they are, and in the train states that hold their `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from ..frameworks import is_nnx


def flatten_models(tree: Any) -> list[tuple[str, nn.Module]]:
    """The models of a pytree with their dotted paths; that of a train state has the path of the state."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    return [(_dotted(path), _model(node)) for path, node in nodes if _has_model(node)]


def map_models(change: Callable[[str, nn.Module], nn.Module], tree: Any) -> Any:
    """The pytree with other models, made of path and model."""

    def mapped(path, node):
        if not _has_model(node):
            return node
        made = change(_dotted(path), _model(node))
        return made if node is _model(node) else node.replace(apply_fn=getattr(made, node.apply_fn.__name__))

    return jax.tree_util.tree_map_with_path(mapped, tree, is_leaf=_is_leaf)


def _model(node: Any) -> Any:
    """A model, or that whose method is the `apply_fn` of a `TrainState` or its kin."""
    is_model = isinstance(node, nn.Module)
    return node if is_model else getattr(getattr(node, "apply_fn", None), "__self__", None)


def _has_model(node: Any) -> bool:
    return isinstance(_model(node), nn.Module)


def _is_leaf(node: Any) -> bool:
    """Whether there is nothing to look for inside of a node."""
    return _has_model(node) or is_nnx(node)


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
