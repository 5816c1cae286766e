"""What is done around Equinox models: they are walked as pytrees, and made anew where something changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from ..check import value_and_grads
from ..frameworks import is_nnx
from ..trees import TreeAdapter
from .attention import Attention
from .head import LMHead
from .linear import Linear
from .mlp import GatedMLP
from .multihead_attention import MultiheadAttention
from .norm import LayerNorm, RMSNorm
from .pinned import remade
from .rotary import RotaryPositionalEmbedding

_REPLACEMENTS: dict[type, type] = {
    eqx.nn.MultiheadAttention: MultiheadAttention,
    eqx.nn.Linear: Linear,
    eqx.nn.RMSNorm: RMSNorm,
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.RotaryPositionalEmbedding: RotaryPositionalEmbedding,
}


class EquinoxAdapter(TreeAdapter):
    """The adapter of Equinox: models are not changed, and new ones share their arrays."""

    replacements = _REPLACEMENTS
    layers = (*_REPLACEMENTS.values(), Attention, GatedMLP, LMHead)

    def is_model(self, tree: Any) -> bool:
        """Whether an object is an Equinox module."""
        return isinstance(tree, eqx.Module)

    def modules(self, tree: Any) -> Iterator[tuple[str, Any]]:
        """Each module of a pytree once, with its dotted path, outermost first and children in order."""
        return _modules(tree, "")

    def paths(self, tree: Any) -> Mapping[str, tuple[str, ...]]:
        """All paths of those modules that `eqx.nn.Shared` puts in several places, by their first."""
        found = {path: (path,) for path, _ in self.modules(tree)}
        for path, module in self.modules(tree):
            if isinstance(module, eqx.nn.Shared):
                for place, source in _shared(module, _joined(path, "pytree")):
                    inside = [p for p in found if p == source or p.startswith(f"{source}.")]
                    found |= {p: (*found[p], place + p.removeprefix(source)) for p in inside}
        return found

    def changed(self, tree: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
        """The pytree with some modules, by path, replaced by what a function makes of them and their new children."""
        return _changed(tree, changes, "")

    def alike(self, path: str, module: Any) -> Any:
        """Modules of one class are alike: an optimizer's state has the model's, and must go on matching them."""
        return type(module)

    def to_ours(self, module: Any) -> Any:
        """A stock module as one of ours."""
        pins = {"config": None, "backend": None, "kernel_path": None, "reproducible": True}
        return remade(module, self.replacements[type(module)], **pins)

    def to_stock(self, module: Any) -> Any:
        """Undoes `to_ours`."""
        return remade(module, next(old for old, new in self.replacements.items() if new is type(module)))

    def twin(self, tree: Any) -> Any:
        """The same pytree, for nothing changes it."""
        return tree

    def value_and_grads(self, model: Any, inputs: tuple, kwargs: dict, where: Any) -> tuple[Any, Any]:
        """Outputs of a model, and gradients of a combination of them with respect to parameters and float inputs."""
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        return value_and_grads(lambda p, args, kw: eqx.combine(p, rest)(*args, **kw), params, inputs, kwargs, where)


def _modules(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, eqx.Module):
        yield path, tree
    for name, child in _children(tree)[0]:
        yield from _modules(child, _joined(path, name))


def _shared(module: eqx.nn.Shared, path: str) -> Iterator[tuple[str, str]]:
    """Paths of places that share a node with another place, and of the node; none of a mask or labels in its form."""
    if not (callable(module.where) and callable(module.get)):
        return
    places, sources = module.where(module.pytree), module.get(module.pytree)
    pairs = zip(places, sources) if isinstance(places, (tuple, list)) else [(places, sources)]
    names = {id(node): name for name, node in _nodes(module.pytree, path)}
    yield from ((names[id(place)], names[id(source)]) for place, source in pairs)


def _nodes(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, tree
    for name, child in _children(tree)[0]:
        yield from _nodes(child, _joined(path, name))


def _changed(tree: Any, changes: Mapping[str, Callable[[Any], Any]], path: str) -> Any:
    children, structure = _children(tree)
    new = [_changed(child, changes, _joined(path, name)) for name, child in children]
    if any(a is not b for a, (_, b) in zip(new, children)):
        tree = jtu.tree_unflatten(structure, new)
    return changes[path](tree) if path in changes and isinstance(tree, eqx.Module) else tree


def _children(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The children of a node by name, and what makes a node of others; of a leaf, or a module of Flax NNX, none."""
    if is_nnx(tree):
        return [], None
    found, structure = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if jtu.treedef_is_leaf(structure):
        return [], structure
    return [(jtu.keystr(key, simple=True), child) for key, child in found], structure


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


ADAPTER = EquinoxAdapter()
