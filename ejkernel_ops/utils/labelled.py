"""Labels put on values in a program: on a kernel's outputs, and on those of a function under `@label(...)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata

from ..errors import ConfigError
from .fingerprint import abstractify
from .values import short_hash, stable_json

F = TypeVar("F", bound=Callable)
LABEL_ONLY = "label only"  # what such a call has in place of a config


def marked(outs: Sequence[Any], operands: Sequence[Any], text: str, **marks: str) -> list[Any]:
    """Outputs with a label on each, and the call itself on the first.

    A context would mark every op inside of it, and calls could not be counted. An output that is an operand has no op
    of its own that a label could be on, so it gets one.
    """
    outs = [jax.lax.optimization_barrier(out) if any(out is x for x in operands) else out for out in outs]
    outs = [set_xla_metadata(out, ejkernel_ops=text) for out in outs]
    if outs:
        outs[0] = set_xla_metadata(outs[0], ejkernel_call=text, **marks)
    return outs


def scope_name(text: str) -> str:
    """A label as the name of a scope: XLA cuts those at `@`.

    Attributes are lost where XLA rewrites an op; scopes are on every op of a call, so that a compiled program still
    shows them.
    """
    return text.replace("@", "~").replace(":", "~")


def labelled(make_label: Callable[[str], str]) -> Callable[[F], F]:
    """A decorator that labels the calls of a function in programs.

    Args:
        make_label: the label for 16 hex digits.
    """

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def run(*args, **kwargs):
            text = make_label(_digits((args, kwargs)))
            with jax.named_scope(scope_name(text)):
                out = fn(*args, **kwargs)
            leaves, tree = jax.tree.flatten(out)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]  # outside a trace: no program
            outs = marked([leaves[i] for i in places], jax.tree.leaves((args, kwargs)), text, ejkernel_cfg=LABEL_ONLY)
            for place, leaf in zip(places, outs):
                leaves[place] = leaf
            return jax.tree.unflatten(tree, leaves)

        return run  # type: ignore[return-value]

    return decorate


def _digits(arguments: Any) -> str:
    """16 hex digits of the shapes, dtypes and, where they have a value-based form, static values of arguments."""
    forms = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstractify(arguments)):
        try:
            form = stable_json(leaf)
        except ConfigError:
            form = type(leaf).__qualname__
        forms.append([jax.tree_util.keystr(path), form])
    return short_hash(stable_json(forms))
