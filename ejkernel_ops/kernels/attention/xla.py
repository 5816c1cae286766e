"""Attention on XLA: blocks of queries and keys with an online softmax, O(length) memory, both directions.

One scan visits the blocks that causality and the window leave; what it visits and how blocks are masked is
the same in both directions. Source: Rabe, Staats, arXiv:2112.05682; Dao, arXiv:2307.08691.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...utils.varying import equally_varying
from .config import compute_dtype
from .dropout import keep_bits

_NEG_INF = -float("inf")


@dataclasses.dataclass(frozen=True)
class Statics:
    """The arguments of attention that are not arrays."""

    causal: bool
    sliding_window: tuple[int, int] | None
    static_offset: int | None
    softmax_scale: float
    logits_soft_cap: float | None
    dropout_rate: float
    precision: Any
    deterministic: bool = True


@dataclasses.dataclass
class Operands:
    """The arrays of attention, heads first and lengths padded to blocks.

    `query` is `(batch, kv_heads, group, q_len, head_dim)`, `key` and `value` `(batch, kv_heads, kv_len, ...)`,
    `bias` and `mask` `(batch, kv_heads, group, q_len, kv_len)` with axes of length 1 where they broadcast.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    q_offset: jax.Array | None
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    kv_lengths: jax.Array | None
    sinks: jax.Array | None
    dropout_seed: jax.Array | None


def _slice(x: jax.Array, index: Any, size: int, axis: int) -> jax.Array:
    """Block `index` along an axis; the whole axis where it broadcasts."""
    return x if x.shape[axis] == 1 and size != 1 else jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _add(total: jax.Array, block: jax.Array, index: Any, size: int, axis: int) -> jax.Array:
    """Adds a block into its place along an axis."""
    return _put(total, _slice(total, index, size, axis) + block, index, size, axis)


