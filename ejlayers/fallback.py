"""Says which attention runs as the framework's own."""

from __future__ import annotations

import logging

_log = logging.getLogger("ejlayers")
_told: set[str] = set()


def tell_fallback(what: str) -> None:
    """Says once in a process that attention of a kind has no kernel."""
    if what not in _told:
        _told.add(what)
        _log.warning("attention with %s runs as Flax's own, not as a kernel", what)
