"""The last layer of a language model for Flax Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes, initializers
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Float, Int

from ejkernel_ops import LinearCrossEntropyConfig

from ..lm_head import head_logits, head_loss
from .pinned import Pinned


class LMHead(Pinned, nn.Module):
    """Logits of a vocabulary, and the loss of hidden states without ever holding all of their logits.

    Args:
        features: of the hidden states.
        vocab_size: entries of the vocabulary.
        embedding: an `nn.Embed` whose matrix is the weight (tied weights); then the head has none of its own.
        use_bias: whether there is a bias.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        dtype: type to multiply in; default that of hidden states and weight.
        param_dtype: type of the parameters.
        precision: as in `jax.lax.Precision`.
        kernel_init: initializer of the weight `(features, vocab_size)`.
        config: back end and chunk sizes of the loss.
        backend: back end of the loss, or `None` for the best one; logits have their own.

    Raises:
        ValueError: an embedding of other sizes.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> import jax
        >>> head, hidden = LMHead(3, 10), jnp.ones((2, 4, 3))
        >>> variables = head.init(jax.random.key(0), hidden)
        >>> head.apply(variables, hidden).shape
        (2, 4, 10)
        >>> head.apply(variables, hidden, jnp.zeros((2, 4), int), method="loss").shape
        ()
    """

    features: int
    vocab_size: int
    embedding: nn.Embed | None = None
    use_bias: bool = False
    logits_soft_cap: float | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    config: LinearCrossEntropyConfig | None = dataclasses.field(default=None, kw_only=True)
    backend: str | None = dataclasses.field(default=None, kw_only=True)

    config_type = LinearCrossEntropyConfig

    def __post_init__(self) -> None:
        """Refuses an embedding of other sizes."""
        embedding, sizes = self.embedding, (self.vocab_size, self.features)
        if embedding is not None and (given := (embedding.num_embeddings, embedding.features)) != sizes:
            raise ValueError(f"embedding has sizes {given}; expected (vocab_size, features), {sizes}")
        super().__post_init__()

    def setup(self) -> None:
        """Makes the parameters."""
        shape, vocab = (self.features, self.vocab_size), (self.vocab_size,)
        self.kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype) if not self.embedding else None
        self.bias = self.param("bias", initializers.zeros, vocab, self.param_dtype) if self.use_bias else None

    def __call__(self, hidden: Float[Array, "*batch features"]) -> Float[Array, "*batch vocab_size"]:
        """Logits `(..., vocab_size)` in float32 of hidden states `(..., features)`."""
        return head_logits(self, *self._operands(hidden))

    def loss(
        self, hidden: Float[Array, "*batch features"], labels: Int[Array, "*batch"], **options: Any
    ) -> Float[Array, ""] | Float[Array, "*batch"]:
        """The cross-entropy of labels `(...)`; options as `ejkernel_ops.linear_cross_entropy`: `z_loss` and so on."""
        return head_loss(self, *self._operands(hidden), labels, options)

    @nn.nowrap
    def _operands(self: Any, hidden: Any) -> tuple[Any, Any, Any, str]:
        weight, layout = (self.embedding.embedding, "oi") if self.embedding else (self.kernel, "io")
        hidden, _, bias = dtypes.promote_dtype(hidden, weight, self.bias, dtype=self.dtype)
        return hidden, weight, bias, layout
