"""What is to become of the layers of a Linen model: the changes that it carries, and what they say of one layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..plan import Decision, Plan, check_type
from .layers import LAYERS, REPLACEMENTS, STOCK


@dataclasses.dataclass(frozen=True)
class Change:
    """One `swap`, or one `set_config`.

    Args:
        rules: as of either, in order.
        config: as of `swap`.
        swaps: whether layers are exchanged, or only what they pin.
        at: path of the model in the pytree that was changed, which the rules' patterns begin with.
        shared: rules that other models of that pytree have too, so that they need match nothing here.
    """

    rules: tuple[tuple[str | type, Any], ...]
    config: tuple[Any, ...] = ()
    swaps: bool = True
    at: str = ""
    shared: frozenset[str | type] = frozenset()

    def plan(self) -> Plan:
        """A fresh memory of what its rules match."""
        plan = Plan(dict(self.rules), self.config, swaps=self.swaps)
        plan.book.used.update(self.shared)
        return plan

    def __str__(self) -> str:
        """The call that made it."""
        rules = dict(self.rules)
        if not self.swaps:
            return f"ejlayers.set_config({rules})"
        given = {"rules": rules or None, "config": list(self.config) or None}
        return f"ejlayers.swap({', '.join(f'{k}={v}' for k, v in given.items() if v is not None)})"

    def applied(self, plan: Plan, path: str, module: Any, ours: type, before: Decision) -> Decision:
        """What becomes of a layer after what was decided before."""
        path = f"{self.at}.{path}".strip(".")
        if self.swaps:
            if ours not in STOCK:
                return before
            now = plan.decide(path, module, ours)
            return dataclasses.replace(now, config=before.config) if now.config is None else now
        if not before.ours or (value := plan.book.find(path, (type(module), ours))) in (None, True):
            return before
        config = None if value is False else check_type(path, ours.config_type, value)
        return dataclasses.replace(before, config=config)


def ours_for(kind: type) -> type | None:
    """The class of ours that a layer of a class has, or can have."""
    return kind if issubclass(kind, LAYERS) else REPLACEMENTS.get(kind)


def undecided(module: Any, kind: type, ours: type) -> Decision:
    """What a layer is without any change."""
    if kind is ours:
        return Decision(True, config=module.config)
    return Decision(False, ours.why_not(module) or "not swapped")
