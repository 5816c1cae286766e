"""What the terminal shows while tuning and training."""

from __future__ import annotations

import resource
import sys
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ejkernel_ops.config.schema import leaf_fields

console = Console(highlight=False)


def memory_mib() -> float:
    """Peak memory of the first device, or of the process where the device does not tell, in MiB."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def bar() -> Progress:
    """A bar with text, count, time gone and time left."""
    columns = [BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    return Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)


class TuningProgress:
    """Shows the candidates of each call as a selector's `on_event` tells of them."""

    def __init__(self, progress: Progress):
        self.progress, self.task, self.best, self.op, self.name = progress, None, None, "", ""

    def __call__(self, event: str, **data: Any) -> None:
        """Receives one event."""
        if event == "tuning_start":
            self.task = self.progress.add_task("tuning", total=data["total"])
        elif event == "op_start":
            self.op, self.best = data["op_id_v"], None
            self.name = f"{self.op} {data['shapes'].removesuffix(' ...')}"
            self._show("")
        elif event == "trial":
            ms = data["trial"].ms
            self.best = ms if self.best is None else min(self.best, ms if ms is not None else self.best)
            best = "" if self.best is None else f", best {self.best:.2f} ms"
            self._show(f"{data['done']}/{data['total']}{best}")
        elif event == "op_done":
            entry = data["entry"]
            self.progress.advance(self.task)
            if entry.ms is None:
                self._log(entry, f"from {entry.source}")
            else:
                self._log(entry, f"best {entry.ms:.3f} ms, {entry.gain:.2f}x the heuristic")
        elif event == "op_skipped":
            self.progress.advance(self.task)
            console.print(f"  [yellow]not tuned[/] {data['op_id_v']}: {data['reason']}")
        elif event == "whole_step":
            self.op = "whole step"
            self._show("is timed")
        elif event == "busy":
            console.print(f"  [yellow]the machine is busy[/]: times of the step spread by {data['spread']:.0%}")

    def _show(self, text: str) -> None:
        self.progress.update(self.task, description=f"{self.op} {text}")

    def _log(self, entry: Any, text: str) -> None:
        fields = " ".join(f"{n.split('.')[-1]}={v}" for n, v in leaf_fields(entry.cfg) if v is not None)
        console.print(f"  {self.name}: {text} ({fields})", soft_wrap=True)
