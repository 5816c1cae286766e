"""What the Equinox layers have in common: the config and back end that a module pins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx

from ..fallback import run_stock
from ..pins import changed_pins, check_pins


class Pinned(eqx.Module):
    """Comes before the stock class among a layer's bases: static fields after its own, so the leaves are the same.

    Attributes:
        config: what the module pins of its op's config.
        backend: the back end that the module pins.
        kernel_path: the module's dotted path, while `explain` asks for it.
        config_type: the config of the layer's op.
        kernel_of_layer: the kernel of the layer's op.
    """

    config: Any = eqx.field(default=None, static=True, kw_only=True)
    backend: str | None = eqx.field(default=None, static=True, kw_only=True)
    kernel_path: str | None = eqx.field(default=None, static=True, kw_only=True)
    config_type: ClassVar[type]
    kernel_of_layer: ClassVar[Any]

    def __init__(self, *args: Any, config: Any = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)  # of the stock class, which is the next one
        self.config, self.backend, self.kernel_path = config, backend, None
        check_pins(self)

    def pin(self, **fields: Any) -> Any:
        """Returns the module with other pins; jitted functions retrace once.

        Args:
            **fields: of `config`, `backend`, `path` and, of attention, `reproducible` those that change.
        """
        return remade(self, type(self), **changed_pins(self, fields))

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None

    @classmethod
    def when_not(cls, module: Any) -> str | None:
        """When a module of ours computes as the stock one, as far as its fields say; `None` if never."""
        return cls.why_not(module)

    def _stock(self, reason: str, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """The stock layer's own call."""
        return run_stock(self.kernel_of_layer, self.kernel_path, reason, run, *args, **kwargs)


def remade(module: Any, kind: type, **changes: Any) -> Any:
    """A module of a class that has the fields of another one, of which some are changed; no constructor runs."""
    made, values = object.__new__(kind), vars(module) | changes
    for field in dataclasses.fields(kind):
        if field.name in values:
            object.__setattr__(made, field.name, values[field.name])
    return made
