"""Rotary position embedding for Equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ejkernel_ops import RotaryConfig, rotary_embedding

from ..fallback import no_kernel
from ..functional import at_path
from .pinned import Pinned


class RotaryPositionalEmbedding(Pinned, eqx.nn.RotaryPositionalEmbedding):
    """`eqx.nn.RotaryPositionalEmbedding` as a tunable kernel, with positions that may start anywhere.

    Takes all of the stock constructor's arguments. Each module has its own `theta`: the stock layers of a size all have
    that of the first one that was called in the process. Angles are in float32 or better, whatever `dtype` is.

    Args:
        *args: as `eqx.nn.RotaryPositionalEmbedding`.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `eqx.nn.RotaryPositionalEmbedding`.

    Raises:
        ValueError: an `embedding_size` that is odd or negative.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer = RotaryPositionalEmbedding(4, theta=500000.0)
        >>> layer(jax.random.normal(jax.random.key(0), (3, 4)), offset=7).shape
        (3, 4)

    Source: Su et al. 2021, arXiv:2104.09864.
    """

    config_type = RotaryConfig

    def __init__(self, *args: Any, config: RotaryConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, config=config, backend=backend, **kwargs)

    def __call__(
        self, x: Float[Array, "length embedding_size"], *, offset: int | Int[Array, ""] = 0, key: Any = None
    ) -> Float[Array, "length embedding_size"]:
        """The tokens `(length, embedding_size)` turned by their positions.

        Args:
            x: the tokens.
            offset: position of the first one, an integer or an array of one.
            key: has no effect.

        Returns:
            Shape and type of `x`.

        Raises:
            ValueError: another shape of `x`, or an offset for each token.
            TypeError: an offset that is no integer.
        """
        x, offset = jnp.asarray(x), jnp.asarray(offset)
        if x.ndim != 2 or x.shape[1] != self.embedding_size:
            raise ValueError(f"x has shape {x.shape}; expected (length, {self.embedding_size}): for more use jax.vmap")
        if offset.shape:
            raise ValueError(f"offset has shape {offset.shape}; expected one integer: for one per example use jax.vmap")
        if not jnp.issubdtype(offset.dtype, jnp.integer):
            raise TypeError(f"offset is {offset.dtype}; expected an integer, the position of the first token")
        positions = offset + jnp.arange(x.shape[0])
        if jnp.iscomplexobj(x):  # a rotation is linear
            return lax.complex(self._turned(x.real, positions), self._turned(x.imag, positions))
        if no_kernel(x=x):  # rounded at the end, as in the stock layer
            return self._turned(x.astype(jnp.float32), positions).astype(x.dtype)
        return self._turned(x, positions)

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        options = {"theta": self.theta, "config": self.config, "backend": self.backend}
        with at_path(self.kernel_path):
            return rotary_embedding(x[None, :, None], positions, **options)[0, :, 0]
