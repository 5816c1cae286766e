"""Bound modules seen as another class, or with other fields; and methods that can be called on them."""

from __future__ import annotations

from typing import Any


def twin(module: Any, kind: type | None = None, **fields: Any) -> Any:
    """A bound module under another class or with other fields: same scope, same variables, same children.

    It lives as long as one call does.
    """
    seen = object.__new__(kind or type(module))
    seen.__dict__.update(vars(module) | fields | {"_is_twin": True})
    return seen


def is_twin(module: Any) -> bool:
    """Whether a module came out of `twin`, in the midst of a call that was seen before."""
    return "_is_twin" in vars(module)


def undecorated(cls: type, method: str) -> Any:
    """A method without what Flax does around it: for calls in the midst of one, which Flax must record once."""
    found = getattr(cls, method)
    return getattr(found, "__wrapped__", found)
