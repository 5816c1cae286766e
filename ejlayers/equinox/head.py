"""The last layer of a language model for Equinox."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel_ops import LinearCrossEntropyConfig

from ..lm_head import head_logits, head_loss
from .pinned import Pinned


class LMHead(Pinned):
    """Logits of a vocabulary, and the loss of hidden states without ever holding all of their logits.

    A tied head (`tied=True`) has no weight of its own: each call takes it, `head(hidden, weight=embedding.weight)`. A
    head that is not may be tied by `eqx.nn.Shared`, as any layer.

    Args:
        features: of the hidden states.
        vocab_size: entries of the vocabulary.
        tied: whether the weight is that of an embedding, which calls pass.
        use_bias: whether there is a bias, which starts at 0.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        dtype: type of the parameters; default that of Equinox.
        config: back end and chunk sizes of the loss.
        backend: back end of the loss, or `None` for the best one; logits have their own.
        key: for the weight `(vocab_size, features)`; not needed with `tied`.

    Raises:
        ValueError: a key is missing.
        ConfigError: a config of another type or for another back end.

    Example:
        >>> head = LMHead(3, 10, key=jax.random.key(0))
        >>> hidden = jax.random.normal(jax.random.key(1), (4, 3))
        >>> head(hidden).shape, head.loss(hidden, jnp.zeros(4, int)).shape
        ((4, 10), ())
    """

    weight: jax.Array | None
    bias: jax.Array | None
    features: int = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)
    logits_soft_cap: float | None = eqx.field(static=True)

    config_type = LinearCrossEntropyConfig
    precision: ClassVar[Any] = None  # JAX's default

    def __init__(
        self,
        features: int,
        vocab_size: int,
        *,
        tied: bool = False,
        use_bias: bool = False,
        logits_soft_cap: float | None = None,
        dtype: Any = None,
        config: LinearCrossEntropyConfig | None = None,
        backend: str | None = None,
        key: Any = None,
    ):
        super().__init__(config=config, backend=backend)
        if not tied and key is None:
            raise ValueError("key is missing; pass a PRNG key for the weight, or tied=True")
        made = None if tied else eqx.nn.Linear(features, vocab_size, use_bias=False, dtype=dtype, key=key)
        self.weight = None if made is None else made.weight
        self.bias = jnp.zeros(vocab_size, dtype) if use_bias else None
        self.features, self.vocab_size, self.logits_soft_cap = features, vocab_size, logits_soft_cap

    def __call__(
        self,
        hidden: Float[Array, "*batch features"],
        *,
        weight: Float[Array, "vocab_size features"] | None = None,
        key: Any = None,
    ) -> Float[Array, "*batch vocab_size"]:
        """Logits `(..., vocab_size)` in float32 of hidden states `(..., features)`; `key` has no effect."""
        return head_logits(self, *self._operands(hidden, weight))

    def loss(
        self,
        hidden: Float[Array, "*batch features"],
        labels: Int[Array, "*batch"],
        *,
        weight: Float[Array, "vocab_size features"] | None = None,
        **options: Any,
    ) -> Float[Array, ""] | Float[Array, "*batch"]:
        """The cross-entropy of labels.

        Under `jax.vmap` a batch is one kernel call, whose backward computes the logits again; where the hidden states
        of all examples are passed at once, gradients may be made in the forward.

        Args:
            hidden: hidden states `(..., features)`.
            labels: `(...)` integers.
            weight: of a tied head.
            **options: as `ejkernel_ops.linear_cross_entropy`: `z_loss`, `reduction` and so on.

        Returns:
            A scalar, the mean, or what `reduction` says.

        Raises:
            ValueError: shapes that do not fit, or a weight that is missing or given twice.
        """
        return head_loss(self, *self._operands(hidden, weight), labels, options)

    def _operands(self, hidden: Any, given: Any) -> tuple[Any, Any, Any, str]:
        weight = self._weight(given)
        return jnp.asarray(hidden, jnp.result_type(hidden, weight)), weight, self.bias, "oi"

    def _weight(self, given: Any) -> Any:
        """The weight, of the module or of the call."""
        if self.weight is not None:
            if given is not None:
                raise ValueError("weight is given, and the head has its own; make it with tied=True")
            return self.weight
        if given is None:
            raise ValueError("weight is missing: the head is tied; pass that of the embedding")
        if (sizes := jnp.shape(given)) != (self.vocab_size, self.features):
            expected = (self.vocab_size, self.features)
            raise ValueError(f"weight has shape {sizes}; expected (vocab_size, features), {expected}")
        return given
