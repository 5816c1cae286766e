"""Labels put on values in a program: on a kernel's outputs, and on those of a function under `@label(...)`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray, Tracer
from jax.experimental.xla_metadata import set_xla_metadata

from ..errors import ConfigError, LabelError
from .fingerprint import abstractify
from .values import short_hash, stable_json

F = TypeVar("F", bound=Callable)
LABEL_ONLY = "label only"  # what such a call has in place of a config
_carriers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # tracers that have a label, by id


def marked(outs: Sequence[Any], operands: Sequence[Any], text: str, **marks: str) -> list[Any]:
    """Outputs with a label on each, and the call itself on the first.

    A context would mark every op inside of it, and calls could not be counted. An output that is an operand, or that
    has a label already, has no op of its own that a label could be on, so it gets one.
    """

    def own(out):
        taken = any(out is x for x in operands) or _carriers.get(id(out)) is out
        return jax.lax.optimization_barrier(out) if taken else out

    outs = [set_xla_metadata(own(out), ejkernel_ops=text) for out in outs]
    if outs:
        outs[0] = set_xla_metadata(outs[0], ejkernel_call=text, **marks)
    _carriers.update((id(out), out) for out in outs)
    return outs


def scope_name(text: str) -> str:
    """A label as the name of a scope: XLA cuts those at `@`.

    Attributes are lost where XLA rewrites an op; scopes are on every op of a call, so that a compiled program still
    shows them.
    """
    return text.replace("@", "~").replace(":", "~")


def labelled(make_label: Callable[[str], str], **marks: str) -> Callable[[F], F]:
    """A decorator that labels the calls of a function in programs.

    Args:
        make_label: the label for 16 hex digits.
        **marks: attributes beside the label; default that there is nothing else.

    Raises:
        LabelError: a generator or coroutine, whose call does not yet compute anything.
    """

    def decorate(fn: F) -> F:
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise LabelError(f"{fn.__qualname__} is a generator or coroutine; expected a function that returns arrays")

        @functools.wraps(fn)
        def run(*args, **kwargs):
            text = make_label(_digits(args, kwargs))
            with jax.named_scope(scope_name(text)):
                out = fn(*args, **kwargs)
            traced: list[Any] = []
            _mapped(out, lambda x: traced.append(x) or x)
            if not traced:
                return out  # outside a trace there is no program
            outs = iter(marked(traced, _leaves((args, kwargs)), text, **{"ejkernel_cfg": LABEL_ONLY, **marks}))
            return _mapped(out, lambda x: next(outs))

        return run  # type: ignore[return-value]

    return decorate


def _mapped(out: Any, fn: Callable[[Any], Any]) -> Any:
    """An output with `fn` of each traced array in tuples, lists, dicts and frozen dataclasses.

    Other objects may be changed later by who holds them, so they are not made again; nor is what holds no such array.
    """
    if isinstance(out, Tracer):
        return fn(out) if isinstance(jax.typeof(out), ShapedArray) else out
    if type(out) is dict:
        parts = {key: _mapped(value, fn) for key, value in out.items()}
        return out if all(parts[key] is out[key] for key in out) else parts
    if type(out) in (tuple, list) or (isinstance(out, tuple) and hasattr(out, "_fields")):
        items = [_mapped(value, fn) for value in out]
        if all(a is b for a, b in zip(items, out)):
            return out
        return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)
    if dataclasses.is_dataclass(out) and not isinstance(out, type) and out.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        leaves, tree = jax.tree.flatten(out)
        found = [_mapped(leaf, fn) for leaf in leaves]
        return out if all(a is b for a, b in zip(found, leaves)) else jax.tree.unflatten(tree, found)
    return out


def _leaves(tree: Any) -> list[Any]:
    try:
        return jax.tree.leaves(tree)
    except (TypeError, ValueError):  # such as a dict whose keys cannot be sorted
        return []


def _digits(args: tuple, kwargs: dict) -> str:
    """16 hex digits of the shapes, dtypes and, where they have a value-based form, static values of arguments."""
    forms = []
    for name, value in [*enumerate(args), *kwargs.items()]:
        try:
            leaves = jax.tree_util.tree_leaves_with_path(abstractify(value))
        except (TypeError, ValueError):
            leaves = [((), type(value).__qualname__)]
        for path, leaf in leaves:
            try:
                form = stable_json(leaf)
            except ConfigError:
                form = type(leaf).__qualname__
            forms.append([str(name) + jax.tree_util.keystr(path), form])
    return short_hash(stable_json(forms))
