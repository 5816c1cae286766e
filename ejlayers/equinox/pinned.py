"""What the Equinox layers have in common: the config and back end that a module pins."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from ejkernel_ops.kernels.config import explicit_config

_FIELDS = {"config": "config", "backend": "backend", "path": "kernel_path"}


class Pinned(eqx.Module):
    """Comes before the stock class among a layer's bases: static fields after its own, so the leaves are the same.

    Attributes:
        config: what the module pins of its op's config.
        backend: the back end that the module pins.
        kernel_path: the module's dotted path, while `explain` asks for it.
        config_type: the config of the layer's op.
    """

    config: Any = eqx.field(default=None, static=True, kw_only=True)
    backend: str | None = eqx.field(default=None, static=True, kw_only=True)
    kernel_path: str | None = eqx.field(default=None, static=True, kw_only=True)
    config_type: ClassVar[type]

    def __init__(self, *args: Any, config: Any = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)  # of the stock class, which is the next one
        explicit_config(self.config_type, config, None, backend)  # an error now, not later
        self.config, self.backend, self.kernel_path = config, backend, None

    def pin(self, **fields: Any) -> Any:
        """Returns the module with another `config`, `backend` or `path`; jitted functions retrace once."""
        if unknown := sorted(fields.keys() - _FIELDS):
            raise TypeError(f"{unknown[0]} is nothing that a module pins; expected {', '.join(_FIELDS)}")
        config, backend = fields.get("config", self.config), fields.get("backend", self.backend)
        explicit_config(self.config_type, config, None, backend)
        return remade(self, type(self), **{_FIELDS[name]: value for name, value in fields.items()})

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None


def remade(module: Any, kind: type, **changes: Any) -> Any:
    """A module of a class that has the fields of another one, of which some are changed; no constructor runs."""
    made, values = object.__new__(kind), vars(module) | changes
    for field in dataclasses.fields(kind):
        if field.name in values:
            object.__setattr__(made, field.name, values[field.name])
    return made


def no_kernel(**arrays: Any) -> str | None:
    """Why no kernel takes arrays of these kinds; `None` where one does.

    What is no array, such as the place of a weight that is tied to another one, is none yet: that is no reason.
    """
    for name, x in arrays.items():
        if isinstance(x, eqx.Module):
            return f"{name} is a {type(x).__name__}"
        dtype = jnp.dtype(getattr(x, "dtype", "float32"))
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            return f"{name} is {dtype}"
    return None
