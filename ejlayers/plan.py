"""Rules, and what they say about the layers of a model: which are replaced, and what each pins."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from ejkernel_ops import AttentionConfig, ConfigError
from ejkernel_ops.kernels.config import unread_by_all

from .functional import CONFIGS
from .patterns import matches
from .pins import changed_pins, check_reproducible

Rules = Mapping[str, Any] | Mapping[type, Any] | Mapping[str | type, Any]


class RuleBook:
    """Rules in order; the first that matches a module wins.

    Args:
        rules: dotted path pattern (`layers.0.attn`; `*` is a name or part of one, `**` any number of names) or type ->
            a config, `True` or `False`.
        pins: whether they are about what layers of ours pin, not about which layers are replaced.

    Raises:
        ConfigError: a value of another kind.
    """

    def __init__(self, rules: Rules | None, *, pins: bool = False):
        if rules is not None and not isinstance(rules, Mapping):
            raise ConfigError(f"rules is a {type(rules).__name__}; expected a mapping of path patterns or types")
        self.pins = pins
        self.rules: dict[Any, Any] = dict(rules or {})
        self.paths: list[str] = []  # of the layers that were asked for
        self.used: set[str | type] = set()
        self.taken: dict[str | type, str | type] = {}  # rule -> one before it that takes its layers
        self.vain: dict[str | type, str] = {}  # rule -> why what it pins somewhere has no effect
        for pattern, value in self.rules.items():
            if not isinstance(pattern, (str, type)):
                raise ConfigError(
                    f"rules has the key {pattern!r}; expected a path pattern, such as 'layers.3', or a type"
                )
            if not isinstance(value, (bool, *CONFIGS)):
                expected = ", ".join(c.__name__ for c in CONFIGS)
                raise ConfigError(f"rule {pattern!r} is {value!r}; expected True, False or one of {expected}")

    def find(self, paths: tuple[str, ...], kinds: tuple[type, ...], vain: str | None = None) -> Any:
        """What the rules say of a module: a config, `True`, `False`, or `None` where none matches.

        Args:
            paths: all by which it is reached.
            kinds: its types.
            vain: why a config that it pins has no effect, if it has none.

        Raises:
            ConfigError: two rules that differ, each for another path of one module.
        """
        self.paths += paths
        found = {pattern: where for pattern in self.rules if (where := _where(pattern, paths, kinds))}
        if vain is not None:
            self.vain |= {pattern: vain for pattern in found if not isinstance(self.rules[pattern], bool)}
            found = {pattern: where for pattern, where in found.items() if pattern not in self.vain}
        if not found:
            return None
        first, *others = found
        for pattern in others:
            if found[pattern] & found[first]:
                self.taken[pattern] = first
            elif self.rules[pattern] == self.rules[first]:
                self.used.add(pattern)
            else:
                here, there = min(found[first]), min(found[pattern])
                raise ConfigError(f"rules {first!r} and {pattern!r} differ, and {here!r} and {there!r} are one module")
        self.used.add(first)
        return self.rules[first]

    def refuse_unused(self) -> None:
        """Raises if a rule matched nothing."""
        unused = [p for p in self.rules if p not in self.used]
        if not unused:
            return
        if (reason := self.vain.get(unused[0])) is not None:
            raise ConfigError(f"rule {unused[0]!r} has no effect: {reason}")
        if (first := self.taken.get(unused[0])) is not None:
            raise ConfigError(f"rule {unused[0]!r} has no effect: rule {first!r} before it takes all of its layers")
        if self.pins and not self.paths:
            raise ConfigError(
                f"rule {unused[0]!r} finds no layer of ours, which alone can pin a config; pass what "
                "ejlayers.swap(model) returned, or a TrainState whose apply_fn is its apply"
            )
        near = difflib.get_close_matches(str(unused[0]), self.paths, 1)
        paths = ", ".join(path or "'' (the model)" for path in self.paths[:20])
        hint = f"did you mean {near[0]!r}?" if near else f"paths: {paths or 'none'}"
        which = "of ours" if self.pins else "that can be replaced"
        raise ConfigError(f"rule {unused[0]!r} matches no layer {which}; {hint}")


def _where(pattern: str | type, paths: tuple[str, ...], kinds: tuple[type, ...]) -> set[str]:
    """By which of its paths a rule matches a module: by all of them if by its type."""
    if isinstance(pattern, type):
        return set(paths) if any(issubclass(kind, pattern) for kind in kinds) else set()
    return {path for path in paths if matches(pattern, path)}


def wanted_pins(
    book: RuleBook, paths: tuple[str, ...], kinds: tuple[type, ...], layer: Any, vain: str | None = None
) -> dict[str, Any]:
    """What rules say that a layer is to pin, as arguments of its `pin`.

    Args:
        book: the rules.
        paths: all by which the layer is reached; its rotary embedding is at `rotary` under each.
        kinds: the layer's types.
        layer: with `config, backend, config_type`, and perhaps `rotary`.
        vain: as of `RuleBook.find`.

    Returns:
        Of `config` and `rotary` those that change.

    Raises:
        ConfigError: a config of another type or for another back end, or rules that contradict each other.
    """
    asked = [("config", paths, kinds, layer, vain)]
    if (rotary := getattr(layer, "rotary", None)) is not None:
        inside = tuple(f"{path}.rotary".strip(".") for path in paths)
        asked.append(("rotary", inside, (type(rotary),), rotary, None))
    pins = {}
    for name, where, types, owner, reason in asked:
        if (value := book.find(where, types, reason)) not in (None, True):
            pins[name] = None if value is False else check_type(where[0], owner.config_type, value)
    changed_pins(layer, pins)  # what is wrong with them is an error now, when nothing has changed yet
    return pins


def check_type(path: str, expected: type, config: Any) -> Any:
    """Refuses a config of another kind of layer."""
    if not isinstance(config, expected):
        raise ConfigError(f"the rule for {path!r} gives {config!r}; expected a {expected.__name__}")
    if reason := unread_by_all(config):
        raise ConfigError(f"the rule for {path!r} {reason}")
    return config


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer of a report: its path, its type, whether it is one of ours, and what it pins or why not."""

    path: str
    layer: str
    replaced: bool
    note: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of a layer: ours, with what it and its rotary embedding pin, or stock, and why."""

    ours: bool
    reason: str = ""
    config: Any = None
    rotary: Any = None
    reproducible: bool | None = None

    def pins(self) -> dict[str, Any]:
        """What changes of what the layer pins, as arguments of its `pin`."""
        given = {"config": self.config, "rotary": self.rotary, "reproducible": self.reproducible}
        return {name: value for name, value in given.items() if value is not None}


class Plan:
    """What a swap does with each layer that it meets.

    Args:
        rules: as of `swap`.
        config: as of `swap`.
        reproducible: as of `swap`.
        swaps: whether layers are replaced, or only what they pin.

    Raises:
        ConfigError: a value of another kind.
        TypeError: a `reproducible` that is no bool.
    """

    def __init__(self, rules: Rules | None, config: Any, reproducible: bool | None = None, *, swaps: bool = True):
        if reproducible is not None:
            check_reproducible(reproducible)
        self.reproducible = reproducible
        self.book, self.defaults = RuleBook(rules, pins=not swaps), _defaults(config)
        self.taken: set[type] = set()  # types of config that some layer takes

    def decide(self, paths: tuple[str, ...], module: Any, ours: type, vain: str | None = None) -> Decision:
        """What becomes of a module, stock or already of the type `ours`; other arguments as of `RuleBook.find`."""
        reason = None if type(module) is ours else ours.why_not(module)
        value = self.book.find(paths, (type(module), ours), vain or reason)
        if value is False:
            return Decision(False, "a rule says so")
        if reason is not None:
            return Decision(False, reason)
        self.taken.add(ours.config_type)
        if value in (None, True):
            config = None if vain else self.defaults.get(ours.config_type)
        else:
            config = check_type(paths[0], ours.config_type, value)
        if type(module) is ours and config is not None:
            changed_pins(module, {"config": config})  # such as one for another back end than the module's is refused
        reproducible = self.reproducible if ours.config_type is AttentionConfig else None
        return Decision(True, config=config, reproducible=reproducible)

    def refuse_unused(self) -> None:
        """Raises if a rule matched nothing, or no layer takes what all are to pin."""
        self.book.refuse_unused()
        for kind in self.defaults.keys() - self.taken:
            raise ConfigError(f"config has a {kind.__name__}, which no layer takes that can be replaced; leave it out")
        if self.reproducible is not None and AttentionConfig not in self.taken:
            raise ConfigError(
                f"reproducible is {self.reproducible}, which only layers of attention take, and none can be replaced; "
                "leave it out"
            )


def _defaults(config: Any) -> dict[type, Any]:
    """The `config` argument by type."""
    given = list(config) if isinstance(config, (list, tuple)) else [] if config is None else [config]
    for one in given:
        if not isinstance(one, CONFIGS):
            raise ConfigError(f"config has {one!r}; expected one of {', '.join(c.__name__ for c in CONFIGS)}")
        if reason := unread_by_all(one):  # now, while the model is as it was
            raise ConfigError(f"config {reason}")
    return {type(one): one for one in given}
