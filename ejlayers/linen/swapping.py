"""Linen models whose layers are exchanged while they run.

A Linen module is a description: its layers come to be in `setup`, or in the midst of a call. So a swapped model is of a
subclass that carries the changes, and while a method of it runs, calls of layers inside of it are intercepted. The
class is static, so this holds under `jit` too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import linen as nn

from ejkernel_ops import ConfigError

from .calls import calling, meeting_all, original_type
from .changes import Change
from .layers import REPLACEMENTS, STOCK


class Swapped:
    """Mixed into the class of a model before all others."""

    _original: ClassVar[type]
    _changes: ClassVar[tuple[Change, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: the class of the model is a dataclass already, and so is this one."""

    def _call_wrapped_method(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a method with the changes; Flax calls each through this, of whichever class it was taken."""
        root = () if self.scope is None else self.path
        with calling(self._changes, root, whole=getattr(fun, "__name__", None) == "__call__"):
            return super()._call_wrapped_method(fun, args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def apply(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """That of Flax; a `method` that is no method of the model runs with the changes too."""
        with calling(self._changes, whole=method is None):
            return super().apply(*args, method=method, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def init_with_output(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """That of Flax, and of `init`; without a `method` all layers are visited, and each rule has to match one."""
        is_whole = method is None and any(change.asks for change in self._changes)
        with meeting_all() if is_whole else contextlib.nullcontext(), calling(self._changes, whole=is_whole):
            return super().init_with_output(*args, method=method, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        """That of the model, and what its layers become and pin."""
        return f"{super().__repr__()} with {', '.join(map(str, self._changes))}"

    def __treescope_repr__(self: Any, path: str | None, subtree_renderer: Any) -> Any:
        """The fields of the model, and its changes."""
        from treescope.repr_lib import render_object_constructor  # by which this is called

        attributes = _fields(self, original_type(self)) | {"changes": self._changes}
        return render_object_constructor(type(self), attributes, path, subtree_renderer)

    def __reduce__(self) -> tuple:
        """Copies and pickles by what it was made of: the class has no name under which it can be found."""
        return _remade, (_made(self, original_type(self)), type(self)._changes)


def changes_of(model: Any) -> tuple[Change, ...]:
    """What a model carries, oldest first."""
    return type(model)._changes if isinstance(model, Swapped) else ()


def changed(model: Any, change: Change) -> Any:
    """A module like a model, with one change more.

    Raises:
        ConfigError: a module that runs.
    """
    if model.scope is not None:
        name = f"{type(model).__name__} {'.'.join(model.path)!r}"
        raise ConfigError(f"model is {name} of a model that runs; swap it outside of the call, or in setup")
    before = changes_of(model)
    return _remade(model, before if change in before[-1:] else (*before, change))


def original(model: Any) -> Any:
    """The model without changes; a layer of ours as the stock one."""
    kind = original_type(model)
    return _made(model, STOCK.get(kind, kind), _unswapped)


def _unswapped(value: Any) -> Any:
    """The value of a field, with the models in it that were swapped apart as they were before."""

    def one(x):
        if not isinstance(x, nn.Module):
            return x
        return original(x) if isinstance(x, Swapped) else _made(x, type(x), _unswapped)

    return jax.tree.map(one, value, is_leaf=lambda x: isinstance(x, nn.Module)) if _holds_swapped(value) else value


def _holds_swapped(value: Any) -> bool:
    """Whether there is a swapped model in the value of a field, or in the fields of a model in it."""
    found = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nn.Module))
    modules = [x for x in found if isinstance(x, nn.Module)]
    return any(isinstance(x, Swapped) or any(map(_holds_swapped, _fields(x, type(x)).values())) for x in modules)


def _remade(model: Any, changes: tuple[Change, ...]) -> Any:
    kind = original_type(model)
    base = REPLACEMENTS.get(kind, kind) if any(change.swaps for change in changes) else kind
    if base is not kind and base.why_not(model):
        base = kind
    return _made(model, _swapped_class(kind, base, changes))


_classes: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()


def _swapped_class(kind: type, base: type, changes: tuple[Change, ...]) -> type:
    """The one class of all models of a class that have the same changes: equal models stay equal."""
    key = (kind, base, changes)
    found = _classes.get(key)
    if found is None:
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        body = names | {"_original": kind, "_changes": changes}
        found = types.new_class(kind.__name__, (Swapped, base), exec_body=lambda namespace: namespace.update(body))
        _classes[key] = found
    return found


def _made(model: Any, kind: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """A module of another class with the fields of a model, changed or not."""
    return kind(**{name: change(value) for name, value in _fields(model, kind).items()}, parent=None)


def _fields(model: Any, kind: Any) -> dict[str, Any]:
    """What a model has of the fields of a class."""
    names = {field.name for field in dataclasses.fields(kind) if field.init} - {"parent"}
    return {name: getattr(model, name) for name in names if hasattr(model, name)}
