"""A gated MLP for Flax NNX."""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from ejkernel_ops import GatedLinearConfig

from ..arguments import check_gate
from ..gated_mlp import gated_apart, gated_product
from .linear import Linear
from .pinned import Pinned

_promoted: Any = dtypes.promote_dtype  # whose type says that each result may be None


class GatedMLP(nnx.Module, Pinned):
    """`down(activation(gate(x)) * up(x))`, the MLP of Llama and its kin: both products and the gate are one kernel.

    Parameters are those of three `Linear` layers, `gate`, `up` and `down`. The first two are there for their parameters
    alone: what they pin has no effect, what this layer pins has. Where another kind of layer is put in the place of one
    of them, both are called, and their product has no kernel of its own.

    Args:
        in_features: features of inputs and, by default, of outputs.
        hidden_features: features in between.
        out_features: features of outputs.
        activation: `"silu"`, `"gelu"`, `"gelu_exact"`, `"relu"` or `"squared_relu"`.
        use_bias: whether the three have biases.
        dtype: type to compute in; default that of inputs and parameters.
        param_dtype: type of the parameters.
        precision: as in `jax.lax.Precision`.
        kernel_init: initializer of the kernels; default that of `nnx.Linear`.
        down_kernel_init: initializer of the kernel of `down`; default `kernel_init`.
        bias_init: initializer of the biases.
        config: back end and tile sizes of the gated product; `down` has a config of its own.
        backend: back end, or `None` for the best one.
        rngs: for the parameters.

    Raises:
        ValueError: an activation that is not known.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> layer = GatedMLP(3, 8, rngs=nnx.Rngs(0))
        >>> layer(nnx.Rngs(1).normal((2, 3))).shape
        (2, 3)

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    config_type = GatedLinearConfig

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "silu",
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        kernel_init: Any = None,
        down_kernel_init: Any = None,
        bias_init: Any = None,
        config: GatedLinearConfig | None = None,
        backend: str | None = None,
        rngs: nnx.Rngs,
    ):
        check_gate(activation)
        given = {"param_dtype": param_dtype, "kernel_init": kernel_init, "bias_init": bias_init}
        options = {name: value for name, value in given.items() if value is not None}
        options |= {"use_bias": use_bias, "dtype": dtype, "precision": precision, "rngs": rngs}
        self.gate = Linear(in_features, hidden_features, **options)
        self.up = Linear(in_features, hidden_features, **options)
        options |= {} if down_kernel_init is None else {"kernel_init": down_kernel_init}
        self.down = Linear(hidden_features, in_features if out_features is None else out_features, **options)
        self.activation, self.dtype, self.precision = activation, dtype, precision
        self.pin(config=config, backend=backend)

    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """From `(..., in_features)` to `(..., out_features)`."""
        if reason := self._why_apart():
            return self.down(gated_apart(self, self.gate, self.up, x, reason))
        parameters = (self.gate.kernel, self.up.kernel, self.gate.bias, self.up.bias)
        operands = (x, *(None if p is None else p[...] for p in parameters))
        return self.down(gated_product(self, *_promoted(operands, dtype=self.dtype)))

    def fused(self) -> tuple[nnx.Module, ...]:
        """The layers whose products are part of this one's kernel: what they pin has no effect."""
        return () if self._why_apart() else (self.gate, self.up)

    def _why_apart(self) -> str | None:
        """Why gate and up are called, not computed by one kernel."""
        for name, layer in (("gate", self.gate), ("up", self.up)):
            if type(layer) not in (Linear, nnx.Linear):  # such as a layer with LoRA
                return f"{name} is a {type(layer).__name__}"
            if reason := Linear.why_not(layer):
                return f"{reason} in {name}"
        return None
