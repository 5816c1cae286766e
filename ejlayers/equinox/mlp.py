"""A gated MLP for Equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel_ops import GatedLinearConfig, gated_linear

from ..arguments import check_gate
from ..functional import activated, at_path
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
        if not all(type(layer) in (Linear, eqx.nn.Linear) for layer in (self.gate, self.up)):  # such as one with LoRA
            gate, up, down = (jnp.vectorize(f, signature="(in)->(out)") for f in (self.gate, self.up, self.down))
            return down(activated(self.activation, gate(x)) * up(x))
        with at_path(self.kernel_path):
            hidden = gated_linear(
                x, self.gate.weight, self.up.weight, gate_bias=self.gate.bias, up_bias=self.up.bias,
                activation=self.activation, weight_layout="oi", config=self.config, backend=self.backend,
            )  # fmt: skip
        return jnp.vectorize(self.down, signature="(hidden)->(out)")(hidden)
