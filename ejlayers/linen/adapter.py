"""What is done around Flax Linen models, which are descriptions: a changed one is a new one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from ..check import value_and_grads
from ..patterns import reaches
from ..plan import Plan, Row, RuleBook
from .calls import meeting_all, original_type, visited
from .changes import Change
from .layers import REPLACEMENTS, STOCK
from .swapping import Swapped, changed, changes_of, original
from .trees import flatten_models, map_models

_HOW = "its layers come to be while it runs: report(model, variables, *inputs) has them"


class LinenAdapter:
    """The adapter of Flax Linen."""

    replacements = REPLACEMENTS

    def is_model(self, tree: Any) -> bool:
        """Whether an object is a Linen module."""
        return isinstance(tree, nn.Module)

    def holds_model(self, tree: Any) -> bool:
        """Whether a pytree has a Linen module in it, or a train state with one."""
        return bool(flatten_models(tree))

    def swapped(self, model: Any, plan: Plan) -> Any:
        """New modules that run with ours for the stock layers that a plan takes; its rules are tried in `init`."""
        options = {"config": tuple(plan.defaults.values()), "reproducible": plan.reproducible}
        change = self._chosen(model, plan.book, **options)
        plan.book.refuse_unused()
        return change(model)

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

        return visited(changes_of(model), lambda: jax.eval_shape(call, abstract), whole=kwargs.get("method") is None)

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
        """Makes the pytree whose models pin what rules say; which layers there are is not known before a model runs."""
        return self._chosen(tree, book, swaps=False)

    def _chosen(self, tree: Any, book: RuleBook, **options: Any) -> Callable[[Any], Any]:
        """Makes the pytree whose models have one change more; rules that can be meant for none of them stay unused."""
        paths = [path for path, _ in flatten_models(tree)]
        meant = {rule: [p for p in paths if isinstance(rule, type) or reaches(rule, p)] for rule in book.rules}
        book.used.update(rule for rule, found in meant.items() if found)
        book.paths += paths
        shared = frozenset(rule for rule, found in meant.items() if len(found) > 1)

        def change(path, model):
            rules = tuple((rule, value) for rule, value in book.rules.items() if path in meant[rule])
            return changed(model, Change(rules, at=path, shared=shared.intersection(dict(rules)), **options))

        return lambda tree: map_models(change, tree)

    def with_paths(self, tree: Any) -> Any:
        """The pytree itself: a Linen layer that runs knows its path."""
        return tree

    def meeting_all(self) -> contextlib.AbstractContextManager:
        """Context in which a model that runs refuses rules that match none of its layers."""
        return meeting_all()

    def value_and_grads(self, model: Any, inputs: tuple, kwargs: dict, where: Any) -> tuple[Any, Any]:
        """Outputs of a model, and gradients of a combination of them with respect to parameters and float inputs."""
        variables = dict(_variables(inputs))
        params = variables.pop("params", {})

        def call(params, args, kwargs):
            return model.apply({"params": params, **variables}, *args, **kwargs)

        return value_and_grads(call, params, inputs[1:], kwargs, where)


def _variables(inputs: tuple) -> Mapping:
    """The first of the inputs of a Linen model."""
    if inputs and isinstance(inputs[0], Mapping):
        return inputs[0]
    given = type(inputs[0]).__name__ if inputs else "nothing"
    raise TypeError(f"the first input of a Linen model is {given}; expected its variables, as `model.init` gives them")


ADAPTER = LinenAdapter()
