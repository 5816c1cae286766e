"""What is done around models whose modules can be listed: Flax NNX and Equinox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .pins import note_of_ours
from .plan import Decision, Plan, Row, RuleBook, wanted_pins


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

    def paths(self, tree: Any) -> Mapping[str, tuple[str, ...]]:
        """All paths of those modules that are reached by more than one, by their first."""
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

    def _fused(self, tree: Any) -> dict[int, str]:
        """The modules whose products are part of another one's kernel, by identity, and which one's."""
        return {
            id(part): f"its product is part of the kernel of {path or 'the model'}, a {type(module).__name__}"
            for path, module in self.modules(tree)
            if isinstance(module, self.layers) and hasattr(module, "fused")
            for part in module.fused()
        }

    def alike(self, path: str, module: Any) -> Any:
        """Outermost modules with an equal answer are shown by the same paths; by default none is."""
        return path

    def swapped(self, model: Any, plan: Plan) -> Any:
        """A model, or a pytree with some, with ours for the stock layers that a plan takes.

        A layer in an optimizer's state becomes what that of the model does: its arrays are others, or not there.
        """
        decisions, first = {}, {}
        modules, paths, fused = list(self.modules(model)), self.paths(model), self._fused(model)
        for path, module, place in self._placed(modules):
            if (ours := self._ours(module)) is not None:
                like, vain = first.setdefault(place, module), fused.get(id(module))
                decisions[path] = plan.decide(paths.get(path, (path,)), like, ours, vain)
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
            pins = decision.pins()
            return module.pin(**pins) if pins else module

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
        modules, fused = list(self.modules(model)), self._fused(model)
        is_swapped = any(type(module) in self.replacements.values() for _, module in modules)
        rest = "a rule says so, or it came after the swap" if is_swapped else "not swapped"
        rows = (self._row(path, module, fused.get(id(module)), rest) for path, module in modules)
        return [row for row in rows if row is not None]

    def _row(self, path: str, module: Any, fused: str | None, rest: str) -> Row | None:
        """What a layer is; `rest` is why it is a stock one where nothing about it says so."""
        kind = type(module)
        if kind in self.replacements.values():
            return Row(path, kind.__name__, True, fused or note_of_ours(module, kind.when_not(module)))
        if kind in self.replacements:
            return Row(path, kind.__name__, False, self.replacements[kind].why_not(module) or rest)
        if isinstance(module, tuple(self.replacements)):
            return Row(path, kind.__name__, False, "a subclass: swap its parent by hand if they compute the same")
        return None

    def chosen(self, tree: Any, book: RuleBook) -> Callable[[Any], Any]:
        """Asks rules for the configs of a pytree's layers; what it returns makes the pytree that pins them."""
        changes, paths, fused = {}, self.paths(tree), self._fused(tree)
        for path, module in self.modules(tree):
            if not isinstance(module, self.layers):
                continue
            if pins := wanted_pins(book, paths.get(path, (path,)), (type(module),), module, fused.get(id(module))):
                changes[path] = lambda module, pins=pins: module.pin(**pins)
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
