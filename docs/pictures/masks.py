"""Draws which keys each query sees, as `flash_attention` itself has it, for the page about conventions of attention.

    python docs/pictures/masks.py

Writes one SVG for each of `CASES` beside this file. With equal logits, and as values the keys' numbers one-hot, the
output of a query is its probabilities: those above 0 are what it sees. The colours are legible on light and dark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import flash_attention

SEEN, LINE, TEXT = "#3f8fc9", "#8a8f98", "#7d838c"
CELL, LEFT, TOP = 22, 44, 40
PADDED = jnp.array([[0, 0, 0, 1, 1, 1, -1, -1]])
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "causal": ((8, 8), {"causal": True}),
    "causal_start": ((4, 8), {"causal": True}),
    "causal_end": ((4, 8), {"causal": True, "q_offset": "end"}),
    "causal_offset": ((4, 8), {"causal": True, "q_offset": 2}),
    "window": ((8, 8), {"sliding_window": (2, 1)}),
    "window_causal": ((8, 8), {"sliding_window": 2, "causal": True}),
    "segments": ((8, 8), {"q_segment_ids": PADDED, "causal": True}),
    "lengths": ((8, 8), {"kv_lengths": jnp.array([5])}),
    "mask_causal": ((8, 8), {"mask": jnp.arange(8) != 1, "causal": True}),
    "nothing": ((8, 8), {"mask": (jnp.arange(8) != 3)[:, None], "causal": True}),
}


def seen(sizes: tuple[int, int], options: dict[str, Any]) -> np.ndarray:
    """Which keys each query sees: bool `(q_len, kv_len)`."""
    q_len, kv_len = sizes
    query, key = jnp.zeros((1, q_len, 1, 8)), jnp.zeros((1, kv_len, 1, 8))
    value = jnp.eye(kv_len)[None, :, None, :]
    return np.asarray(flash_attention(query, key, value, backend="xla", **options)[0, :, 0] > 0)


def svg(visible: np.ndarray) -> str:
    """The picture: a row for each query, a column for each key, filled where the one sees the other."""
    rows, columns = visible.shape
    width, height = LEFT + CELL * columns + 4, TOP + CELL * rows + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{TEXT}" text-anchor="middle">',
        f'<text x="{LEFT + CELL * columns / 2}" y="13">keys</text>',
        f'<text transform="translate(12 {TOP + CELL * rows / 2}) rotate(-90)">queries</text>',
        *(f'<text x="{LEFT + CELL * (j + 0.5)}" y="{TOP - 8}">{j}</text>' for j in range(columns)),
        *(f'<text x="{LEFT - 12}" y="{TOP + CELL * (i + 0.5) + 4}">{i}</text>' for i in range(rows)),
    ]
    for (i, j), fills in np.ndenumerate(visible):
        place = f'x="{LEFT + CELL * j + 1}" y="{TOP + CELL * i + 1}" width="{CELL - 2}" height="{CELL - 2}"'
        parts.append(f'<rect {place} rx="3" fill="{SEEN if fills else "none"}" stroke="{LINE}" stroke-width="0.7"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Writes them all."""
    for name, (sizes, options) in CASES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg(seen(sizes, options)))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
