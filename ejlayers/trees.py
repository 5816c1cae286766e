"""What is done around models whose modules can be listed: Flax NNX and Equinox."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .pins import note_of_ours
from .plan import Decision, Plan, Row, RuleBook, wanted_pins

_reasons: dict[int, dict[str, str]] = {}  # id of a model -> path -> why not


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
        """The model with ours for the stock layers that a plan takes."""
        decisions = {}
        paths, fused = self.paths(model), self._fused(model)
        for path, module in list(self.modules(model)):
            if (ours := self._ours(module)) is not None:
                decisions[path] = plan.decide(paths.get(path, (path,)), module, ours, fused.get(id(module)))
        plan.refuse_unused()
        model = self.changed(model, {path: self._change(decision) for path, decision in decisions.items()})
        _remember(model, {path: decision.reason for path, decision in decisions.items() if not decision.ours})
        return model

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
        stock = self._with_stock(model, except_path=None)
        _reasons.pop(id(stock), None)  # a model that was not changed in place keeps its own
        return stock

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
        fused = self._fused(model)
        rows = (self._row(model, path, module, fused.get(id(module))) for path, module in self.modules(model))
        return [row for row in rows if row is not None]

    def _row(self, model: Any, path: str, module: Any, fused: str | None) -> Row | None:
        kind = type(module)
        if kind in self.replacements.values():
            return Row(path, kind.__name__, True, fused or note_of_ours(module, kind.when_not(module)))
        if kind in self.replacements:
            why = _reasons.get(id(model), {}).get(path) or self.replacements[kind].why_not(module) or "not swapped"
            return Row(path, kind.__name__, False, why)
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

    def with_paths(self, tree: Any) -> Any:
        """A copy of a pytree in which each of our modules knows its path; the copy shares all arrays."""
        tree, changes, names = self.twin(tree), {}, {}
        modules = list(self.modules(tree))
        roots = _outermost(modules)
        for path in sorted(roots, key=len):
            names.setdefault(self.alike(path, roots[path]), path if names else "")  # the first one needs no name
        root = name = ""
        for path, module in modules:
            if path in roots:
                root, name = path, names[self.alike(path, module)]
            if isinstance(module, self.layers):
                shown = f"{name}{path.removeprefix(root)}".strip(".") or type(module).__name__
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


def _remember(model: Any, reasons: dict[str, str]) -> None:
    """Keeps why layers were skipped for as long as the model lives; by identity, for a model need not be hashable."""
    if id(model) not in _reasons:
        weakref.finalize(model, _reasons.pop, id(model), None)
    _reasons[id(model)] = reasons
