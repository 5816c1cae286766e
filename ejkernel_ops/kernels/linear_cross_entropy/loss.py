"""The loss of a chunk of logits and its gradient, as documented in `op.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..rows import accumulated, product

IGNORED = -1  # the label of rows that count nothing; one of the vocabulary's size or more is an error, and gives NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """What is static about a loss."""

    weight_layout: str = "io"
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logits_dtype: str | None = None  # in which products are made; `None`: that of the sums
    vocab_axes: tuple[str, ...] = ()  # mesh axes that split the vocabulary: of the weight a device has a part of it

    def vocab(self, weight: Any) -> int:
        """The size of the whole vocabulary."""
        own = weight.shape[self.vocab_axis]
        return own * jax.lax.axis_size(self.vocab_axes) if self.vocab_axes else own

    def first(self, weight: Any) -> Any:
        """The number of the first entry of the vocabulary that this device has."""
        return jax.lax.axis_index(self.vocab_axes) * weight.shape[self.vocab_axis] if self.vocab_axes else 0

    def joined(self, sums: Sums) -> Sums:
        """What is known of rows on all devices that have a part of the vocabulary, who tell each other four numbers."""
        if not self.vocab_axes:
            return sums
        own = jnp.stack([jax.lax.stop_gradient(sums.top), sums.exps, sums.picked, sums.total])
        tops, exps, picked, totals = jnp.moveaxis(jax.lax.all_gather(own, self.vocab_axes), 1, 0)
        top = tops.max(0)
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        return Sums(top, (exps * jnp.exp(tops - finite)).sum(0), picked.sum(0), totals.sum(0))

    @property
    def vocab_axis(self) -> int:
        """The axis of the weight that is the vocabulary's."""
        return 1 if self.weight_layout == "io" else 0

    def made(self, hidden: Any, weight: Any) -> Any:
        """The type of products."""
        return accumulated(hidden, weight) if self.logits_dtype is None else jnp.dtype(self.logits_dtype)

    def product(self, hidden: jax.Array, weight: jax.Array, precision: Any) -> jax.Array:
        """Logits `(rows, vocab)` without bias and cap, in their type."""
        return product(hidden, weight, self.weight_layout, self.made(hidden, weight), precision)

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, precision: Any) -> jax.Array:
        """Logits `(rows, vocab)` in float32, float64 for float64 inputs, after rounding to their type."""
        return self.from_product(self.product(hidden, weight, precision).astype(accumulated(hidden, weight)), bias)

    def from_product(self, product: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Logits in the type of sums, from a product without bias and cap."""
        logits = product.astype(accumulated(product))
        if bias is not None:
            logits = logits + bias.astype(logits.dtype)
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def losses(self, labels: jax.Array, sums: Sums, vocab: int) -> jax.Array:
        """The loss of each row; the largest logit is taken off first, so that a common shift costs no digits."""
        target = sums.picked
        if self.label_smoothing:
            target = (1 - self.label_smoothing) * target + self.label_smoothing / vocab * sums.total
        losses = (sums.finite_top - target) + jnp.log(sums.exps)
        if self.z_loss:
            losses = losses + self.z_loss * jnp.square(sums.finite_top + jnp.log(sums.exps))
        return counted(losses, labels, vocab)

    def gradient(
        self, logits: jax.Array, labels: jax.Array, sums: Sums, scale: jax.Array, first: Any, vocab: int
    ) -> jax.Array:
        """The gradient of `sum(scale * losses)` by `hidden @ weight + bias`, in a chunk of logits from `first`."""
        scale = counted(scale, labels, vocab)
        by_lse = scale / sums.exps
        if self.z_loss:
            by_lse = by_lse * (1 + 2 * self.z_loss * (sums.finite_top + jnp.log(sums.exps)))
        gradient = jnp.exp(logits - sums.finite_top[:, None]) * by_lse[:, None]
        is_label = labels[:, None] == first + jnp.arange(logits.shape[1], dtype=labels.dtype)
        gradient = gradient - jnp.where(is_label, ((1 - self.label_smoothing) * scale)[:, None], 0.0)
        if self.label_smoothing:
            gradient = gradient - (self.label_smoothing / vocab * scale)[:, None]
        return gradient if self.soft_cap is None else gradient * (1 - jnp.square(logits / self.soft_cap))


def counted(numbers: jax.Array, labels: jax.Array, vocab: int) -> jax.Array:
    """A number of each row: 0 where its label is ignored, NaN where it is out of range."""
    return jnp.where(labels == IGNORED, 0.0, jnp.where(labels < vocab, numbers, jnp.nan))


@dataclasses.dataclass(frozen=True)
class Sums:
    """What is known of rows after some chunks of their logits: the largest, exponentials less it, the label's, all."""

    top: Any
    exps: Any
    picked: Any
    total: Any

    @classmethod
    def none(cls, rows: int, dtype: Any) -> Sums:
        """Before the first chunk."""
        zeros = jnp.zeros(rows, dtype)
        return cls(jnp.full(rows, -jnp.inf, dtype), zeros, zeros, zeros)

    def plus(self, logits: jax.Array, labels: jax.Array, first: Any) -> Sums:
        """With a chunk more, whose first column is `first`."""
        top = jnp.maximum(self.top, jax.lax.stop_gradient(logits).max(1))
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        exps = self.exps * jnp.exp(self.top - finite) + jnp.exp(logits - finite[:, None]).sum(1)
        place = labels - first
        inside = (place >= 0) & (place < logits.shape[1])
        picked = jnp.take_along_axis(logits, jnp.where(inside, place, 0)[:, None], 1)[:, 0]
        return Sums(top, exps, self.picked + jnp.where(inside, picked, 0.0), self.total + logits.sum(1))

    @property
    def finite_top(self) -> jax.Array:
        """The largest logit, 0 of a row that has none."""
        return jnp.where(self.top == -jnp.inf, 0.0, self.top)


jax.tree_util.register_dataclass(Sums, ["top", "exps", "picked", "total"], [])
