"""`Invocation`: one call as shapes, dtypes and static values, and the key made of them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax

from ..utils.fingerprint import abstractify, device_fingerprint, device_of, is_array
from ..utils.values import short_hash, stable_json
from .kernel import Kernel, require_kernel


def bind_arguments(kernel: Kernel, args: tuple, kwargs: dict) -> inspect.BoundArguments:
    """The arguments of a call by parameter, defaults filled in: one form for every spelling."""
    try:
        bound = kernel.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{kernel.op_id_v}: {error}; its parameters are {kernel.signature}") from None
    bound.apply_defaults()
    return bound


def static_text(kernel: Kernel, name: str, value: Any) -> str:
    """Value-based text of one argument; an error names the argument."""
    return stable_json(value, where=f"argument {name!r} of {kernel.op_id_v}")


class Invocation:
    """One call of a kernel, without its values: what is recorded, keyed, tuned and chosen for.

    Args:
        kernel: the kernel that was called.
        args: positional arguments; arrays become `ShapeDtypeStruct`s.
        kwargs: keyword arguments; likewise.
        metadata: anything that the caller wants to keep beside it; not part of the key.
        needs: for a backward kernel, which gradients are asked for: a bool in place of each array of the
            forward's positional arguments.
        residuals: whether the call also returns what its gradient needs.
        override_cfg: the explicit config of the call.
        batch_axes: axes of a batching that the kernel does not fold; part of the key.
        platform: JAX platform name that the call was lowered for; `None`: where its arrays are, else the default.

    Raises:
        ConfigError: a static argument has no value-based form; raised when the key is first asked for.
        TypeError: no kernel, or the arguments do not fit its signature.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops import Kernel
        >>> class Scale(Kernel):
        ...     def run(self, x, factor=2.0, *, cfg=None):
        ...         return x * factor
        >>> scale, x = Scale("scale_example"), jnp.ones((3, 4))
        >>> Invocation(scale, (x,)).call_key == Invocation(scale, (), {"factor": 2.0, "x": x}).call_key
        True
    """

    def __init__(
        self,
        kernel: Kernel,
        args: tuple = (),
        kwargs: dict | None = None,
        metadata: dict | None = None,
        *,
        needs: Any = None,
        residuals: bool = False,
        override_cfg: Any = None,
        batch_axes: Any = None,
        platform: str | None = None,
    ):
        require_kernel(kernel)
        bound = bind_arguments(kernel, tuple(args), dict(kwargs or {}))
        self._device = None if platform is not None else device_of(tuple(bound.arguments.values()))
        for name, value in bound.arguments.items():
            bound.arguments[name] = abstractify(value)
        self.kernel, self.arguments, self.metadata = kernel, bound.arguments, metadata
        self.args, self.kwargs = bound.args, bound.kwargs
        self.needs, self.residuals, self.override_cfg, self.batch_axes = needs, residuals, override_cfg, batch_axes
        self.platform = platform if self._device is None else self._device.platform
        self.call: Any = None  # the static part of the framework's own calls: what tuning runs

    def like(self, *args: Any) -> Invocation:
        """The same call with other positional arguments: other shapes, say."""
        other = Invocation(
            self.kernel, args, self.kwargs, needs=self.needs, residuals=self.residuals,
            override_cfg=self.override_cfg, platform=self.platform,
        )  # fmt: skip
        if self.call is not None:
            other.call = self.call.like(other)
        return other

    @property
    def op_id(self) -> str:
        """The kernel's name."""
        return self.kernel.op_id

    @property
    def op_id_v(self) -> str:
        """The kernel's name and version."""
        return self.kernel.op_id_v

    @property
    def abstract_args(self) -> tuple:
        """The positional arguments, arrays as `ShapeDtypeStruct`s."""
        return self.args

    @functools.cached_property
    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the call, in order."""
        return [x for x in jax.tree.leaves(tuple(self.arguments.values())) if is_array(x)]

    @functools.cached_property
    def call_key(self) -> str:
        """16 hex digits: equal for equal shapes, dtypes and static values, in every process."""
        forms = [[name, static_text(self.kernel, name, value)] for name, value in self.arguments.items()]
        parts = [self.op_id_v, self.kernel.state(), forms, self.needs, self.batch_axes]
        return short_hash(stable_json([*parts, "residuals"] if self.residuals else parts))

    @property
    def device_fingerprint(self) -> str:
        """The device model that the call is meant for."""
        return device_fingerprint(self.platform if self._device is None else self._device)

    def __repr__(self):
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.operands)
        return f"Invocation({self.op_id_v}, {shapes})"
