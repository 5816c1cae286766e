"""The tables that `docs_tables.py` puts into the pages: one function each, from the measurements in `docs/benchmarks`.

Under each table is a line that says card, versions, date and file. Of a file that is not there the table is a sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from attention_chart import DIRECTIONS, Measured, markdown
from rows import read_rows
from table_cells import BENCHMARKS, NOT_YET, SLOWER, Rows, number, ratio, source, table

PEERS = ("cudnn", "tokamax")
POINTS = (
    "gpt2_1k", "d64_causal_4k", "d64_causal_16k", "d64_full_4k", "d128_causal_4k", "d128_causal_16k", "d128_full_4k",
    "d256_causal_4k", "d256_full_4k", "gqa_8k", "window_16k", "packed_16k", "mask_2k", "bias_2k", "bias_grad_2k",
    "softcap_4k",
)  # fmt: skip
WAYS = {
    "stock_float32": "stock Flax, XLA attention, float32",
    "stock_xla": "stock Flax, XLA attention",
    "stock_cudnn": "stock Flax, cuDNN attention",
    "swapped": "swapped, untuned",
    "swapped_tuned": "swapped and tuned",
    "ours": "written with our ops, untuned",
    "ours_tuned": "written with our ops, tuned",
}
_CPU_OPS = ("norm", "rotary", "linear", "gated_linear", "linear_cross_entropy")


# One function for each table


def train_step(file: str) -> str:
    """Whole steps of each model."""

    def cells(rows: Rows) -> Iterable[list[str]]:
        for r in rows:
            way = WAYS.get(r["way"], r["way"])
            tuned = number(r["tuning_s"], 3) if float(r["tuning_s"] or 0) else ""
            times = [number(r["ms"]), ratio(r["speedup"]), number(r["kernel_ms"])]
            yield [r["model"], way, *times, r["tokens_per_s"], r["peak_gib"], tuned]

    heads = ("model", "step", "ms", "times as fast", "kernels, ms", "tokens/s", "memory, GiB", "tuning, s")
    return table(file, heads, cells)


def kernels(file: str) -> str:
    """Where the time of whole steps goes."""
    kinds = ("products", "attention", "ours", "elementwise", "reductions", "copies")

    def cells(rows: Rows) -> Iterable[list[str]]:
        for r in rows:
            yield [r["model"], WAYS.get(r["way"], r["way"]), *(number(r[kind]) for kind in kinds)]

    return table(file, ("model", "step", "products, ms", "attention, ms", "our Triton, ms", *kinds[3:]), cells)


def losses(file: str) -> str:
    """How far the losses of each way are from those of the first one."""
    rows = read_rows(BENCHMARKS / file)
    if not rows:
        return NOT_YET
    base, *others = (name for name in rows[0] if name.removesuffix("_rounded") in WAYS)

    def cells(name: str) -> list[str]:
        apart = [abs(float(row[name]) - float(row[base])) for row in rows]
        late = apart[-len(apart) // 10 :]
        rounded = " from rounded weights" if name.endswith("_rounded") else ""
        return [
            WAYS[name.removesuffix("_rounded")] + rounded,
            f"{max(apart):.4f}",
            f"{sum(late) / len(late):.4f}",
            f"{float(rows[-1][name]):.4f}",
        ]

    heads = (f"against {WAYS[base]}", "largest difference", "mean of the last tenth", "last loss")
    return f"{markdown(heads, map(cells, others))}\n\n{len(rows)} steps; {source(file, rows)}"


def attention(file: str) -> str:
    """Our attention beside each peer, in milliseconds."""

    def cells(rows: Rows) -> Iterable[list[str]]:
        found = Measured(rows)
        for point in filter(found.points.__contains__, POINTS):
            for direction in DIRECTIONS:
                ms = functools.partial(found.ms, point, direction)
                if ms("chosen") is None:
                    continue
                times = [number(ms(name)) for name in ("cudnn", "tokamax", "xla", "chosen", "chosen_any_order")]
                names = ("chosen", "chosen_any_order")
                best = [ratio(found.speedup(point, direction, name, PEERS)) for name in names]
                yield [point, call(found.of(point)), direction, *times, *best]

    heads = (
        "point", "batch x length, heads x head_dim", "direction", "cuDNN", "tokamax", "XLA", "ours",
        "ours, sums in any order", "ours / best peer", "any order / best peer",
    )  # fmt: skip
    return table(file, heads, cells)


def attention_xla(file: str) -> str:
    """Our attention on XLA alone, on a GPU: why other back ends are there."""
    mib = ("xla_mib", "cudnn_mib", "our_mib")

    def cells(rows: Rows) -> Iterable[list[str]]:
        for r in rows:
            shape = f"{r['batch']} x {r['length']}, {r['heads']} x {r['head_dim']}"
            times = [number(r[name]) for name in ("xla_ms", "cudnn_ms", "heuristic_ms", "tuned_ms")]
            yield [shape, "yes" if r["causal"] == "True" else "no", *times, *(r[name] for name in mib)]

    times = ("XLA, ms", "cuDNN, ms", "ours on XLA, untuned, ms", "tuned, ms")
    memory = ("XLA, MiB", "cuDNN, MiB", "ours, MiB")
    return table(file, ("batch x length, heads x head_dim", "causal", *times, *memory), cells)


def call(row: dict[str, str]) -> str:
    """The shapes of a point of attention, and what is special about it."""
    kinds = {"grid": "", "gpt2": ""}
    kind = kinds.get(row["kind"], row["kind"])
    notes = ", ".join(filter(None, ["causal" if row["causal"] == "True" else "", kind]))
    return f"{row['batch']} x {row['length']}, {row['heads']} x {row['head_dim']} {notes}".strip()


def ops(file: str) -> str:
    """The other ops, outputs and gradients, beside XLA's plain expression."""

    def cells(rows: Rows) -> Iterable[list[str]]:
        for (op, point), ways in by_point(rows).items():
            ours = ways.get("tuned") or ways["untuned"]
            plain = ways["plain"]
            memory = [ours["over_copy"], *(number(r["extra_gib"], 3) for r in (plain, ours))]
            tuned = "tuned" if "tuned" in ways else "untuned"
            yield [op, point, number(plain["ms"]), number(ours["ms"]), ratio(ours["speedup"]), *memory, tuned]

    heads = (
        "op",
        "size",
        "XLA, ms",
        "ours, ms",
        "times as fast",
        "times a copy",
        "XLA, GiB beside",
        "ours, GiB beside",
        "",
    )
    return table(file, heads, cells)


