"""`report`: what the layers of a model are, and the way back."""

from __future__ import annotations

import dataclasses
from typing import Any

from .frameworks import adapter_of
from .plan import Row


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """What a model's layers are.

    Args:
        model: the model.
        rows: one for each layer that has a replacement.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> [row.replaced for row in ejlayers.report(model).rows]
        [True]
        >>> type(ejlayers.report(model).original()) is nnx.Linear
        True
    """

    model: Any = dataclasses.field(repr=False)
    rows: tuple[Row, ...]

    def original(self) -> Any:
        """The stock model over the same parameters; of Flax NNX, a change of one is a change of the other."""
        return adapter_of(self.model).original(self.model)

    def revert(self) -> Any:
        """The model with its stock layers back: Flax NNX in place, of Equinox and Linen a new one."""
        return adapter_of(self.model).reverted(self.model)

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [dataclasses.asdict(row) for row in self.rows]

    def __str__(self) -> str:
        from ejkernel_ops.utils.text_table import text_table  # rich, which only printing needs

        rows = [[r.path or "(model)", r.layer, "replaced" if r.replaced else "skipped", r.note] for r in self.rows]
        return text_table(("module", "layer", "", "note"), rows)


def report(model: Any, *inputs: Any, **kwargs: Any) -> SwapReport:
    """What the layers of a model are: replaced, or skipped and why.

    Args:
        model: a `flax.nnx.Module`, `flax.linen.Module` or `equinox.Module`.
        *inputs: of Linen, the variables and what the model is called with, abstract or not: its layers are those of a
            call. Not needed for the others.
        **kwargs: keyword arguments of the call.

    Returns:
        A report that prints as a table, and that can give the stock model back.

    Raises:
        ConfigError: a model of no known framework.

    Example:
        >>> from flax import nnx
        >>> report(nnx.Linear(3, 4, rngs=nnx.Rngs(0))).rows[0].replaced
        False
    """
    return SwapReport(model, tuple(adapter_of(model).rows(model, inputs, kwargs)))
