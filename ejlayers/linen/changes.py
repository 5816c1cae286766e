"""What is to become of the layers of a Linen model: the changes that it carries, and what they say of one layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..plan import Decision, Plan, wanted_pins
from .layers import LAYERS, REPLACEMENTS, STOCK
from .twins import twin


@dataclasses.dataclass(frozen=True)
class Change:
    """One `swap`, or one `set_config`.

    Args:
        rules: as of either, in order.
        config: as of `swap`.
        reproducible: as of `swap`.
        swaps: whether layers are exchanged, or only what they pin.
        at: path of the model in the pytree that was changed, which the rules' patterns begin with.
        shared: rules that other models of that pytree have too, so that they need match nothing here.
    """

    rules: tuple[tuple[str | type, Any], ...]
    config: tuple[Any, ...] = ()
    reproducible: bool | None = None
    swaps: bool = True
    at: str = ""
    shared: frozenset[str | type] = frozenset()

    def plan(self) -> Plan:
        """A fresh memory of what its rules match."""
        plan = Plan(dict(self.rules), self.config, self.reproducible, swaps=self.swaps)
        plan.book.used.update(self.shared)
        return plan

    @property
    def asks(self) -> bool:
        """Whether it asks for something that may find no layer."""
        return bool(self.rules or self.config or self.reproducible is not None)

    def __str__(self) -> str:
        """The call that made it."""
        rules = dict(self.rules)
        if not self.swaps:
            return f"ejlayers.set_config({rules})"
        given = {"rules": rules or None, "config": list(self.config) or None, "reproducible": self.reproducible}
        return f"ejlayers.swap({', '.join(f'{k}={v}' for k, v in given.items() if v is not None)})"

    def applied(self, plan: Plan, path: str, module: Any, ours: type, before: Decision) -> Decision:
        """What becomes of a layer after what was decided before."""
        path = f"{self.at}.{path}".strip(".")
        for name in getattr(ours, "fused", ()):
            vain = f"its product is part of the kernel of {path or 'the model'}, a {ours.__name__}"
            plan.book.find((f"{path}.{name}".strip("."),), (), vain)
        if self.swaps:
            if ours not in STOCK:
                return before
            now = plan.decide((path,), module, ours)
            return dataclasses.replace(now, **before.pins() | now.pins())
        if not before.ours:
            return before
        pins = wanted_pins(plan.book, (path,), (type(module), ours), as_decided(module, ours, before))
        return dataclasses.replace(before, **pins)


def ours_for(kind: type) -> type | None:
    """The class of ours that a layer of a class has, or can have."""
    return kind if issubclass(kind, LAYERS) else REPLACEMENTS.get(kind)


def as_decided(module: Any, target: type, decision: Decision) -> Any:
    """A layer as it runs: a twin of a class, with what a decision pins."""
    pins = {"config": decision.config, "backend": getattr(module, "backend", None)}
    pins |= {} if decision.reproducible is None else {"reproducible": decision.reproducible}
    if (rotary := getattr(module, "rotary", None)) is not None:
        pins["rotary"] = rotary.pin(config=decision.rotary)
    return twin(module, target, **pins)


def undecided(module: Any, kind: type, ours: type) -> Decision:
    """What a layer is without any change."""
    if kind is ours:
        return Decision(True, config=module.config, rotary=getattr(getattr(module, "rotary", None), "config", None))
    return Decision(False, ours.why_not(module) or "not swapped")
