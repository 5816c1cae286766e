"""Linear layers for Flax NNX."""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from ejkernel_ops import LinearConfig, linear
from ejkernel_ops.kernels.config import explicit_config

from ..functional import at_path


class Linear(nnx.Linear):
    """`nnx.Linear` as a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. With a `dot_general` of one's own, or an
    `out_sharding`, it computes as the stock layer does.

    Args:
        *args: as `nnx.Linear`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.Linear`.

    Example:
        >>> layer = Linear(3, 4, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((2, 3))).shape
        (2, 4)
    """

    config: LinearConfig | None = None
    backend: str | None = None
    kernel_path: str | None = None
    config_type = LinearConfig

    def __init__(self, *args: Any, config: LinearConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """The linear map over the last axis of `(..., in_features)`; returns `(..., out_features)`."""
        if self.dot_general is not lax.dot_general or out_sharding is not None:
            return super().__call__(inputs, out_sharding=out_sharding)
        bias = self.bias[...] if self.bias is not None else None
        inputs, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        with at_path(self.kernel_path):
            return linear(
                inputs, kernel, bias, preferred_element_type=self.preferred_element_type, precision=self.precision,
                config=self.config, backend=self.backend,
            )  # fmt: skip

    def pin(self, **fields: Any) -> None:
        """Changes `config`, `backend` or `path`; jitted functions that take the module retrace once."""
        explicit_config(LinearConfig, fields.get("config"), None, fields.get("backend"))  # an error now, not later
        names = {"path": "kernel_path"}
        for name, value in fields.items():
            name = names.get(name, name)
            if value is not None or name in vars(self):  # a module that pins nothing keeps the stock attributes
                setattr(self, name, value)

    @staticmethod
    def why_not(module: nnx.Linear) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        if module.dot_general is not lax.dot_general:
            return "custom dot_general"
        return None if module.promote_dtype is dtypes.promote_dtype else "custom promote_dtype"

    @staticmethod
    def adopt(module: nnx.Linear) -> None:
        """What a stock module needs beside the new class: nothing."""

    def release(self) -> None:
        """Takes away what `pin` added."""
        for name in ("config", "backend", "kernel_path"):
            if name in vars(self):
                delattr(self, name)
