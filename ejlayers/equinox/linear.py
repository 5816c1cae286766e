"""A linear layer for Equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel_ops import LinearConfig, linear
from ejkernel_ops.kernels import LINEAR

from ..fallback import no_kernel
from ..functional import at_path
from .pinned import Pinned


class Linear(Pinned, eqx.nn.Linear):
    """`eqx.nn.Linear` as a tunable kernel; same parameters, same leaves, same results.

    Takes all of the stock constructor's arguments. Under `jax.vmap`, nested or not, a batch is one kernel call; the
    weight `(out_features, in_features)` is copied into no other layout. What is no array of floats computes as the
    stock layer does.

    Args:
        *args: as `eqx.nn.Linear`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `eqx.nn.Linear`.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer = Linear(3, 4, key=jax.random.key(0))
        >>> jax.vmap(layer)(jax.random.normal(jax.random.key(1), (2, 3))).shape
        (2, 4)
    """

    config_type, kernel_of_layer = LinearConfig, LINEAR

    def __init__(self, *args: Any, config: LinearConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, config=config, backend=backend, **kwargs)

    def __call__(self, x: Float[Array, "*in_features"], *, key: Any = None) -> Float[Array, "*out_features"]:
        """The linear map of `(in_features,)`, or of a scalar where `in_features` is "scalar"; `key` has no effect."""
        x = jnp.asarray(x)
        if reason := no_kernel(x=x, weight=self.weight, bias=self.bias):
            return self._stock(reason, super().__call__, x, key=key)
        expected = () if self.in_features == "scalar" else self.weight.shape[-1:]
        if x.shape != expected:
            raise ValueError(f"x has shape {x.shape}; expected {expected}: for more than one use jax.vmap(layer)(x)")
        given = (a for a in (x, self.weight, self.bias) if a is not None)
        with at_path(self.kernel_path):
            out = linear(
                jnp.reshape(x, self.weight.shape[-1:]), self.weight, self.bias, weight_layout="oi",
                preferred_element_type=jnp.result_type(*given), config=self.config, backend=self.backend,
            )  # fmt: skip
        return out[0] if self.out_features == "scalar" else out

    @classmethod
    def why_not(cls, module: eqx.nn.Linear) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return no_kernel(weight=module.weight, bias=module.bias)
