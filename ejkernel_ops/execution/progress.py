"""`Progress`: shows a tuning run on the terminal, as the selector's events tell of it."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections import Counter
from typing import Any

from .result_text import counts, failures

_ON_SCREEN = threading.Lock()  # there is one terminal: a run inside another, or in another thread, shows nothing more


class Progress:
    """Shows what a selector tunes inside the `with` on stderr; does nothing where that is no terminal.

    The selector's own `on_event` still gets every event, and gets it first. It is drawn when an event comes and
    at no other time, so that drawing does not disturb what is being timed.

    Args:
        selector: whose events are shown.
        shown: `False`: never show anything.
        console: the Rich console to draw on; default one for stderr.

    Example:
        >>> from ejkernel_ops import ConfigSelectorChain
        >>> selector = ConfigSelectorChain()
        >>> with Progress(selector):
        ...     selector.emit("tuning_start", total=0)
    """

    def __init__(self, selector: Any, *, shown: bool = True, console: Any = None):
        self.selector, self.shown, self.console = selector, shown, console
        self._told, self._live, self._theirs = _Told(), None, None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        terminal = self.console is not None or (sys.stderr is not None and sys.stderr.isatty())
        if self.shown and terminal and _ON_SCREEN.acquire(blocking=False):
            with contextlib.ExitStack() as stack:
                stack.callback(_ON_SCREEN.release)
                self._live = stack.enter_context(_live(self.console))
                stack.callback(self._leave)
                self._theirs, self.selector.on_event = self.selector.on_event, self
                self._open = stack.pop_all()
        return self

    def __exit__(self, *exc) -> None:
        self._open.close()

    def __call__(self, event: str, **data: Any) -> None:
        """Receives one event in place of the selector's own `on_event`."""
        if self._theirs is not None:
            self._theirs(event, **data)
        live = self._live  # another thread may leave meanwhile
        if live is not None and self._told.hear(event, data):
            if event == "busy":  # outlives the display, for it casts doubt on the result
                live.console.print(f"the machine is busy: times spread by {data['spread']:.0%}", style="yellow")
            with contextlib.suppress(OSError):  # a terminal that was closed
                live.update(self._told.view(), refresh=True)

    def _leave(self) -> None:
        self._live = None
        if self.selector.on_event is self:  # else someone has put another there meanwhile
            self.selector.on_event = self._theirs


def _live(console: Any) -> Any:
    """A display that goes when it is left; what is printed meanwhile comes above it."""
    from rich.console import Console
    from rich.live import Live

    terminal = sys.stdout is not None and sys.stdout.isatty()  # what goes to a file must stay there
    console = Console(stderr=True, highlight=False) if console is None else console
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=terminal)


class _Told:
    """What the events have told so far, and how it looks."""

    def __init__(self):
        self.total = self.finished = 0
        self.gain, self.gain_of = 0.0, ""
        self.took: list[float] = []  # seconds of each op that was tuned; those that a cache held take none
        self._begin("")

    def _begin(self, title: str) -> None:
        self.title, self.began = title, time.monotonic()
        self.done = self.candidates = 0
        self.failed: Counter[str] = Counter()
        self.best_ms: float | None = None

    def hear(self, event: str, data: dict[str, Any]) -> bool:
        """Takes one event; whether it is of tuning."""
        handler = getattr(self, f"_on_{event}", None)
        if handler is not None:
            handler(**data)
        return handler is not None

    def _on_tuning_start(self, total: int, **_) -> None:
        self.total, self.finished = total, 0

    def _on_op_start(self, op_id_v: str, shapes: str, index: int, **_) -> None:
        self.finished = index
        self._begin(f"{op_id_v} {shapes}")

    def _on_trial(self, trial: Any, done: int, total: int, **_) -> None:
        self.done, self.candidates = done, total
        self.failed += failures([trial])

    def _on_sampled(self, best_ms: float, **_) -> None:
        self.best_ms = best_ms

    def _on_op_done(self, op_id_v: str, entry: Any, index: int, **_) -> None:
        self._on_op_skipped(index)
        if (entry.gain or 0.0) > self.gain:
            self.gain, self.gain_of = entry.gain, op_id_v

    def _on_op_skipped(self, index: int, **_) -> None:
        self.finished = index + 1
        if self.done:
            self.took.append(time.monotonic() - self.began)
        self._begin("")

    def _on_whole_step(self, **_) -> None:
        self._begin("whole step, with heuristics and with the tuned configs")

    def _on_busy(self, **_) -> None:
        pass

    def seconds_left(self) -> float | None:
        """An estimate from the ops that are finished; `None` before there is one, and when all are."""
        if not self.took or self.finished >= self.total:
            return None
        each = statistics.fmean(self.took)
        return each * (self.total - self.finished - 1) + max(each - (time.monotonic() - self.began), 0.0)

    def ops(self) -> str:
        """The whole run in a line."""
        parts = [f"{self.finished} of {self.total} ops"]
        if (left := self.seconds_left()) is not None:
            parts.append(f"about {int(left) // 60}:{int(left) % 60:02d} left")
        if self.gain:
            parts.append(f"best gain {self.gain:.2f}x ({self.gain_of})")
        return ", ".join(parts)

    def op(self) -> str:
        """The candidates of the op at hand in a line."""
        if not self.candidates:
            return ""
        checked = self.done == self.candidates
        parts = [f"{self.done} candidates checked" if checked else f"candidate {self.done} of {self.candidates}"]
        if self.failed:
            parts.append(f"{self.failed.total()} failed ({counts(self.failed)})")
        if self.best_ms is not None:
            parts.append(f"best {self.best_ms:.3f} ms")
        return ", ".join([*parts, "timing"] if checked else parts)

    def view(self) -> Any:
        """What is drawn: a bar with the run's line, and below it two lines of the op."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        part = self.done / self.candidates if self.candidates else 0.0
        bar = ProgressBar(total=max(self.total, 1), completed=self.finished + part, width=16)
        lines = [Text(text, no_wrap=True, overflow="ellipsis") for text in (self.ops(), self.title, self.op()) if text]
        head = Table.grid(padding=(0, 1))
        head.add_row("tuning", bar, lines[0])
        return Group(head, *(Text("  ").append(line) for line in lines[1:]))
