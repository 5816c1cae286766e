"""What is done around models whose modules can be listed: Flax NNX and Equinox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ejkernel_ops.config.schema import leaf_fields

from .plan import Decision, Plan, Row, RuleBook, check_type


class TreeAdapter:
    """The half of an adapter that knows no framework; the other half is `modules` and `changed` and the like.

    Attributes:
        replacements: stock class -> ours.
        layers: all classes whose modules can pin a config.
    """

    replacements: dict[type, type]
    layers: tuple[type, ...]

    def is_model(self, tree: Any) -> bool:
        """Whether an object is a module of the framework."""
        raise NotImplementedError

    def holds_model(self, tree: Any) -> bool:
        """Whether a pytree has a module of the framework in it."""
        return next(self.modules(tree), None) is not None

    def modules(self, tree: Any) -> Iterator[tuple[str, Any]]:
        """Each module of a pytree once, with its dotted path, outermost first and children in order."""
        raise NotImplementedError

    def changed(self, tree: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
        """The pytree with some modules, by path, replaced by what a function makes of them."""
        raise NotImplementedError

    def to_ours(self, module: Any) -> Any:
        """A stock module as one of ours."""
        raise NotImplementedError

    def to_stock(self, module: Any) -> Any:
        """Undoes `to_ours`."""
        raise NotImplementedError

    def twin(self, tree: Any) -> Any:
        """A copy of modules that shares their parameters."""
        raise NotImplementedError

    def alike(self, path: str, module: Any) -> Any:
        """Outermost modules with an equal answer are shown by the same paths; by default none is."""
        return path

    def swapped(self, model: Any, plan: Plan) -> Any:
        """A model, or a pytree with some, with ours for the stock layers that a plan takes.

        A layer in an optimizer's state becomes what that of the model does: its arrays are others, or not there.
        """
        decisions, first = {}, {}
        modules = list(self.modules(model))
        for path, module, place in self._placed(modules):
            if (ours := self._ours(module)) is not None:
                decisions[path] = plan.decide(path, first.setdefault(place, module), ours)
        plan.refuse_unused()
        return self.changed(model, {path: self._change(decision) for path, decision in decisions.items()})

    def _placed(self, modules: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
        """Each module with its path, and its place in the outermost one: the same in all of these that are alike."""
        roots, root = _outermost(modules), ""
        for path, module in modules:
            root = path if path in roots else root
            yield path, module, (self.alike(root, roots[root]), path.removeprefix(root))

    def _ours(self, module: Any) -> type | None:
        """The class of ours that a module has, or can have."""
        kind = type(module)
        return kind if kind in self.replacements.values() else self.replacements.get(kind)

    def _change(self, decision: Decision) -> Callable[[Any], Any]:
        def change(module):
            is_ours = type(module) in self.replacements.values()
            if is_ours != decision.ours:
                module = self.to_ours(module) if decision.ours else self.to_stock(module)
            return module if decision.config is None else module.pin(config=decision.config)

        return change

    def reverted(self, model: Any) -> Any:
        """The model with its stock layers back."""
        return self._with_stock(model, except_path=None)

    def original(self, model: Any) -> Any:
        """A stock model over the same parameters."""
        return self.reverted(self.twin(model))

    def only(self, model: Any, path: str) -> Any:
        """A model over the same parameters in which one layer alone is one of ours."""
        return self._with_stock(self.twin(model), except_path=path)

    def _with_stock(self, model: Any, except_path: str | None) -> Any:
        ours = (path for path, module in self.modules(model) if type(module) in self.replacements.values())
        return self.changed(model, {path: self.to_stock for path in ours if path != except_path})

    def rows(self, model: Any, inputs: tuple, kwargs: dict) -> list[Row]:
        """What its layers are."""
        modules = list(self.modules(model))
        is_swapped = any(type(module) in self.replacements.values() for _, module in modules)
        rest = "a rule says so, or it came after the swap" if is_swapped else "not swapped"
        return [row for path, module in modules if (row := self._row(path, module, rest)) is not None]

    def _row(self, path: str, module: Any, rest: str) -> Row | None:
        """What a layer is; `rest` is why it is a stock one where nothing about it says so."""
        kind = type(module)
        if kind in self.replacements.values():
            pins = pinned_fields(module)
            return Row(path, kind.__name__, True, "pinned: " + ", ".join(pins) if pins else "")
        if kind in self.replacements:
            return Row(path, kind.__name__, False, self.replacements[kind].why_not(module) or rest)
        if isinstance(module, tuple(self.replacements)):
            return Row(path, kind.__name__, False, "a subclass: swap its parent by hand if they compute the same")
        return None

    def chosen(self, tree: Any, book: RuleBook) -> Callable[[Any], Any]:
        """Asks rules for the configs of a pytree's layers; what it returns makes the pytree that pins them."""
        changes = {}
        for path, module in self.modules(tree):
            if not isinstance(module, self.layers):
                continue
            value = book.find(path, (type(module),))
            if value is None or value is True:
                continue
            config = check_type(path, module.config_type, value) if value is not False else None
            changes[path] = lambda module, config=config: module.pin(config=config)
        return lambda tree: self.changed(tree, changes) if changes else tree

    def meeting_all(self) -> contextlib.AbstractContextManager:
        """Nothing: all layers are met, and all rules tried, where they are given."""
        return contextlib.nullcontext()

    def with_paths(self, tree: Any) -> Any:
        """A copy of a pytree in which each of our modules knows its path; the copy shares all arrays."""
        tree, changes, names = self.twin(tree), {}, {}
        modules = list(self.modules(tree))
        roots = _outermost(modules)
        for path in sorted(roots, key=len):
            names.setdefault(self.alike(path, roots[path]), path if names else "")  # the first one needs no name
        for path, module, (kind, inside) in self._placed(modules):
            if isinstance(module, self.layers):
                shown = f"{names[kind]}{inside}".strip(".") or type(module).__name__
                changes[path] = lambda module, shown=shown: module.pin(path=shown)
        return self.changed(tree, changes) if changes else tree


def _outermost(modules: list[tuple[str, Any]]) -> dict[str, Any]:
    """The modules that are inside no other one, by path, of a list in which children follow their parents."""
    found: dict[str, Any] = {}
    for path, module in modules:
        last = next(reversed(found), None)
        if last is None or not (last == "" or f"{path}.".startswith(f"{last}.")):
            found[path] = module
    return found


def pinned_fields(module: Any) -> list[str]:
    """What a module pins, as `field=value`."""
    given = {} if module.config is None else dict(leaf_fields(module.config))
    given |= {} if module.backend is None else {"backend": module.backend}
    return [f"{name}={value}" for name, value in given.items() if value is not None]
