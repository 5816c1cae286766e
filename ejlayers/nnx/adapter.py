"""What is done around Flax NNX models: they are walked, and changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx

from ..check import value_and_grads
from ..trees import TreeAdapter
from .attention import Attention
from .embed import Embed
from .head import LMHead
from .linear import Einsum, Linear, LinearGeneral
from .mlp import GatedMLP
from .multi_head_attention import MultiHeadAttention
from .norm import LayerNorm, RMSNorm

_REPLACEMENTS: dict[type, type] = {
    nnx.MultiHeadAttention: MultiHeadAttention,
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
    nnx.RMSNorm: RMSNorm,
    nnx.LayerNorm: LayerNorm,
    nnx.Embed: Embed,
}


class NnxAdapter(TreeAdapter):
    """The adapter of Flax NNX: objects stay the same ones, and so do their Variables."""

    replacements = _REPLACEMENTS
    layers = (*_REPLACEMENTS.values(), Attention, GatedMLP, LMHead)

    def is_model(self, tree: Any) -> bool:
        """Whether an object is an NNX module."""
        return isinstance(tree, nnx.Module)

    def modules(self, tree: Any) -> Iterator[tuple[str, Any]]:
        """Each module of a pytree once, with its dotted path, outermost first and children in order."""
        found = [(path, node) for path, node in nnx.iter_graph(tree) if isinstance(node, nnx.Module)]
        yield from sorted(((".".join(map(str, path)), node) for path, node in found), key=lambda item: _order(item[0]))

    def paths(self, tree: Any) -> Mapping[str, tuple[str, ...]]:
        """All paths of those modules that are reached by more than one, by their first."""
        found: dict[int, list[str]] = {}
        for path, module in _with_all_paths(tree, (), ()):
            found.setdefault(id(module), []).append(".".join(map(str, path)))
        tied = ((path, found[id(module)]) for path, module in self.modules(tree))
        return {path: (path, *(p for p in all_ if p != path)) for path, all_ in tied if len(all_) > 1}

    def changed(self, tree: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
        """The same pytree: the functions change its modules in place."""
        for path, module in list(self.modules(tree)):
            if path in changes:
                changes[path](module)
        return tree

    def to_ours(self, module: Any) -> Any:
        """Makes a stock module one of ours, in place: same object, same Variables."""
        ours = self.replacements[type(module)]
        ours.adopt(module)
        object.__setattr__(module, "__class__", ours)
        return module

    def to_stock(self, module: Any) -> Any:
        """Undoes `to_ours`."""
        stock = next(old for old, new in self.replacements.items() if new is type(module))
        module.release()
        object.__setattr__(module, "__class__", stock)
        return module

    def twin(self, tree: Any) -> Any:
        """A copy of modules that shares their Variables."""
        return nnx.clone(tree, variables=False)

    def value_and_grads(self, model: Any, inputs: tuple, kwargs: dict, where: Any) -> tuple[Any, Any]:
        """Outputs of a model, and gradients of a combination of them with respect to parameters and float inputs."""
        graph, params, rest = nnx.split(nnx.clone(model), nnx.Param, ...)

        def call(params, args, kwargs):
            return nnx.merge(graph, params, rest, copy=True)(*args, **kwargs)

        return value_and_grads(call, params, inputs, kwargs, where)


def _with_all_paths(node: Any, path: tuple, above: tuple[int, ...]) -> Iterator[tuple[tuple, nnx.Module]]:
    """Each module by every path that does not go in a circle."""
    impl: Any = nnx.graph.get_node_impl(node)
    if impl is None or id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node
    for name, child in impl.node_dict(node).items():
        yield from _with_all_paths(child, (*path, name), (*above, id(node)))


def _order(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split(".") if part]


ADAPTER = NnxAdapter()
