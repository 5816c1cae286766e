"""Embeddings for Flax NNX."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ejkernel_ops import LinearConfig, linear
from ejkernel_ops.kernels import LINEAR

from ..batch_axes import resharded
from ..functional import at_path
from .pinned import Pinned, custom_types, no_type_of_call


class Embed(nnx.Embed, Pinned):
    """`nnx.Embed` whose logits, `attend`, are a tunable kernel; same parameters, same state, same results.

    Takes all of the stock constructor's arguments. Rows are looked up as in the stock layer.

    Args:
        *args: as `nnx.Embed`.
        config: back end and tile sizes of the logits; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        **kwargs: as `nnx.Embed`.

    Example:
        >>> layer = Embed(5, 3, rngs=nnx.Rngs(0))
        >>> layer.attend(nnx.Rngs(1).normal((2, 3))).shape
        (2, 5)
    """

    config_type, kernel_of_layer = LinearConfig, LINEAR

    def __init__(self, *args: Any, config: LinearConfig | None = None, backend: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pin(config=config, backend=backend)

    def attend(
        self, query: Float[Array, "*batch features"], out_sharding: Any = None
    ) -> Float[Array, "*batch num_embeddings"]:
        """Logits `(..., num_embeddings)` of `(..., features)`; the embedding is not copied into another layout."""
        if reason := self.why_not(self) or no_type_of_call(self, query, self.embedding[...]):
            return self._stock(reason, super().attend, query, out_sharding=out_sharding)
        query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        with at_path(self.kernel_path):
            out = linear(query, embedding, weight_layout="oi", config=self.config, backend=self.backend)
        return resharded(out, out_sharding)

    @classmethod
    def why_not(cls, module: nnx.Embed) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return custom_types(module, embedding=module.embedding)
