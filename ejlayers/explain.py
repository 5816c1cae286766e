"""`explain`: which kernel, config and source each module's calls have in a lowered step."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel_ops.config.cache import Key
from ejkernel_ops.config.choice import parse_description
from ejkernel_ops.execution.local_calls import with_local_labels
from ejkernel_ops.execution.offline import operand_shapes
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.fingerprint import device_fingerprint
from ejkernel_ops.utils.labelled import LABEL_ONLY
from ejkernel_ops.utils.meta import call_sites, program_text, split_label

from .frameworks import adapters
from .functional import at_path
from .steps import lower, unbound


@dataclasses.dataclass(frozen=True)
class CallRow:
    """One kind of call of one module.

    Args:
        path: dotted path of the module; empty for a call outside of our layers.
        op: name and version of the kernel.
        label: the label in the program.
        shapes: the first operands.
        backend: the back end that runs.
        config: the fields that were used.
        source: where they came from; `pinned` is the module's own config.
        note: why a back end or tier was passed over.
        count: calls in the program.
        executions: the same times the lengths of the loops around them.
    """

    path: str
    op: str
    label: str
    shapes: str
    backend: str
    config: str
    source: str
    note: str
    count: int
    executions: int


@dataclasses.dataclass(frozen=True)
class ExplainReport:
    """The labelled calls of a step; prints as a table.

    Args:
        rows: one for each module path and kind of call.

    Example:
        >>> ExplainReport(()).to_dict()
        []
    """

    rows: tuple[CallRow, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [dataclasses.asdict(row) for row in self.rows]

    def to_markdown(self) -> str:
        """The rows as a Markdown table."""
        names = [f.name for f in dataclasses.fields(CallRow)]
        lines = [names, ["---"] * len(names), *([str(v) for v in dataclasses.astuple(row)] for row in self.rows)]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def __str__(self) -> str:
        from ejkernel_ops.utils.text_table import text_table  # rich, which only printing needs

        columns = ("module", "op", "operands", "calls", "back end", "config", "source", "note")
        calls = [
            str(r.count) if r.count == r.executions else f"{r.count} (x{r.executions // max(r.count, 1)})"
            for r in self.rows
        ]
        rows = [[r.path, r.op, r.shapes, n, r.backend, r.config, r.source, r.note] for r, n in zip(self.rows, calls)]
        return text_table(columns, rows)


def explain(step: Any, *args: Any, **kwargs: Any) -> ExplainReport:
    """Lowers a step, and says of each labelled call: module, label, shapes, back end, config, source, count.

    Nothing is compiled or run. Module paths are written into a copy of the arguments, so the labels are
    those of the step itself.

    Args:
        step: a function, or what `jax.jit`, `nnx.jit` or `eqx.filter_jit` returns, or a `functools.partial` of either.
        *args: its arguments; `ShapeDtypeStruct`s will do.
        **kwargs: its keyword arguments.

    Returns:
        A report.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> [row.op for row in explain(nnx.jit(lambda model, x: model(x)), model, nnx.Rngs(0).normal((2, 3))).rows]
        ['linear@v1']
    """
    step, args, kwargs = unbound(step, args, kwargs)
    for adapter in adapters():
        args, kwargs = adapter.with_paths((args, kwargs))
    rows: dict[tuple, CallRow] = {}
    with at_path(""):  # asks the layers that know their paths themselves to say them
        lowered = lower(step, args, kwargs)
    for site in call_sites(with_local_labels(program_text(lowered))):
        row = _row(site)
        key = (row.path, row.label, row.config, row.source)
        if key in rows:
            old = rows[key]
            row = dataclasses.replace(old, count=old.count + row.count, executions=old.executions + row.executions)
        rows[key] = row
    return ExplainReport(tuple(rows.values()))


def _row(site: Any) -> CallRow:
    op, key = split_label(site.label)
    inv = find_call(Key(device_fingerprint(), op, key))
    fields, sources, note = ({}, {}, LABEL_ONLY) if site.config == LABEL_ONLY else parse_description(site.config)
    backend = fields.pop("backend", "-")
    tiers = ["pinned" if tier == "call" and site.path else tier for tier in dict.fromkeys(sources.values())]
    return CallRow(
        path=site.path,
        op=op,
        label=site.label,
        shapes="" if inv is None else operand_shapes(inv),
        backend=backend,
        config=" ".join(f"{name}={value}" if name else value for name, value in fields.items()),
        source="+".join(tiers),
        note=note,
        count=site.calls,
        executions=site.executions,
    )
