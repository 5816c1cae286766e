"""Rules: patterns of module paths, or types, and what they say about the modules that match."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ejkernel_ops import ConfigError

from .frameworks import adapters
from .functional import CONFIGS

Rules = Mapping[str | type, Any]


class RuleBook:
    """Rules in order; the first that matches a module wins.

    Args:
        rules: dotted path pattern (`layers.0.attn`; `*` is one name, `**` any number of them) or type ->
            a config, `True` or `False`.

    Raises:
        ConfigError: a value of another kind.
    """

    def __init__(self, rules: Rules | None):
        self.rules = dict(rules or {})
        self.used: set[str | type] = set()
        self.taken: dict[str | type, str | type] = {}  # rule -> one before it that takes its layers
        for pattern, value in self.rules.items():
            if not isinstance(value, (bool, *CONFIGS)):
                expected = ", ".join(c.__name__ for c in CONFIGS)
                raise ConfigError(f"rule {pattern!r} is {value!r}; expected True, False or one of {expected}")

    def find(self, path: str, kinds: tuple[type, ...]) -> Any:
        """What the rules say of a module: a config, `True`, `False`, or `None` where none matches."""
        found = [p for p in self.rules if (_is_any(kinds, p) if isinstance(p, type) else matches(p, path))]
        self.used.update(found[:1])
        self.taken.update({pattern: found[0] for pattern in found[1:]})
        return self.rules[found[0]] if found else None

    def refuse_unused(self, paths: list[str]) -> None:
        """Raises if a rule matched nothing."""
        unused = [p for p in self.rules if p not in self.used]
        if not unused:
            return
        if (first := self.taken.get(unused[0])) is not None:
            raise ConfigError(f"rule {unused[0]!r} has no effect: rule {first!r} before it takes all of its layers")
        near = difflib.get_close_matches(str(unused[0]), paths, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"paths: {', '.join(paths[:20]) or 'none'}"
        raise ConfigError(f"rule {unused[0]!r} matches no layer that can be replaced; {hint}")


def _is_any(kinds: tuple[type, ...], wanted: type) -> bool:
    """Whether any of the types is, or derives from, the wanted one."""
    return any(issubclass(kind, wanted) for kind in kinds)


def matches(pattern: str, path: str) -> bool:
    """Whether a dotted pattern matches a dotted path.

    Example:
        >>> matches("layers.*.attn", "layers.3.attn"), matches("**.attn", "attn"), matches("*", "a.b")
        (True, True, False)
    """
    return _match(pattern.split("."), path.split("."))


def _match(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and pattern[0] in ("*", path[0]) and _match(pattern[1:], path[1:])


def set_config(tree: Any, rules: Rules) -> Any:
    """Changes the configs that modules pin, anywhere in a pytree; jitted functions retrace once.

    Args:
        tree: a model, an optimizer, or any pytree of them.
        rules: path pattern or type -> config, or `None` or `False` to pin nothing.

    Returns:
        The same tree, changed in place.

    Raises:
        ConfigError: a rule that matches nothing, or a config for another kind of layer.

    Example:
        >>> from flax import nnx
        >>> from ejkernel_ops import FwdParams, LinearConfig
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> _ = set_config(model, {"**": LinearConfig(fwd=FwdParams(blocksize_m=64))})
        >>> model.config.fwd.blocksize_m
        64
    """
    book = RuleBook({p: False if v is None else v for p, v in rules.items()})
    changes, paths = [], []
    for adapter in adapters():
        for path, module in adapter.modules(tree):
            if not isinstance(module, adapter.LAYERS):
                continue
            paths.append(path)
            value = book.find(path, (type(module),))
            if value is None or value is True:
                continue
            changes.append((module, check_type(path, module.config_type, value) if value is not False else None))
    book.refuse_unused(paths)
    for module, config in changes:  # only after all rules are known to be good
        module.pin(config=config)
    return tree


def check_type(path: str, expected: type, config: Any) -> Any:
    """Refuses a config of another kind of layer."""
    if not isinstance(config, expected):
        raise ConfigError(f"the rule for {path!r} gives {config!r}; expected a {expected.__name__}")
    return config
