"""The one thing a choice depends on besides the call: a snapshot that is part of every jit key."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax

from ..errors import ConfigError
from ..utils.values import stable_json

_EMPTY: Mapping = MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class Overlay:
    """Configs that win over every cache, and what they say of calls nearby.

    Args:
        configs: key to config.
        places: key to `(place, heuristic config)`, of those keys whose place is known.
    """

    configs: Mapping[Any, Any] = dataclasses.field(default_factory=lambda: _EMPTY)
    places: Mapping[Any, Any] = dataclasses.field(default_factory=lambda: _EMPTY)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the content, equal in every process."""
        places = stable_json(self.places, where="places") if self.places else ""
        return hashlib.sha256((stable_json(self.configs, where="overlay") + places).encode()).hexdigest()

    def under(self, other: Overlay) -> Overlay:
        """Both; the other wins."""
        return Overlay(
            MappingProxyType({**self.configs, **other.configs}), MappingProxyType({**self.places, **other.places})
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Overlays, policies, selector and module path of the moment: hashed and compared by content in O(1).

    Args:
        overlay: the merged overlays; inner ones have won.
        policies: `((selector uid or None for all, field, value), ...)`, later ones win.
        selector: the chooser of an explicit executor; `None` is the default one.
        path: dotted path of the module that calls, while `explain` asks for it.
    """

    overlay: Overlay = dataclasses.field(default_factory=Overlay)
    policies: tuple = ()
    selector: Any = None
    path: str | None = None

    @functools.cached_property
    def digest(self) -> str:
        """Text that is equal exactly where the content is."""
        uid = None if self.selector is None else uid_of(self.selector)
        return stable_json([self.overlay.digest, self.policies, uid, self.path])

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self is other or (isinstance(other, Snapshot) and self.digest == other.digest)


def uid_of(chooser: Any) -> int:
    """A number that no other chooser of this process has, or had."""
    if not hasattr(chooser, "uid"):
        chooser.uid = next_uid()
    return chooser.uid


_uid_lock, _last_uid = threading.Lock(), [0]


def next_uid() -> int:
    """A number that was not given before in this process."""
    with _uid_lock:
        _last_uid[0] += 1
        return _last_uid[0]


# One context, made at import: its value is in the key of every jitted function, and pickling keys is not needed.
_context = jax.make_user_context(Snapshot())


def current() -> Snapshot:
    """The snapshot of this thread."""
    return _context.value


@contextlib.contextmanager
def entered(change: Callable[[Snapshot], Snapshot]) -> Iterator[None]:
    """Context in which the snapshot is `change(snapshot)`."""
    with _context(change(_context.value)):
        yield


_merged: dict[tuple[str, str], Overlay] = {}  # digests of two overlays -> the merged one
_selected: dict[tuple[Snapshot, int], Snapshot] = {}


def with_overlay(snapshot: Snapshot, overlay: Overlay) -> Snapshot:
    """The snapshot with an overlay on top; the same snapshot where that changes nothing."""
    below = snapshot.overlay
    if not overlay.configs or overlay.digest == below.digest:
        return snapshot
    if not below.configs:
        return dataclasses.replace(snapshot, overlay=overlay)
    pair = (below.digest, overlay.digest)
    found = _merged.get(pair)  # hashing hundreds of configs costs milliseconds, and nesting repeats in a loop
    return dataclasses.replace(snapshot, overlay=found or _remember(_merged, pair, below.under(overlay)))


def with_selector(snapshot: Snapshot, selector: Any) -> Snapshot:
    """The snapshot with the selector of an explicit executor."""
    pair = (snapshot, uid_of(selector))
    found = _selected.get(pair)
    return _remember(_selected, pair, dataclasses.replace(snapshot, selector=selector)) if found is None else found


def _remember(table: dict, key: Any, value: Any) -> Any:
    """Puts a value into a small table, which starts anew when it is full."""
    if len(table) >= 256:
        table.clear()
    table[key] = value
    return value


class Reentrant:
    """A context manager that may be entered again while it is open, and in several threads.

    What was opened is kept in a stack of the thread, not in the object.
    """

    _stack = threading.local()  # its `open`: [object, its context, whether it is left but what is above it is not]

    def _open(self) -> contextlib.AbstractContextManager:
        raise NotImplementedError

    def __enter__(self):
        context = self._open()
        context.__enter__()
        self._stack.__dict__.setdefault("open", []).append([self, context, False])
        return self

    def __exit__(self, *exc):
        stack = self._stack.__dict__.get("open", [])
        if not stack or stack[-1][0] is not self:
            for item in reversed(stack):  # it ends with what is above it, so that nothing of it stays behind
                if item[0] is self and not item[2]:
                    item[2] = True
                    break
            raise ConfigError(
                f"{type(self).__name__} was left in another order than it was entered: do not `await` or "
                "`yield` inside the `with`; use result.wrap(fn) instead"
            )
        stack.pop()[1].__exit__(*exc)
        while stack and stack[-1][2]:
            stack.pop()[1].__exit__(None, None, None)
