"""A picture of what tuning sees: the time of one call over the block sizes that were tried.

    python benchmarks/tuning_chart.py docs/benchmarks/tuning_table.csv
    python benchmarks/tuning_chart.py tuned.json

The table is that of `tuning_table.py`, every config of a wide space, or a result that was saved, with the configs that
tuning tried. Of several configs with the same blocks the fastest counts. Needs matplotlib
(`pip install 'ejlayers[train]'`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from charts import ORANGE, command, figure, source
from rows import read_rows

import ejlayers

OPS = {"flash_attention": "fwd", "flash_attention_bwd": "bwd"}


@dataclasses.dataclass(frozen=True)
class Landscape:
    """Milliseconds of one call by the blocks of queries and of keys."""

    title: str
    ms: dict[tuple[int, int], float]
    about: str  # where it was measured


def of_table(path: Path) -> list[Landscape]:
    """The forward and the backward of the shape that takes longest."""
    rows = [row for row in read_rows(path) if row["ms"]]
    shape = ("batch", "length", "heads", "kv_heads", "head_dim", "causal")
    slowest = max((row for row in rows if row["op"] == "flash_attention"), key=lambda row: float(row["ms"]))
    found = []
    for op in OPS:
        mine = [row for row in rows if row["op"] == op and all(row[name] == slowest[name] for name in shape)]
        ms = {(int(row["q_blocksize"]), int(row["kv_blocksize"])): float(row["ms"]) for row in mine}
        found.append(Landscape(f"{op} on XLA, ms\n{_shape(slowest)}", ms, source(mine[0])))
    return found


def _shape(row: dict[str, str]) -> str:
    heads = f"{row['heads']} and {row['kv_heads']} heads of {row['head_dim']}"
    return f"{row['batch']} x {row['length']} tokens, {heads}{', causal' * (row['causal'] == 'True')}"


def of_result(path: Path) -> list[Landscape]:
    """The call of each direction of attention that takes longest."""
    result = ejlayers.AutotuningResult.load(path, allow_other_device=True, allow_unknown_ops=True)
    found = []
    for op, side in OPS.items():
        entries = [entry for entry in result.entries if entry.op_id_v.startswith(f"{op}@") and entry.ms]
        if entries:
            entry = max(entries, key=lambda entry: entry.ms or 0.0)
            backend, ms = entry.cfg.backend, {}
            for trial in entry.trials:
                params = getattr(trial.cfg, side)
                if trial.ms and trial.cfg.backend == backend and params and params.q_blocksize:
                    at = params.q_blocksize, params.kv_blocksize
                    ms[at] = min(trial.ms, ms.get(at, trial.ms))
            about = f"{result.device}, jax {result.versions.get('jax', '')}"
            found.append(Landscape(f"{op} on {backend}, ms\n{entry.shapes.removesuffix(' ...')}", ms, about))
    return found


def draw(table: Path, picture: Path) -> None:
    """A panel for each direction; colour is time over the best one's, on a log scale."""
    found = [each for each in (of_table if table.suffix == ".csv" else of_result)(table) if each.ms]
    if not found:
        raise SystemExit(f"{table} has no call of attention whose blocks were timed, so there is nothing to draw")
    with figure(picture, 5.2 * len(found) + 0.6, 4.6) as made:
        panels = made.subplots(1, len(found), squeeze=False)[0]
        for axes, landscape in zip(panels, found):
            image = _heat(axes, landscape)
        bar = made.colorbar(image, ax=panels, label="times the fastest one's time", ticks=[1, 2, 4, 8], format="%d")
        bar.minorticks_off()
        made.suptitle(f"time over block sizes: {found[0].about}", fontsize=11)


def _heat(axes: Any, landscape: Landscape) -> Any:
    """A field for each pair of blocks with its milliseconds; the fastest one has a frame."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    rows, columns = (sorted({at[side] for at in landscape.ms}) for side in (0, 1))
    best = min(landscape.ms, key=lambda at: landscape.ms[at])
    nan = float("nan")
    times = [[landscape.ms.get((q, kv), nan) / landscape.ms[best] for kv in columns] for q in rows]
    image = axes.imshow(times, norm=LogNorm(1, 8), cmap="cividis_r", origin="lower", aspect="auto")
    for (q, kv), ms in landscape.ms.items():
        slow = ms / landscape.ms[best] > 2.5
        place = columns.index(kv), rows.index(q)
        axes.text(*place, f"{ms:.3g}", ha="center", va="center", color="white" if slow else "black")
    corner = columns.index(best[1]) - 0.5, rows.index(best[0]) - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=ORANGE, linewidth=3))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="keys of a block", ylabel="queries of a block", title=landscape.title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


main = command(__doc__, "tuning_table.csv", "tuning_landscape.svg", draw)

if __name__ == "__main__":
    main()
