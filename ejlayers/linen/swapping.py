"""Linen models whose layers are exchanged while they run.

A Linen module is a description: its layers come to be in `setup`, or in the midst of a call. So a swapped model is of a
subclass that carries the changes, and while a method of it runs, calls of layers inside of it are intercepted. The
class is static, so this holds under `jit` too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
from flax import linen as nn

from ejkernel_ops import ConfigError

from ..pins import note_of_ours
from ..plan import Decision, Plan, Row
from .changes import Change, as_decided, ours_for, undecided
from .layers import METHODS, REPLACEMENTS, STOCK
from .twins import is_twin, undecorated

_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a swapped model that goes on; equal to another one where the same program comes out.

    Args:
        changes: those of the model.
        number: of its own, where each layer has to be seen; 0 where a trace may be taken again.
        root: path of the model.
        plans: what the rules of each change matched so far.
        rows: of a report, by path.
    """

    changes: tuple[Change, ...]
    number: int = 0
    root: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    plans: tuple[Plan, ...] = dataclasses.field(default=(), compare=False)
    rows: dict[str, Row] = dataclasses.field(default_factory=dict, compare=False)

    def refuse_unused(self) -> None:
        """Raises if a rule matched nothing, or no layer takes a config."""
        for plan in self.plans:
            plan.refuse_unused()


# The calls that go on, outermost first. In a context of JAX, for a stock and a swapped model must not share a trace of
# a class under `nn.jit` that both have.
_calls = jax.make_user_context(())


@contextlib.contextmanager
def calling(changes: tuple[Change, ...], root: tuple[str, ...] = (), number: int = 0) -> Iterator[Call]:
    """Context in which a model with these changes runs; inside of itself it does nothing."""
    calls: tuple[Call, ...] = _calls.value
    for call in calls:
        if (call.changes, call.root) == (changes, root):
            yield call
            return
    call = Call(changes, number, root, tuple(change.plan() for change in changes))
    with contextlib.nullcontext() if calls else nn.intercept_methods(_intercept), _calls((*calls, call)):
        yield call


def _intercept(run: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
    """Runs a method of a layer as the changes say."""
    module, method = context.module, context.method_name
    if method not in METHODS or is_twin(module):
        return run(*args, **kwargs)
    kind = original_type(module)
    ours = ours_for(kind)
    if ours is None:
        if isinstance(module, tuple(REPLACEMENTS)):
            _record(module, Decision(False, "a subclass: swap its parent by hand if they compute the same"))
        return run(*args, **kwargs)
    decision = _decide(module, kind, ours)
    _record(module, decision, ours)
    if not decision.ours and not isinstance(module, ours):
        return run(*args, **kwargs)
    target = ours if decision.ours else STOCK[ours]
    seen = as_decided(module, target, decision)
    return _under_later_ones(functools.partial(undecorated(target, method), seen), context)(*args, **kwargs)


def _under_later_ones(run: Any, context: nn.module.InterceptorContext) -> Any:
    """A method under the interceptors that were entered after ours, such as one that a method of the model enters.

    Flax has them in what ours is given to run, around the stock layer's method, which does not run.
    """
    stack = nn.module._global_interceptor_stack  # newest first
    for interceptor in itertools.takewhile(lambda interceptor: interceptor is not _intercept, stack):
        run = functools.partial(_intercepted, interceptor, run, context)
    return run


def _intercepted(interceptor: Any, run: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
    return interceptor(run, args, kwargs, context)


def _decide(module: Any, kind: type, ours: type) -> Decision:
    """What becomes of a layer; the model that is nearest to it was changed first."""
    decision = undecided(module, kind, ours)
    for call in reversed(_calls.value):
        if module.path[: len(call.root)] == call.root:
            path = ".".join(module.path[len(call.root) :])
            for change, plan in zip(call.changes, call.plans):
                decision = change.applied(plan, path, module, ours, decision)
    return decision


def _record(module: Any, decision: Decision, ours: Any = None) -> None:
    """Keeps what became of a layer for a report of the outermost model."""
    outermost: Call = _calls.value[0]
    path = ".".join(module.path[len(outermost.root) :])
    note = decision.reason
    if decision.ours:
        note = note_of_ours(as_decided(module, ours, decision), ours.when_not(module))
    outermost.rows[path] = Row(path, type(module).__name__, decision.ours, note)


class Swapped:
    """Mixed into the class of a model before all others."""

    _original: ClassVar[type]
    _changes: ClassVar[tuple[Change, ...]]
    _is_checked: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: the class of the model is a dataclass already, and so is this one."""

    def _call_wrapped_method(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a method with the changes; Flax calls each through this, of whichever class it was taken."""
        root = () if self.scope is None else self.path
        with calling(self._changes, root):
            return super()._call_wrapped_method(fun, args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        """That of Flax; a `method` that is no method of the model runs with the changes too."""
        with calling(self._changes):
            return super().apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def init_with_output(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """That of Flax, and of `init`; without a `method` all layers are visited, and each rule has to match one."""
        has_rules = any(change.rules or change.config for change in self._changes)
        checks = has_rules and method is None and not self._is_checked
        with calling(self._changes, number=next(_numbers) if checks else 0) as call:
            out = super().init_with_output(*args, method=method, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if checks:
            call.refuse_unused()
            type(self)._is_checked = True
        return out

    def __reduce__(self) -> tuple:
        """Copies and pickles by what it was made of: the class has no name under which it can be found."""
        return _remade, (_made(self, original_type(self)), type(self)._changes)


def original_type(module: Any) -> type:
    """The class that a module had before it was swapped."""
    return type(module)._original if isinstance(module, Swapped) else type(module)


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


def visited(model: Any, run: Any) -> list[Row]:
    """The layers of a model that a call of it visits.

    Raises:
        ConfigError: a rule that matches nothing.
    """
    with calling(changes_of(model), number=next(_numbers)) as call:
        run()
    call.refuse_unused()
    return list(call.rows.values())
