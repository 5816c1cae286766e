"""Calls of layers inside of swapped models: intercepted while the model runs, and run as the changes say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
from flax import linen as nn

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
        root: path of the model.
        plans: what the rules of each change matched so far.
        rows: of a report, by path.
    """

    changes: tuple[Change, ...]
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


# A number of its own while every layer has to be met, whatever was traced before; else 0.
_meeting = jax.make_user_context(0)


@contextlib.contextmanager
def meeting_all() -> Iterator[None]:
    """Context in which no earlier trace is taken, and a whole call refuses rules that match none of its layers."""
    with _meeting(next(_numbers)):
        yield


@contextlib.contextmanager
def calling(changes: tuple[Change, ...], root: tuple[str, ...] = (), *, whole: bool = False) -> Iterator[Call]:
    """Context in which a model with these changes runs, as a whole or a part of it; inside of itself it does nothing.

    Raises:
        ConfigError: in a whole call, a rule that matches nothing, where all layers have to be met.
    """
    calls: tuple[Call, ...] = _calls.value
    for call in calls:
        if (call.changes, call.root) == (changes, root):
            yield call
            return
    call = Call(changes, root, tuple(change.plan() for change in changes))
    with contextlib.nullcontext() if calls else nn.intercept_methods(_intercept), _calls((*calls, call)):
        yield call
    if whole and _meeting.value:
        call.refuse_unused()


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


def original_type(module: Any) -> type:
    """The class that a module had before it was swapped."""
    return getattr(type(module), "_original", type(module))


def visited(changes: tuple[Change, ...], run: Any, *, whole: bool) -> list[Row]:
    """The layers that a call of a model with these changes visits.

    Raises:
        ConfigError: a rule that matches nothing, where the call is of the whole model.
    """
    with meeting_all(), calling(changes, whole=whole) as call:
        run()
    return list(call.rows.values())
