"""What is done around Flax Linen models, which are descriptions: a changed one is a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from ..check import value_and_grads
from ..frameworks import is_nnx
from ..plan import Plan, Row, RuleBook
from .changes import Change
from .layers import REPLACEMENTS, STOCK
from .swapping import Swapped, changed, changes_of, original, original_type, visited

_HOW = "its layers come to be while it runs: report(model, variables, *inputs) has them"


class LinenAdapter:
    """The adapter of Flax Linen."""

    replacements = REPLACEMENTS

    def is_model(self, tree: Any) -> bool:
        """Whether an object is a Linen module."""
        return isinstance(tree, nn.Module)

    def swapped(self, model: Any, plan: Plan) -> Any:
        """A new module that runs with ours for the stock layers that a plan takes; its rules are tried in `init`."""
        return changed(model, Change(tuple(plan.book.rules.items()), tuple(plan.defaults.values())))

    def rows(self, model: Any, inputs: tuple, kwargs: dict) -> list[Row]:
        """What the layers are that a call visits; nothing is computed."""
        if not inputs:
            return [Row("", type(model).__name__, isinstance(model, Swapped), _HOW)]
        _variables(inputs)
        leaves, treedef = jax.tree.flatten((inputs, kwargs))
        abstract = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

        def call(given):
            args, kwargs = treedef.unflatten([given.get(i, x) for i, x in enumerate(leaves)])
            return model.apply(*args, **kwargs)

        return visited(model, lambda: jax.eval_shape(call, abstract))

    def original(self, model: Any) -> Any:
        """The stock model; where nothing was swapped, one whose own layers of ours run as the stock ones."""
        is_swapped = any(change.swaps for change in changes_of(model))
        stock = original(model)
        return stock if is_swapped or original_type(model) in STOCK else changed(stock, Change((("**", False),)))

    def reverted(self, model: Any) -> Any:
        """The stock model."""
        return original(model)

    def only(self, model: Any, path: str) -> Any:
        """The model with one layer alone that is one of ours, and pins what it pinned."""
        return changed(model, Change(((path, True), ("**", False))))

    def chosen(self, tree: Any, book: RuleBook) -> Callable[[Any], Any]:
        """Makes the pytree whose models pin what rules say; its rules are tried in `init`."""
        if not any(map(self.is_model, jax.tree.leaves(tree, is_leaf=_is_module))):
            return lambda tree: tree
        book.used.update(book.rules)  # which layers there are is not known before a model runs
        change = Change(tuple(book.rules.items()), swaps=False)

        def pinned(node):
            return changed(node, change) if self.is_model(node) else node

        return lambda tree: jax.tree.map(pinned, tree, is_leaf=_is_module)

    def with_paths(self, tree: Any) -> Any:
        """The pytree itself: a Linen layer that runs knows its path."""
        return tree

    def value_and_grads(self, model: Any, inputs: tuple, kwargs: dict) -> tuple[Any, Any]:
        """Outputs of a model, and gradients of a combination of them with respect to parameters and float inputs."""
        variables = dict(_variables(inputs))
        params = variables.pop("params", {})

        def call(params, args, kwargs):
            return model.apply({"params": params, **variables}, *args, **kwargs)

        return value_and_grads(call, params, inputs[1:], kwargs)


def _is_module(tree: Any) -> bool:
    """Whether an object is a module of Linen or of NNX."""
    return isinstance(tree, nn.Module) or is_nnx(tree)


def _variables(inputs: tuple) -> Mapping:
    """The first of the inputs of a Linen model."""
    if inputs and isinstance(inputs[0], Mapping):
        return inputs[0]
    given = type(inputs[0]).__name__ if inputs else "nothing"
    raise TypeError(f"the first input of a Linen model is {given}; expected its variables, as `model.init` gives them")


ADAPTER = LinenAdapter()
