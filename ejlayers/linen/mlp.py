"""A gated MLP for Flax Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes, initializers
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Float

from ejkernel_ops import GatedLinearConfig

from ..arguments import check_gate
from ..gated_mlp import gated_product
from .linear import Dense, dense_params
from .pinned import Pinned


class GatedMLP(Pinned, nn.Module):
    """`down(activation(gate(x)) * up(x))`, the MLP of Llama and its kin: both products and the gate are one kernel.

    Parameters are those of three `Dense` layers, `gate`, `up` and `down`.

    Args:
        hidden_features: features in between.
        out_features: features of outputs; default those of inputs.
        activation: `"silu"`, `"gelu"`, `"gelu_exact"`, `"relu"` or `"squared_relu"`.
        use_bias: whether the three have biases.
        dtype: type to compute in; default that of inputs and parameters.
        param_dtype: type of the parameters.
        precision: as in `jax.lax.Precision`.
        kernel_init: initializer of the kernels.
        bias_init: initializer of the biases.
        down_kernel_init: initializer of the kernel of `down`; default `kernel_init`.
        config: back end and tile sizes of the gated product; `down` has a config of its own.
        backend: back end, or `None` for the best one.

    Raises:
        ValueError: an activation that is not known.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = GatedMLP(8), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3)

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    hidden_features: int
    out_features: int | None = None
    activation: str = "silu"
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    bias_init: Any = initializers.zeros_init()
    down_kernel_init: Any = dataclasses.field(default=None, kw_only=True)
    config: GatedLinearConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    config_type = GatedLinearConfig
    fused = ("gate", "up")  # whose products are part of the kernel: there is nothing that they could pin

    def __post_init__(self) -> None:
        """Refuses what is wrong with the fields where the layer is made."""
        check_gate(self.activation)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """From `(..., in_features)` to `(..., out_features)`."""
        out_features = jnp.shape(x)[-1] if self.out_features is None else self.out_features
        made = {name: getattr(self, name) for name in ("use_bias", "param_dtype", "kernel_init", "bias_init")}
        gate, gate_bias = _DenseParams(self.hidden_features, name="gate", **made)(jnp.shape(x)[-1])
        up, up_bias = _DenseParams(self.hidden_features, name="up", **made)(jnp.shape(x)[-1])
        operands = dtypes.promote_dtype(x, gate, up, gate_bias, up_bias, dtype=self.dtype)
        hidden = gated_product(self, *operands)
        made |= {} if self.down_kernel_init is None else {"kernel_init": self.down_kernel_init}
        return Dense(out_features, dtype=self.dtype, precision=self.precision, name="down", **made)(hidden)


class _DenseParams(nn.Module):
    """The parameters of a `Dense` layer without its product."""

    features: int
    use_bias: bool
    param_dtype: Any
    kernel_init: Any
    bias_init: Any

    @nn.compact
    def __call__(self, in_features: int) -> tuple[Any, Any]:
        """Kernel and bias."""
        return dense_params(self, in_features)
