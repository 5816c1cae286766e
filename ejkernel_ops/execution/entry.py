"""`Entry`: the config of one call, and how it was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..config.neighbours import Place
from ..errors import ConfigError
from .trial import Trial


@dataclasses.dataclass(frozen=True)
class Entry:
    """The config of one call, and how it was found.

    Args:
        op_id_v: name and version of the kernel.
        call_key: 16 hex digits of the call.
        cfg: the config.
        count: how often the tuned program makes this call.
        executions: the same times the lengths of the loops around it.
        shapes: the operands, for people.
        heuristic: the config without tuning.
        heuristic_ms: its time, in milliseconds.
        ms: the time of `cfg`, by the same rounds: `heuristic_ms` less the gain that decided.
        source: `"tuned"`, the cache that it came from, or `"heuristic"` where every other config failed
            or did not pay in the whole step.
        trials: all that was tried.
        place: where the call lies among those of its kernel, for untuned shapes near it.

    Raises:
        ConfigError: no config.

    Example:
        >>> Entry("matmul@v1", "0123456789abcdef", 32, heuristic_ms=3.0, ms=2.0).gain
        1.5
    """

    op_id_v: str
    call_key: str
    cfg: Any
    _: dataclasses.KW_ONLY
    count: int = 1
    executions: int = 1
    shapes: str = ""
    heuristic: Any = None
    heuristic_ms: float | None = None
    ms: float | None = None
    source: str = "tuned"
    trials: tuple[Trial, ...] = ()
    place: Place | None = None

    def __post_init__(self):
        if self.cfg is None:
            raise ConfigError(f"cfg of {self.op_id_v}:{self.call_key} is None; expected a config")

    @property
    def gain(self) -> float | None:
        """How many times as fast as the heuristic."""
        return self.heuristic_ms / self.ms if self.heuristic_ms and self.ms else None


def conflict(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """The places of two entries with different configs for one call; `None` where there are none."""
    found: dict[tuple[str, str], int] = {}
    for index, entry in enumerate(entries):
        first = found.setdefault((entry.op_id_v, entry.call_key), index)
        if entries[first].cfg != entry.cfg:
            return first, index
    return None
