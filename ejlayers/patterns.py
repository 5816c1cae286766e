"""Dotted path patterns: `*` is a name or a part of one, `**` any number of names."""

from __future__ import annotations

import fnmatch
import itertools


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
