"""Rules, and what they say about the layers of a model: which are replaced, and what each pins."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
from collections.abc import Mapping
from typing import Any

from ejkernel_ops import ConfigError

from .functional import CONFIGS

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
        for pattern, value in self.rules.items():
            if not isinstance(pattern, (str, type)):
                raise ConfigError(
                    f"rules has the key {pattern!r}; expected a path pattern, such as 'layers.3', or a type"
                )
            if not isinstance(value, (bool, *CONFIGS)):
                expected = ", ".join(c.__name__ for c in CONFIGS)
                raise ConfigError(f"rule {pattern!r} is {value!r}; expected True, False or one of {expected}")

    def find(self, path: str, kinds: tuple[type, ...]) -> Any:
        """What the rules say of a module: a config, `True`, `False`, or `None` where none matches."""
        self.paths.append(path)
        found = [p for p in self.rules if (_is_any(kinds, p) if isinstance(p, type) else matches(p, path))]
        self.used.update(found[:1])
        self.taken.update({pattern: found[0] for pattern in found[1:]})
        return self.rules[found[0]] if found else None

    def refuse_unused(self) -> None:
        """Raises if a rule matched nothing."""
        unused = [p for p in self.rules if p not in self.used]
        if not unused:
            return
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


def _is_any(kinds: tuple[type, ...], wanted: type) -> bool:
    """Whether any of the types is, or derives from, the wanted one."""
    return any(issubclass(kind, wanted) for kind in kinds)


def matches(pattern: str, path: str) -> bool:
    """Whether a dotted pattern matches a dotted path.

    Example:
        >>> matches("layers.*.attn", "layers.3.attn"), matches("**.attn", "attn"), matches("*", "a.b")
        (True, True, False)
        >>> matches("layers_*.attn", "layers_3.attn")
        True
    """
    return _match(pattern.split("."), path.split("."))


def reaches(pattern: str, path: str) -> bool:
    """Whether a dotted pattern can match a dotted path or something below it.

    Example:
        >>> reaches("gen.*.attn", "gen"), reaches("**.attn", "gen"), reaches("critic.attn", "gen")
        (True, True, False)
    """
    for part, name in itertools.zip_longest(pattern.split("."), path.split(".") if path else []):
        if part == "**" or name is None:
            return True
        if part is None or not fnmatch.fnmatchcase(name, part):
            return False
    return True


def _match(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _match(pattern[1:], path[1:])


def check_type(path: str, expected: type, config: Any) -> Any:
    """Refuses a config of another kind of layer."""
    if not isinstance(config, expected):
        raise ConfigError(f"the rule for {path!r} gives {config!r}; expected a {expected.__name__}")
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
    """What becomes of a layer: ours, with what it pins, or stock, and why."""

    ours: bool
    reason: str = ""
    config: Any = None


class Plan:
    """What a swap does with each layer that it meets.

    Args:
        rules: as of `swap`.
        config: as of `swap`.
        swaps: whether layers are replaced, or only what they pin.

    Raises:
        ConfigError: a value of another kind.
    """

    def __init__(self, rules: Rules | None, config: Any, *, swaps: bool = True):
        self.book, self.defaults = RuleBook(rules, pins=not swaps), _defaults(config)
        self.taken: set[type] = set()  # types of config that some layer takes

    def decide(self, path: str, module: Any, ours: type) -> Decision:
        """What becomes of a module, stock or already of the type `ours`."""
        self.taken.add(ours.config_type)
        value = self.book.find(path, (type(module), ours))
        if value is False:
            return Decision(False, "a rule says so")
        if type(module) is not ours and (reason := ours.why_not(module)):
            return Decision(False, reason)
        if value not in (None, True):
            return Decision(True, config=check_type(path, ours.config_type, value))
        return Decision(True, config=self.defaults.get(ours.config_type))

    def refuse_unused(self) -> None:
        """Raises if a rule matched nothing, or no layer takes a config."""
        self.book.refuse_unused()
        for kind in self.defaults.keys() - self.taken:
            raise ConfigError(f"config has a {kind.__name__}, which no layer takes that can be replaced; leave it out")


def _defaults(config: Any) -> dict[type, Any]:
    """The `config` argument by type."""
    given = list(config) if isinstance(config, (list, tuple)) else [] if config is None else [config]
    for one in given:
        if not isinstance(one, CONFIGS):
            raise ConfigError(f"config has {one!r}; expected one of {', '.join(c.__name__ for c in CONFIGS)}")
    return {type(one): one for one in given}
