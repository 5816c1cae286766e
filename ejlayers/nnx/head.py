"""The last layer of a language model for Flax NNX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float, Int

from ejkernel_ops import LinearCrossEntropyConfig

from ..lm_head import head_logits, head_loss
from .pinned import Pinned


class LMHead(nnx.Module, Pinned):
    """Logits of a vocabulary, and the loss of hidden states without ever holding all of their logits.

    Args:
        features: of the hidden states.
        vocab_size: entries of the vocabulary.
        embedding: an `nnx.Embed` whose matrix is the weight (tied weights); then the head has none of its own.
        use_bias: whether there is a bias.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        dtype: type to multiply in; default that of hidden states and weight.
        param_dtype: type of the parameters.
        precision: as in `jax.lax.Precision`.
        kernel_init: initializer of the weight `(features, vocab_size)`; default that of `nnx.Linear`.
        config: back end and chunk sizes of the loss.
        backend: back end of the loss, or `None` for the best one; logits have their own.
        rngs: for the parameters; not needed with `embedding` and without a bias.

    Raises:
        ValueError: an embedding of other sizes.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> head = LMHead(3, 10, rngs=nnx.Rngs(0))
        >>> hidden = nnx.Rngs(1).normal((2, 4, 3))
        >>> head(hidden).shape, head.loss(hidden, jnp.zeros((2, 4), int)).shape
        ((2, 4, 10), ())
    """

    config_type = LinearCrossEntropyConfig

    def __init__(
        self,
        features: int,
        vocab_size: int,
        *,
        embedding: nnx.Embed | None = None,
        use_bias: bool = False,
        logits_soft_cap: float | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008
        config: LinearCrossEntropyConfig | None = None,
        backend: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        if embedding is not None and (sizes := embedding.embedding.shape) != (vocab_size, features):
            raise ValueError(f"embedding has sizes {sizes}; expected (vocab_size, features), {(vocab_size, features)}")
        self.embedding = embedding
        kernel = None
        if embedding is None:
            if rngs is None:
                raise ValueError("rngs is missing; pass nnx.Rngs(seed) for the weight, or an embedding to share")
            kernel = nnx.Param(kernel_init(rngs.params(), (features, vocab_size), param_dtype))
        self.kernel = kernel
        self.bias = nnx.Param(jnp.zeros(vocab_size, param_dtype)) if use_bias else None
        self.logits_soft_cap, self.dtype, self.precision = logits_soft_cap, dtype, precision
        self.pin(config=config, backend=backend)

    def __call__(self, hidden: Float[Array, "*batch features"]) -> Float[Array, "*batch vocab_size"]:
        """Logits `(..., vocab_size)` in float32 of hidden states `(..., features)`."""
        return head_logits(self, *self._operands(hidden))

    def loss(
        self, hidden: Float[Array, "*batch features"], labels: Int[Array, "*batch"], **options: Any
    ) -> Float[Array, ""] | Float[Array, "*batch"]:
        """The cross-entropy of labels `(...)`; options as `ejkernel_ops.linear_cross_entropy`: `z_loss` and so on."""
        return head_loss(self, *self._operands(hidden), labels, options)

    def _operands(self: Any, hidden: Any) -> tuple[Any, Any, Any, str]:
        tied = self.embedding is not None
        weight = self.embedding.embedding if tied else self.kernel
        bias = None if self.bias is None else self.bias[...]
        hidden, _, bias = dtypes.promote_dtype((hidden, weight[...], bias), dtype=self.dtype)
        return hidden, weight[...], bias, "oi" if tied else "io"
