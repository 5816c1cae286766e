"""What happened to a cache, counted; and the first problem of each kind told."""

from __future__ import annotations

import errno
import threading
import warnings
from collections import Counter

from .entry import OtherSchemaError


class Problems:
    """Counts what a cache does, from any thread, and warns once of each action that fails."""

    def __init__(self) -> None:
        self.stats: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def count(self, *names: str) -> int:
        """Counts one more of each, and tells how often the first one happened."""
        with self._lock:  # threads would lose counts
            self.stats.update(names)
            return self.stats[names[0]]

    def failed(self, action: str, where: object, error: Exception) -> None:
        """Counts a failure by its reason, and warns if it is the first of this action."""
        self.count(f"{action} failed: {_reason(error)}")
        with self._lock:
            first = action not in self._warned
            self._warned.add(action)
        if first:
            warnings.warn(
                f"config cache: could not {action} {where}: {error} (nothing breaks; later ones are only counted, in "
                "the `stats` of the cache)",
                stacklevel=4,
            )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    return "other schema" if isinstance(error, OtherSchemaError) else "corrupt"
