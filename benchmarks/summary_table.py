"""The start page's table: a few of all measurements, those that are no gain among them."""

from __future__ import annotations

from collections.abc import Iterable

from attention_chart import DIRECTIONS, Measured, markdown
from measured_tables import PEERS, WAYS, by_point
from rows import read_rows
from table_cells import BENCHMARKS, Rows, number, ratio, source

SUMMARY_POINTS = {
    "gpt2_1k": "GPT-2 small's",
    "packed_16k": "16 documents packed into 16384 tokens",
    "d128_causal_4k": "4 x 4096, 16 heads of 128, causal",
    "d256_causal_4k": "4 x 4096, 8 heads of 256, causal",
}
SUMMARY_OPS = {
    ("norm", "layer_norm 16384x4096"): "norm",
    ("cross_entropy", "16384x768x50304"): "loss of a vocabulary",
    ("linear", "16384x768x3072"): "linear, bias and GELU",
    ("gated_linear", "16384x4096x14336"): "gated linear",
}


def summary() -> str:
    """Steps, attention and other ops on one GPU, each against the fastest peer."""
    steps = read_rows(BENCHMARKS / "train_step_h200.csv")
    found = [row for model in ("gpt2-small", "llama-1b") for row in step_summary(model, steps)]
    measured = Measured(read_rows(BENCHMARKS / "attention_h200.csv"))
    for point, what in SUMMARY_POINTS.items():
        for contender, note in (("chosen", ""), ("chosen_any_order", ", sums in any order")):
            found.append(attention_summary(measured, point, contender, what + note))
    for (op, point), ways in by_point(read_rows(BENCHMARKS / "ops_h200.csv")).items():
        if (op, point) in SUMMARY_OPS:
            ours = ways.get("tuned") or ways["untuned"]
            times = [number(ways["plain"]["ms"]), number(ours["ms"]), ratio(ours["speedup"])]
            found.append([f"{SUMMARY_OPS[op, point]}, {point}", "XLA", *times])
    heads = (
        "on one NVIDIA H200, bfloat16, outputs and gradients",
        "against",
        "theirs, ms",
        "ours, ms",
        "times as fast",
    )
    files = ("train_step_h200.csv", "attention_h200.csv", "ops_h200.csv")
    lines = [f"- {source(file, rows)}" for file in files if (rows := read_rows(BENCHMARKS / file))]
    return markdown(heads, filter(None, found)) + "\n\n" + "\n".join(lines)


def step_summary(model: str, rows: Rows) -> Iterable[list[str]]:
    """The best of each kind of ours, against the stock step."""
    ways = {row["way"]: row for row in rows if row["model"] == model}
    for kind in ("swapped", "ours"):
        if (best := ways.get(f"{kind}_tuned") or ways.get(kind)) is not None:
            stock, name = ways[best["against"]], WAYS[best["way"]]
            times = [number(stock["ms"]), number(best["ms"]), ratio(best["speedup"])]
            yield [f"train step of {model}, {name}", WAYS[best["against"]], *times]


def attention_summary(measured: Measured, point: str, contender: str, what: str) -> list[str] | None:
    """A point of attention; nothing where sums in any order change nothing."""
    both = [measured.ms(point, DIRECTIONS[1], name) for name in ("chosen", "chosen_any_order")]
    if contender == "chosen_any_order" and (None in both or both[0] < 1.03 * both[1]):
        return None
    peers = {name: ms for name in PEERS if (ms := measured.ms(point, DIRECTIONS[1], name)) is not None}
    best = min(peers, key=lambda name: peers[name])
    ms = measured.ms(point, DIRECTIONS[1], contender)
    return [
        f"attention, {what}",
        {"cudnn": "cuDNN"}.get(best, best),
        number(peers[best]),
        number(ms),
        ratio(peers[best] / ms),
    ]