def _put(total: jax.Array, block: jax.Array, index: Any, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(total, block, index * size, axis)


class Blocks:
    """The blocks of one call: which there are, and the scores and visibility of each."""

    def __init__(self, x: Operands, statics: Statics, q_len: int, kv_len: int, block_q: int, block_kv: int):
        self.x, self.s = x, statics
        self.q_len, self.kv_len, self.block_q, self.block_kv = q_len, kv_len, block_q, block_kv
        self.dtype = compute_dtype(x.query.dtype)

    def pairs(self) -> np.ndarray:
        """The `(query block, key block)` pairs in which a static mask leaves something to see."""
        rows = np.arange(-(-self.q_len // self.block_q))[:, None] * self.block_q
        cols = np.arange(-(-self.kv_len // self.block_kv))[None, :] * self.block_kv
        seen = np.ones((rows.shape[0], cols.shape[1]), bool)
        if self.s.static_offset is not None:
            first, last = (
                rows + self.s.static_offset,
                np.minimum(rows + self.block_q, self.q_len) - 1 + self.s.static_offset,
            )
            if self.s.causal:
                seen &= cols <= last
            if self.s.sliding_window is not None:
                left, right = self.s.sliding_window
                seen &= (cols + self.block_kv - 1 >= first - left) & (cols <= last + right)
        return np.argwhere(seen).astype(np.int32)

    def scan(self, body: Callable, carry: tuple) -> tuple:
        """Folds `body(carry, i, j)` over the pairs."""
        pairs = self.pairs()
        carry = tuple(equally_varying(carry, self.x.query, self.x.key))
        if len(pairs) <= 1:
            return body(carry, *(int(n) for n in pairs[0])) if len(pairs) else carry
        return jax.lax.scan(lambda c, ij: (body(c, ij[0], ij[1]), None), carry, jnp.asarray(pairs))[0]

    def query(self, x: jax.Array, i: Any) -> jax.Array:
        """Block `i` of an array with queries on axis 3, its group and query axes joined."""
        return _rows(_slice(x, i, self.block_q, 3))

    def key(self, x: jax.Array, j: Any) -> jax.Array:
        """Block `j` of an array with keys on axis 2."""
        return _slice(x, j, self.block_kv, 2)

    def scores(self, i: Any, j: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Capped logits without and with bias, and what is visible (`None`: all of it)."""
        x, group = self.x, self.x.query.shape[2]
        logits = self.dot("bkqd,bksd->bkqs", self.query(x.query, i), self.key(x.key, j))
        logits = logits.reshape(*logits.shape[:2], group, self.block_q, self.block_kv) * self.s.softmax_scale
        if self.s.logits_soft_cap is not None:
            logits = self.s.logits_soft_cap * jnp.tanh(logits / self.s.logits_soft_cap)
        biased = logits if x.bias is None else logits + self._tile(x.bias, i, j).astype(self.dtype)
        return logits, biased, self.visible(i, j)

    def _tile(self, x: jax.Array, i: Any, j: Any) -> jax.Array:
        return _slice(_slice(x, i, self.block_q, 3), j, self.block_kv, 4)

    def visible(self, i: Any, j: Any) -> jax.Array | None:
        """Which keys each query of a block may see, broadcastable to the scores; `None`: all."""
        x, s = self.x, self.s
        rows = i * self.block_q + jnp.arange(self.block_q)[:, None]
        cols = j * self.block_kv + jnp.arange(self.block_kv)[None, :]
        parts = []
        if self.kv_len % self.block_kv:
            parts.append(cols < self.kv_len)
        if s.causal or s.sliding_window is not None:
            offset = s.static_offset if x.q_offset is None else x.q_offset[:, None, None, None, None]
            at = rows + offset
            if s.causal:
                parts.append(cols <= at)
            if s.sliding_window is not None:
                left, right = s.sliding_window
                parts.append((cols >= at - left) & (cols <= at + right))
        if x.kv_lengths is not None:
            parts.append(cols < x.kv_lengths[:, None, None, None, None])
        if x.q_segment_ids is not None and x.kv_segment_ids is not None:
            q_ids = _slice(x.q_segment_ids, i, self.block_q, 1)[:, None, None, :, None]
            kv_ids = _slice(x.kv_segment_ids, j, self.block_kv, 1)[:, None, None, None, :]
            parts.append((q_ids == kv_ids) & (q_ids >= 0))
        if x.mask is not None:
            parts.append(self._tile(x.mask, i, j))
        if not parts:
            return None
        seen = parts[0]
        for part in parts[1:]:
            seen = seen & part
        return seen

    def kept(self, i: Any, j: Any) -> jax.Array | None:
        """Dropout's factor of each probability: 0 or `1 / (1 - rate)`; `None` without dropout."""
        rate = self.s.dropout_rate
        if not rate or self.x.dropout_seed is None:
            return None
        _, kv_heads, group, _, _ = self.x.query.shape
        heads = jnp.arange(kv_heads * group).reshape(kv_heads, group)
        rows = i * self.block_q + jnp.arange(self.block_q)
        keep = keep_bits(self.x.dropout_seed, heads, rows, j * self.block_kv, self.block_kv, rate)
        # The backward reads it twice, and without this makes it twice; on a CPU XLA of jax 0.10 does so anyway.
        keep = jax.lax.optimization_barrier(keep)
        return keep.astype(self.dtype) / (1.0 - rate)

    def dot(self, spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
        """A product with sums in the compute type; operands in the type of the inputs."""
        dtype = self.x.value.dtype
        return jnp.einsum(
            spec, left.astype(dtype), right.astype(dtype), precision=self.s.precision, preferred_element_type=self.dtype
        )


def _rows(x: jax.Array) -> jax.Array:
    """Joins group and query axes: `(b, k, g, q, d)` to `(b, k, g q, d)`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _finite(x: jax.Array) -> jax.Array:
    """-inf as 0, so that differences of row maxima are no NaN."""
    return jnp.where(x == _NEG_INF, jnp.zeros_like(x), x)


def forward(x: Operands, statics: Statics, q_len: int, kv_len: int, block_q: int, block_kv: int):
    """Output `(batch, kv_heads, group, q_len, v_dim)` and log-sum-exp `(batch, kv_heads, group, q_len)`."""
    blocks = Blocks(x, statics, q_len, kv_len, block_q, block_kv)
    lead, dtype = x.query.shape[:4], blocks.dtype
    group = lead[2]

    def body(carry, i, j):
        out, top, total = carry
        _, scores, seen = blocks.scores(i, j)
        if seen is not None:
            scores = jnp.where(seen, scores, _NEG_INF)
        old = _slice(top, i, block_q, 3)
        new = jnp.maximum(old, jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        probs = jnp.exp(scores - _finite(new))
        fade = jnp.exp(old - _finite(new))
        total = _put(total, _slice(total, i, block_q, 3) * fade + probs.sum(-1, keepdims=True), i, block_q, 3)
        if (kept := blocks.kept(i, j)) is not None:
            probs = probs * kept
        part = blocks.dot("bkqs,bkse->bkqe", _rows(probs), blocks.key(x.value, j))
        part = part.reshape(*part.shape[:2], group, block_q, part.shape[-1])
        out = _put(out, _slice(out, i, block_q, 3) * fade + part, i, block_q, 3)
        return out, _put(top, new, i, block_q, 3), total

    start = (
        jnp.zeros((*lead, x.value.shape[-1]), dtype),
        jnp.full((*lead, 1), _NEG_INF, dtype),
        jnp.zeros((*lead, 1), dtype),
    )
    out, top, total = blocks.scan(body, start)
    if x.sinks is not None:
        sinks = x.sinks.reshape(1, lead[1], group, 1, 1).astype(dtype)
        new = jax.lax.stop_gradient(jnp.maximum(top, sinks))
        fade = jnp.exp(top - _finite(new))
        out, total, top = out * fade, total * fade + jnp.exp(sinks - _finite(new)), new
    empty = total == 0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    lse = jnp.where(empty, _NEG_INF, jnp.log(safe) + _finite(top))
    return out / safe, lse[..., 0]


def backward(x: Operands, out, lse, dout, dlse, statics: Statics, needs, q_len, kv_len, block_q, block_kv):
    """Gradients of query, key, value, bias and sinks, each `None` where `needs` is false.

    Arrays have the layouts of `Operands`; `out` and `dout` that of `forward`'s output.
    """
    live = lse[..., None] > _NEG_INF  # what reaches the other rows, NaN included, makes no gradient
    x = dataclasses.replace(x, query=jnp.where(live, x.query, jnp.zeros_like(x.query)))
    dout = jnp.where(live, dout, jnp.zeros_like(dout))
    dlse = None if dlse is None else jnp.where(live[..., 0], dlse, jnp.zeros_like(dlse))
    blocks = Blocks(x, statics, q_len, kv_len, block_q, block_kv)
    dtype, group = blocks.dtype, x.query.shape[2]
    need_q, need_k, need_v, need_bias, need_sinks = needs
    delta = (out.astype(dtype) * dout.astype(dtype)).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - dlse.astype(dtype)[..., None]
    lse = lse.astype(dtype)[..., None]

    def body(grads, i, j):
        grads = list(grads)
        capped, scores, seen = blocks.scores(i, j)
        row_lse = _slice(lse, i, block_q, 3)
        seen = row_lse > _NEG_INF if seen is None else seen & (row_lse > _NEG_INF)
        probs = jnp.exp(jnp.where(seen, scores - _finite(row_lse), _NEG_INF))
        kept = blocks.kept(i, j)
        row_dout = blocks.query(dout, i)
        if need_v:
            weights = _rows(probs if kept is None else probs * kept)
            grads[2] = _add(grads[2], blocks.dot("bkqs,bkqe->bkse", weights, row_dout), j, block_kv, 2)
        if not (need_q or need_k or need_bias):
            return tuple(grads)
        dprobs = blocks.dot("bkqe,bkse->bkqs", row_dout, blocks.key(x.value, j)).reshape(probs.shape)
        dprobs = dprobs if kept is None else dprobs * kept
        dscores = jnp.where(seen, probs * (dprobs - _slice(delta, i, block_q, 3)), 0.0)
        if need_bias:
            grads[3] = _add_bias(grads[3], dscores, i, j, block_q, block_kv)
        if statics.logits_soft_cap is not None:
            dscores = dscores * (1.0 - jnp.square(capped / statics.logits_soft_cap))
        rows = _rows(dscores)
        if need_q:
            part = blocks.dot("bkqs,bksd->bkqd", rows, blocks.key(x.key, j))
            grads[0] = _add(grads[0], part.reshape(*part.shape[:2], group, block_q, part.shape[-1]), i, block_q, 3)
        if need_k:
            grads[1] = _add(grads[1], blocks.dot("bkqs,bkqd->bksd", rows, blocks.query(x.query, i)), j, block_kv, 2)
        return tuple(grads)

    empty = jnp.zeros((), dtype)
    like = (x.query, x.key, x.value, x.bias)
    start = tuple(jnp.zeros(a.shape, dtype) if n and a is not None else empty for a, n in zip(like, needs))
    dq, dk, dv, dbias = blocks.scan(body, start)
    dsinks = None
    if need_sinks and x.sinks is not None:
        probs = jnp.exp(x.sinks.reshape(1, -1, group, 1, 1).astype(dtype) - _finite(lse))
        dsinks = jnp.where(lse > _NEG_INF, -probs * delta, 0.0).sum((0, 3, 4)).reshape(-1)
    scale = statics.softmax_scale
    return (
        dq * scale if need_q else None,
        dk * scale if need_k else None,
        dv if need_v else None,
        dbias if need_bias else None,
        dsinks,
    )


def _add_bias(total: jax.Array, dscores: jax.Array, i: Any, j: Any, block_q: int, block_kv: int) -> jax.Array:
    """Adds a block of score gradients into the gradient of a bias, summed over the axes that it broadcasts."""
    summed = [axis for axis in range(5) if total.shape[axis] == 1 and dscores.shape[axis] != 1]
    block = dscores.sum(summed, keepdims=True)
    tile = _slice(_slice(total, i, block_q, 3), j, block_kv, 4)
    starts = [0, 0, 0, i * block_q if total.shape[3] > 1 else 0, j * block_kv if total.shape[4] > 1 else 0]
    return jax.lax.dynamic_update_slice(total, tile + block, [jnp.asarray(n, jnp.int32) for n in starts])
