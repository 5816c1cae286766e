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


def log_tuning(event: str, **data: Any) -> None:
    """Prints what became of each call, as a selector's `on_event` tells of it."""
    if event == "op_skipped":
        console.print(f"  [yellow]not tuned[/] {data['op_id_v']}: {data['reason']}")
    elif event == "op_done":
        entry = data["entry"]
        found = f"from {entry.source}" if entry.ms is None else f"{entry.ms:.3f} ms, {entry.gain:.2f}x the heuristic"
        fields = " ".join(f"{n.split('.')[-1]}={v}" for n, v in leaf_fields(entry.cfg) if v is not None)
        name = f"{data['op_id_v']} {entry.shapes.removesuffix(' ...')}"
        console.print(f"  {name}: {found} ({fields})", soft_wrap=True)
