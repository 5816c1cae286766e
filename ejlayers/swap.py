"""`swap`: replaces the stock layers of a model; `report`: says what was replaced, and undoes it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, TypeVar

from ejkernel_ops import ConfigError
from ejkernel_ops.config.schema import leaf_fields

from .frameworks import adapter_of
from .functional import CONFIGS
from .rules import RuleBook, Rules, check_type

M = TypeVar("M")
_reasons: dict[int, dict[str, str]] = {}  # id of a model -> path -> why not


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer of a report: its path, its type, whether it is one of ours, and what it pins or why not."""

    path: str
    layer: str
    replaced: bool
    note: str


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """What a model's layers are.

    Args:
        model: the model.
        rows: one for each layer that has a replacement.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> [row.replaced for row in ejlayers.report(model).rows]
        [True]
        >>> type(ejlayers.report(model).original()) is nnx.Linear
        True
    """

    model: Any = dataclasses.field(repr=False)
    rows: tuple[Row, ...]

    def original(self) -> Any:
        """The stock model over the same parameters: a change of one is a change of the other."""
        adapter = adapter_of(self.model)
        stock = adapter.twin(self.model)
        _restore(adapter, stock)
        return stock

    def revert(self) -> Any:
        """Puts the stock layers back, in place; returns the model."""
        _restore(adapter_of(self.model), self.model)
        _reasons.pop(id(self.model), None)
        return self.model

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [dataclasses.asdict(row) for row in self.rows]

    def __str__(self) -> str:
        from ejkernel_ops.utils.text_table import text_table  # rich, which only printing needs

        rows = [[r.path or "(model)", r.layer, "replaced" if r.replaced else "skipped", r.note] for r in self.rows]
        return text_table(("module", "layer", "", "note"), rows)


def _restore(adapter: Any, model: Any) -> None:
    for _, module in list(adapter.modules(model)):
        if type(module) in adapter.OURS:
            adapter.to_stock(module)


def swap(model: M, *, rules: Rules | None = None, config: Any = None) -> M:
    """Replaces the stock layers of a model by ours: same parameters, same state, same checkpoints.

    Flax NNX models are changed in place: same objects, so optimizers, tied and stacked layers stay as they
    are. Layers with functions of one's own (`attention_fn`, `dot_general`, `promote_dtype`), those that no kernel
    computes, and subclasses, are left alone; `report` says so. Swapping twice is swapping once.

    Args:
        model: a `flax.nnx.Module`.
        rules: path pattern or type -> config to pin, `True`, or `False` to leave the layer alone; the first
            that matches wins, layers that none matches are replaced.
        config: config to pin in each replaced layer that takes it, or a list of configs of several kinds.

    Returns:
        The model.

    Raises:
        ConfigError: a model of no known framework, a rule that matches nothing, a config that no layer takes.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> isinstance(model, nnx.Linear), type(model) is ejlayers.nnx.Linear
        (True, True)
    """
    adapter, book, defaults = adapter_of(model), RuleBook(rules), _defaults(config)
    changes, stock, reasons, paths, taken = [], [], {}, [], set()
    for path, module in list(adapter.modules(model)):
        ours = adapter.REPLACEMENTS.get(type(module), type(module) if type(module) in adapter.OURS else None)
        if ours is None:
            continue
        paths.append(path)
        taken.add(ours.config_type)
        value = book.find(path, (type(module), ours))
        if value is False:
            reasons[path] = "a rule says so"
            stock.append(module)
            continue
        if type(module) is not ours and (reason := ours.why_not(module)):
            reasons[path] = reason
            continue
        pinned = (
            check_type(path, ours.config_type, value) if value not in (None, True) else defaults.get(ours.config_type)
        )
        changes.append((module, pinned))
    book.refuse_unused(paths)
    for kind in defaults.keys() - taken:
        raise ConfigError(f"config has a {kind.__name__}, which no layer takes that can be replaced; leave it out")
    for module in stock:  # only after all rules are known to be good
        if type(module) in adapter.OURS:
            adapter.to_stock(module)
    for module, pinned in changes:
        if type(module) not in adapter.OURS:
            adapter.to_ours(module)
        if pinned is not None:
            module.pin(config=pinned)
    _remember(model, reasons)
    return model


def _remember(model: Any, reasons: dict[str, str]) -> None:
    """Keeps why layers were skipped for as long as the model lives; by identity, for a model need not be hashable."""
    if id(model) not in _reasons:
        weakref.finalize(model, _reasons.pop, id(model), None)
    _reasons[id(model)] = reasons


def _defaults(config: Any) -> dict[type, Any]:
    """The `config` argument by type."""
    given = list(config) if isinstance(config, (list, tuple)) else [] if config is None else [config]
    for one in given:
        if not isinstance(one, CONFIGS):
            raise ConfigError(f"config has {one!r}; expected one of {', '.join(c.__name__ for c in CONFIGS)}")
    return {type(one): one for one in given}


def _pins(module: Any) -> list[str]:
    """What a module pins, as `field=value`."""
    given = {} if module.config is None else dict(leaf_fields(module.config))
    given |= {} if module.backend is None else {"backend": module.backend}
    return [f"{name}={value}" for name, value in given.items() if value is not None]


def report(model: Any) -> SwapReport:
    """What the layers of a model are: replaced, or skipped and why.

    Args:
        model: a `flax.nnx.Module`.

    Returns:
        A report that prints as a table, and that can give the stock model back.

    Raises:
        ConfigError: a model of no known framework.

    Example:
        >>> from flax import nnx
        >>> report(nnx.Linear(3, 4, rngs=nnx.Rngs(0))).rows[0].replaced
        False
    """
    adapter = adapter_of(model)
    reasons, rows = _reasons.get(id(model), {}), []
    for path, module in adapter.modules(model):
        kind = type(module)
        if kind in adapter.OURS:
            pins = _pins(module)
            rows.append(Row(path, kind.__name__, True, "pinned: " + ", ".join(pins) if pins else ""))
        elif kind in adapter.REPLACEMENTS:
            why = reasons.get(path) or adapter.REPLACEMENTS[kind].why_not(module) or "not swapped"
            rows.append(Row(path, kind.__name__, False, why))
        elif isinstance(module, tuple(adapter.REPLACEMENTS)):
            rows.append(Row(path, kind.__name__, False, "a subclass: swap its parent by hand if they compute the same"))
    return SwapReport(model, tuple(rows))
