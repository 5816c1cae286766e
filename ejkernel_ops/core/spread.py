"""Whether XLA may spread the arrays of a kernel's own code over devices, as it does where a call is not shared out."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_spread = contextvars.ContextVar("spread", default=False)


@contextlib.contextmanager
def spread(over_devices: bool = True) -> Iterator[None]:
    """Context of a kernel's code in a program of several devices, each of which XLA gives what part it likes."""
    token = _spread.set(over_devices)
    try:
        yield
    finally:
        _spread.reset(token)


def is_spread() -> bool:
    """Whether arrays may be split over devices: a Triton kernel would have them all gathered on each."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _spread.get()
    return any(size > 1 for size, kind in zip(mesh.axis_sizes, mesh.axis_types) if kind != jax.sharding.AxisType.Manual)
