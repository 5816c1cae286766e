"""Embeddings for Flax Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import linen as nn
from flax.linen import dtypes
from jaxtyping import Array, Float

from ejkernel_ops import LinearConfig, linear
from ejkernel_ops.kernels import LINEAR

from ..functional import at_path
from .pinned import Pinned, custom_types, no_type_of_call

_promoted: Any = dtypes.promote_dtype  # whose type says that each result may be None


class Embed(Pinned, nn.Embed):
    """`nn.Embed` whose logits, `attend`, are a tunable kernel; same parameters, same results.

    Takes all of the stock layer's fields. Rows are looked up as in the stock layer.

    Args:
        config: back end and tile sizes of the logits; what it leaves open is chosen.
        backend: back end, or `None` for the best one.

    Raises:
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> layer, x = Embed(5, 3), jax.numpy.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x, method="attend"), x, method="attend").shape
        (2, 5)
    """

    config: LinearConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    config_type, kernel_of_layer = LinearConfig, LINEAR

    def attend(self, query: Float[Array, "*batch features"]) -> Float[Array, "*batch num_embeddings"]:
        """Logits `(..., num_embeddings)` of `(..., features)`; the embedding is not copied into another layout."""
        if reason := self.why_not(self) or no_type_of_call(self, query, "embedding"):
            return self._stock(reason, nn.Embed, "attend", query)
        query, embedding = _promoted(query, self.embedding, dtype=self.dtype)
        with at_path(self.kernel_path):
            return linear(query, embedding, weight_layout="oi", config=self.config, backend=self.backend)

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return custom_types(module)
