"""What tuning finds: a `Trial` of each config, and `Tuned`, the outcome for one call."""

from __future__ import annotations

import dataclasses
from typing import Any

STATUSES = (
    "timed",
    "illegal",
    "compile_failed",
    "out_of_shared_memory",
    "out_of_memory",
    "run_failed",
    "wrong",
    "timed_out",
    "crashed",
    "not_tried",
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One config that was tried.

    Args:
        cfg: the config.
        status: `"timed"`, or why it could not win: `"illegal"` (known before compiling), `"compile_failed"`,
            `"out_of_shared_memory"`, `"out_of_memory"`, `"run_failed"`, `"wrong"` (numbers, or operands changed),
            `"timed_out"` and `"crashed"` (of a child process), `"not_tried"` (no compiles or no time left).
        ms: median time in milliseconds, `None` unless timed.
        spread: half the distance of the quartiles, relative to the median.
        reason: what happened, in one line.

    Example:
        >>> Trial(32, "timed", 1.5).ms
        1.5
    """

    cfg: Any
    status: str
    ms: float | None = None
    spread: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning one call found.

    Args:
        cfg: the config to use.
        heuristic: the config without tuning.
        ms: time of `cfg` in milliseconds: `heuristic_ms` less the gain that decided.
        heuristic_ms: time of `heuristic`, measured in the same rounds.
        trials: all that was tried.
        notes: what else the reader should know, such as that the device was busy.
    """

    cfg: Any
    heuristic: Any
    ms: float
    heuristic_ms: float
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> bool:
        """Whether the heuristic won against something: where every other config failed, nothing was found out."""
        others = [trial for trial in self.trials if trial.cfg != self.heuristic]
        return not others or any(trial.status == "timed" for trial in others)