def by_point(rows: Rows) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """Rows of ops by op and size, and then by contender."""
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for r in rows:
        found.setdefault((r["op"], r["point"]), {})[r["contender"]] = r
    return found


def attention_cpu(file: str) -> str:
    """Attention on two cores."""

    def cells(rows: Rows) -> Iterable[list[str]]:
        for r in rows:
            causal = "yes" if r["causal"] == "True" else "no"
            times = [number(r["stock_ms"]), number(r["our_ms"]), ratio(r["speedup"])]
            yield [r["length"], causal, *times, r["stock_mib"], r["our_mib"]]

    return table(
        file,
        ("length", "causal", "jax.nn, ms", "ours, tuned, ms", "times as fast", "jax.nn, MiB", "ours, MiB"),
        cells,
    )


def ops_cpu() -> str:
    """The other ops on two cores, of one file each."""
    found, sources = [], []
    for op in _CPU_OPS:
        rows = read_rows(BENCHMARKS / f"{op}_cpu.csv")
        sources += [source(f"{op}_cpu.csv", rows)] if rows else []
        found += [[r.get("op", op), size_of(r), number(r["plain_ms"]), number(r["our_ms"]), ratio(r["speedup"]),
                   r["plain_mib"], r["our_mib"]] for r in rows if r.get("gradients") != "False"]  # fmt: skip
    heads = ("op", "size", "plain, ms", "ours, tuned, ms", "times as fast", "plain, MiB", "ours, MiB")
    return markdown(heads, found) + "\n\n" + "\n".join(f"- {line}" for line in sources)


def size_of(row: dict[str, str]) -> str:
    """The size of a call of an op on a CPU."""
    names = ("rows", "length", "in_features", "features", "heads", "head_dim", "out_features", "vocab")
    return " x ".join(row[name] for name in names if row.get(name))


def overhead(file: str) -> str:
    """What the library itself costs."""
    return table(file, ("what", "measured"), lambda rows: ([r["what"], number(r["value"])] for r in rows))


def scaling(file: str) -> str:
    """Steps over several GPUs."""

    def cells(rows: Rows) -> Iterable[list[str]]:
        for r in rows:
            way = WAYS.get(r["way"], r["way"])
            yield [r["model"], r["mesh"], way, number(r["ms"]), ratio(r["speedup"]), r["against"], r["efficiency"]]

    return table(file, ("what", "mesh", "step", "ms", "times as fast", "as", "efficiency"), cells)


def slower() -> str:
    """Where a peer is faster, worst first: of attention the better of cuDNN and tokamax, else the plain expression."""
    found: list[tuple[float, list[str]]] = []
    measured = Measured(read_rows(BENCHMARKS / "attention_h200.csv"))
    for point in measured.points:
        for direction in DIRECTIONS:
            value, free = (measured.speedup(point, direction, name, PEERS) for name in ("chosen", "chosen_any_order"))
            if value is not None and value < SLOWER:
                where = ["attention", f"{point}: {call(measured.of(point))}", direction, f"{value:.2f}"]
                found.append((value, [*where, "" if free is None else f"{free:.2f}"]))
    for (op, point), ways in by_point(read_rows(BENCHMARKS / "ops_h200.csv")).items():
        value = float((ways.get("tuned") or ways["untuned"])["speedup"])
        if value < SLOWER:
            found.append((value, [op, point, "forward+backward", f"{value:.2f}", ""]))
    heads = ("op", "call", "direction", "ours / best peer", "with sums in any order")
    return markdown(heads, [row for _, row in sorted(found, key=lambda pair: pair[0])])


def start() -> str:
    """What `print(result)` says of the first step on a CPU."""
    from ejkernel_ops import AutotuningResult
    from ejkernel_ops.execution.result_json import read  # any device's

    result = read(AutotuningResult, (BENCHMARKS / "start_cpu.json").read_text())
    return f"```text\n{result}\n```"
