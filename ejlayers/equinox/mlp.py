"""A gated MLP for Equinox."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel_ops import GatedLinearConfig

from ..arguments import check_gate
from ..gated_mlp import gated_apart, gated_product
from .linear import Linear
from .pinned import Pinned


class GatedMLP(Pinned):
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
        dtype: type of the parameters; default that of Equinox.
        config: back end and tile sizes of the gated product; `down` has a config of its own.
        backend: back end, or `None` for the best one.
        key: for the parameters.

    Raises:
        ValueError: an activation that is not known.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> layer = GatedMLP(3, 8, key=jax.random.key(0))
        >>> layer(jax.random.normal(jax.random.key(1), (5, 3))).shape
        (5, 3)

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    gate: Linear
    up: Linear
    down: Linear
    activation: str = eqx.field(static=True)

    config_type = GatedLinearConfig
    precision: ClassVar[Any] = None  # JAX's default

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "silu",
        use_bias: bool = False,
        dtype: Any = None,
        config: GatedLinearConfig | None = None,
        backend: str | None = None,
        key: Any,
    ):
        super().__init__(config=config, backend=backend)
        check_gate(activation)
        options = {"use_bias": use_bias, "dtype": dtype}
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear(in_features, hidden_features, **options, key=gate)
        self.up = Linear(in_features, hidden_features, **options, key=up)
        self.down = Linear(hidden_features, in_features if out_features is None else out_features, **options, key=down)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "*batch in_features"], *, key: Any = None
    ) -> Float[Array, "*batch out_features"]:
        """From `(..., in_features)` to `(..., out_features)`, a vector or any number of them; `key` has no effect."""
        down = jnp.vectorize(self.down, signature="(hidden)->(out)")
        if reason := self._why_apart():
            gate, up = (jnp.vectorize(layer, signature="(in)->(hidden)") for layer in (self.gate, self.up))
            return down(gated_apart(self, gate, up, x, reason))
        parameters = (self.gate.weight, self.up.weight, self.gate.bias, self.up.bias)
        return down(gated_product(self, x, *parameters, weight_layout="oi"))

    def fused(self) -> tuple[eqx.Module, ...]:
        """The layers whose products are part of this one's kernel: what they pin has no effect."""
        return () if self._why_apart() else (self.gate, self.up)

    def _why_apart(self) -> str | None:
        """Why gate and up are called, not computed by one kernel."""
        for name, layer in (("gate", self.gate), ("up", self.up)):
            if type(layer) not in (Linear, eqx.nn.Linear):  # such as a layer with LoRA
                return f"{name} is a {type(layer).__name__}"
            if reason := Linear.why_not(layer):
                return f"{reason} in {name}"
        return None
