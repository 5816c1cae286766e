"""Pictures of a run: the loss curve and what tuning found."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from ejkernel_ops import AutotuningResult

_BLUE, _GREY, _ORANGE = "#2a6f97", "#9aa5b1", "#e07a2f"


def loss_curve(file: Path, rows: list[dict], baseline: str) -> None:
    """Training loss by step, held-out loss where it was measured, that of the model it is compared with beside it."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [row["step"] for row in rows]
    if rows[0]["baseline_loss"] != "":
        losses = [row["baseline_loss"] for row in rows]
        axes.plot(steps, losses, color=_ORANGE, linewidth=3, alpha=0.5, label=f"{baseline} model, training")
    axes.plot(steps, [row["loss"] for row in rows], color=_GREY, linewidth=1, label="training")
    held_out = [(row["step"], row["held_out"]) for row in rows if row["held_out"] != ""]
    axes.plot(*zip(*held_out), color=_BLUE, marker="o", label=f"held out (last {held_out[-1][1]:.3f})")
    low, high = min(row["loss"] for row in rows), sorted(row["loss"] for row in rows)[int(len(rows) * 0.98)]
    axes.set(xlabel="step", ylabel="nats per byte", title="loss", ylim=(0.95 * low, 1.05 * high))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def tuning_chart(file: Path, result: AutotuningResult) -> None:
    """Time of each call with its heuristic config and with the chosen one."""
    entries = [e for e in result.entries if e.heuristic_ms and e.ms]
    entries.sort(key=lambda e: e.heuristic_ms * e.executions)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.5 * max(len(entries), 1)), layout="constrained")
    names = [f"{e.op_id_v}, {e.executions} a step\n{e.shapes.removesuffix(' ...')}" for e in entries]
    places = range(len(entries))
    axes.barh([p + 0.2 for p in places], [e.heuristic_ms for e in entries], 0.38, color=_GREY, label="heuristic")
    axes.barh([p - 0.2 for p in places], [e.ms for e in entries], 0.38, color=_BLUE, label="chosen")
    for place, e in zip(places, entries):
        axes.text(e.ms, place - 0.2, f" {e.gain:.2f}x", va="center", fontsize=8)
    axes.set_yticks(list(places), names, fontsize=7)
    step = "" if result.step_ms is None else ", whole step {:.1f} to {:.1f} ms".format(*result.step_ms)
    axes.set(xlabel="milliseconds a call", title=f"kernels of the step on {result.device}{step}")
    axes.margins(x=0.12)
    if entries:
        axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    plt.close(figure)
