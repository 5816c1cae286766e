"""`flash_attention`: checks its arguments, puts them in canonical form, calls the kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ...core.partition import require_manual
from ...execution.executor import default_executor
from ..config import as_array, canonical_precision, explicit_config, static_number
from .config import AttentionConfig, compute_dtype
from .dropout import WORDS
from .kernels import ATTENTION, ATTENTION_BWD

__all__ = ["ATTENTION", "ATTENTION_BWD", "flash_attention"]

_FAR = 1 << 30  # a side of a window that is as good as open, and to which a position can be added in int32


def flash_attention(
    query: Float[Array, "batch q_len num_heads head_dim"],
    key: Float[Array, "batch kv_len num_kv_heads head_dim"],
    value: Float[Array, "batch kv_len num_kv_heads v_dim"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    causal: bool = False,
    q_offset: int | str | Int[Array, "..."] = 0,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    logits_soft_cap: float | None = None,
    q_segment_ids: Int[Array, "batch q_len"] | None = None,
    kv_segment_ids: Int[Array, "batch kv_len"] | None = None,
    kv_lengths: Int[Array, "batch"] | None = None,  # noqa: F821
    sinks: Float[Array, "num_heads"] | None = None,  # noqa: F821
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    return_lse: bool = False,
    deterministic: bool = True,
    context_axis: str | None = None,
    precision: Any = None,
    config: AttentionConfig | None = None,
    backend: str | None = None,
    cfg: AttentionConfig | None = None,
) -> Any:
    """Scaled dot-product attention in memory linear in the lengths, differentiable in every float array.

    Logits are `softmax_scale * query @ key`, then soft-capped, then biased, then masked; the softmax is in
    float32 (float64 for float64 inputs). All masks intersect. A query that may see nothing gives 0 and a
    log-sum-exp of -inf, and no gradient anywhere; with `sinks`, a log-sum-exp that is its head's sink, with a
    gradient of the sink alone.

    Args:
        query: `(batch, q_len, num_heads, head_dim)`.
        key: `(batch, kv_len, num_kv_heads, head_dim)`; `num_heads` is a multiple of `num_kv_heads`, and
            query head `h` uses key head `h // (num_heads // num_kv_heads)`.
        value: `(batch, kv_len, num_kv_heads, v_dim)`.
        bias: added to the logits, broadcastable to `(batch, num_heads, q_len, kv_len)`.
        mask: bool, True where a query may see a key, broadcastable likewise.
        causal: query `i` sees key `j` only if `j <= i + q_offset`.
        q_offset: position of the first query among the keys: an int, `"end"` (`kv_len - q_len`), or an int32
            scalar or `(batch,)` array.
        sliding_window: `(left, right)`, inclusive: query `i` sees keys `i + q_offset - left` to
            `i + q_offset + right`; an int `w` is `(w, w)`. With `causal` the right side is 0.
        softmax_scale: default `head_dim ** -0.5`.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        q_segment_ids: a query sees keys of equal id only; negative ids see and are seen by nothing. Needs
            `kv_segment_ids`, unless the lengths are equal.
        kv_segment_ids: the same for keys.
        kv_lengths: number of valid keys of each example, int32.
        sinks: a logit for each query head that takes part in the softmax and has no value.
        dropout_rate: probability of dropping a probability; those kept are divided by `1 - dropout_rate`. The bits
            are Philox of (seed of the example, head, query, key), so they do not depend on block sizes.
        dropout_rng: JAX PRNG key; needed if `dropout_rate` is positive.
        return_lse: also return the log-sum-exp of the logits.
        deterministic: gradients are the same bits in each run; `False` allows faster ways: cuDNN's, which adds in
            any order.
        context_axis: inside `jax.shard_map`, the mesh axis over which the length is split: query, key, value and ids
            are this device's part of it, lengths and offsets count from the start of the whole, and a bias or mask has
            all keys. Keys and values then go around the devices. Elsewhere the sharding of the arrays says all that.
        precision: of the products, as in `jax.lax.Precision`; default JAX's. On a GPU that is TF32 for float32.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"triton"`, `"cudnn"` or `"xla"`; `None` for the best one that can do the call.
        cfg: another spelling of `config`.

    Returns:
        `(batch, q_len, num_heads, v_dim)` in the type of `query`; with `return_lse` also
        `(batch, q_len, num_heads)` in float32 (float64 for float64 inputs), natural logarithm, sinks included.

    Raises:
        ValueError: shapes or options that do not fit together.
        TypeError: an argument of the wrong type: a mask that is not bool, query, key and value of different types.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call, or dropout where devices split a length of keys into parts
            that are no multiple of 4.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
        >>> flash_attention(q, k[:, :, :2], v[:, :, :2], causal=True).shape
        (2, 5, 4, 8)

    Source: blocks that are computed again for gradients: FlashAttention, Dao et al. 2022, arXiv:2205.14135, and Rabe
    and Staats 2021, arXiv:2112.05682; division by the sum at the end, and the log-sum-exp alone saved:
    FlashAttention-2, Dao 2023, arXiv:2307.08691; online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867;
    the bits of dropout, Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    bias, mask, sinks = (
        None if x is None else as_array(name, x) for name, x in (("bias", bias), ("mask", mask), ("sinks", sinks))
    )
    _check_shapes(query, key, value)
    batch, q_len, num_heads, head_dim = query.shape
    kv_len = key.shape[1]
    axes = _context(context_axis, q_len, kv_len)
    shape = (batch, num_heads, q_len, kv_len * (jax.lax.axis_size(context_axis) if axes else 1))
    _check_tile("bias", bias, shape, key.shape[2])
    _check_tile("mask", mask, shape, key.shape[2])
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask is {mask.dtype}; expected bool (True: may be seen); pass additive ones as bias=")
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias is {bias.dtype}; expected a float type; pass bool ones as mask=")
    scale, query = _scale(softmax_scale, query, head_dim)
    static_offset, offset = _offset(q_offset, batch, kv_len - q_len)
    window = _window(sliding_window, causal)
    if not causal and window is None:
        static_offset, offset = 0, None  # it has no effect, so calls with different ones share a key
    q_ids, kv_ids = _segments(q_segment_ids, kv_segment_ids, batch, q_len, kv_len)
    if kv_lengths is not None:
        kv_lengths = _ints("kv_lengths", kv_lengths, (batch,))
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; expected one for each of the {num_heads} query heads")
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks is {sinks.dtype}; expected a float type")
    cap = None if logits_soft_cap is None else static_number("logits_soft_cap", logits_soft_cap)
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"logits_soft_cap is {cap}; expected a positive, finite number or None")
    rate = static_number("dropout_rate", dropout_rate)
    out, lse = default_executor()(
        ATTENTION, query, key, value, _four(bias), _four(mask), offset, q_ids, kv_ids, kv_lengths, sinks,
        _seed(rate, dropout_rng, batch), cfg=explicit_config(AttentionConfig, config, cfg, backend),
        causal=bool(causal), sliding_window=window, static_offset=static_offset, softmax_scale=scale,
        logits_soft_cap=cap, dropout_rate=rate, precision=canonical_precision(precision),
        deterministic=bool(deterministic), mesh_axes=axes,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _context(axis: str | None, q_len: int, kv_len: int) -> dict[str, str]:
    """The names that a mesh axis splits."""
    if axis is None:
        return {}
    require_manual(ATTENTION, {"t": axis}, "context_axis")
    if q_len != kv_len:
        raise ValueError(f"query has length {q_len} and key {kv_len}; with a context_axis expected one length of both")
    return {"t": axis}


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if jnp.ndim(x) != 4:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; expected (batch, length, heads, head_dim)")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is {x.dtype}; expected a float type")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; cast them to one type")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} differ in batch, length or heads; expected "
            "one batch, and one length and number of heads of key and value"
        )
    if query.shape[3] != key.shape[3] or not query.shape[3]:
        raise ValueError(f"query has head_dim {query.shape[3]} and key {key.shape[3]}; expected one, at least 1")
    heads, kv_heads = query.shape[2], key.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key has {kv_heads}: expected a multiple "
            "(for multi-query attention pass 1 key head)"
        )


def _check_tile(name: str, x: Any, shape: tuple[int, ...], kv_heads: int) -> None:
    """A bias or mask must broadcast, axis by axis, to `(batch, num_heads, q_len, kv_len)`."""
    if x is None:
        return
    given = jnp.shape(x)
    full = (1,) * (4 - len(given)) + given
    if len(given) <= 4 and all(n in (1, want) for n, want in zip(full, shape)):
        return
    hint = ""
    if len(given) == 2 and given == (shape[0], shape[3]):
        hint = "; for one row of keys per example reshape it to (batch, 1, 1, kv_len)"
    elif len(full) == 4 and full[1] == kv_heads:
        hint = "; give one for each query head, not for each key head"
    raise ValueError(
        f"{name} has shape {given}, which does not broadcast to (batch, num_heads, q_len, kv_len) = {shape}{hint}"
    )


def _four(x: Any) -> Any:
    return None if x is None else jnp.reshape(x, (1,) * (4 - jnp.ndim(x)) + jnp.shape(x))


def _scale(scale: Any, query: Any, head_dim: int) -> tuple[float, Any]:
    """A static scale; one that is an array goes into the query, so that it has a gradient."""
    if scale is None:
        return head_dim**-0.5, query
    if not isinstance(scale, jax.Array):
        scale = static_number("softmax_scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"softmax_scale is {scale}; expected a finite number")
        return scale, query
    if scale.ndim != 0:
        raise ValueError(f"softmax_scale has shape {scale.shape}; expected a scalar")
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"softmax_scale is {scale.dtype}; expected a float type")
    dtype = compute_dtype(query.dtype)  # a scale in bfloat16 would be off by up to 0.4 %
    return 1.0, (query.astype(dtype) * scale.astype(dtype)).astype(query.dtype)


def _offset(q_offset: Any, batch: int, end: int) -> tuple[int | None, Any]:
    if isinstance(q_offset, str):
        if q_offset != "end":
            raise ValueError(f"q_offset is {q_offset!r}; expected an int, an int32 array or 'end'")
        return end, None
    if isinstance(q_offset, (int, np.integer)) and not isinstance(q_offset, bool):
        if abs(q_offset) >= 1 << 30:
            raise ValueError(f"q_offset is {q_offset}; expected a position that an int32 holds")
        return int(q_offset), None
    q_offset = as_array("q_offset", q_offset)
    if jnp.issubdtype(q_offset.dtype, jnp.integer):  # further is as good, and positions and windows can be added to it
        limits = jnp.iinfo(q_offset.dtype)
        q_offset = jnp.clip(q_offset, max(-_FAR // 2, limits.min), min(_FAR // 2, limits.max))
    if q_offset.ndim == 0:
        q_offset = jnp.broadcast_to(q_offset, (batch,))
    return None, _ints("q_offset", q_offset, (batch,))


def _window(window: Any, causal: bool) -> tuple[int, int] | None:
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in sides):
        raise TypeError(f"sliding_window is {window!r}; expected an int or a pair of ints (left, right)")
    if min(sides) < 0:
        raise ValueError(f"sliding_window is {window}; expected counts of keys that are not negative")
    left, right = (min(int(n), _FAR) for n in sides)
    return left, 0 if causal else right


def _segments(q_ids: Any, kv_ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[Any, Any]:
    if q_ids is None and kv_ids is None:
        return None, None
    if (q_ids is None or kv_ids is None) and q_len != kv_len:
        raise ValueError("q_segment_ids and kv_segment_ids go together where the lengths differ; pass both")
    q_ids, kv_ids = (kv_ids if q_ids is None else q_ids), (q_ids if kv_ids is None else kv_ids)
    return _ints("q_segment_ids", q_ids, (batch, q_len)), _ints("kv_segment_ids", kv_ids, (batch, kv_len))


def _ints(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} is {x.dtype}; expected an int type")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}")
    return x.astype(jnp.int32)


def _seed(rate: float, rng: Any, batch: int) -> jax.Array | None:
    """The words of each example's seed, so that a draw does not depend on the batch that it is part of."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate is {rate}; expected at least 0 and less than 1")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"dropout_rate is {rate} and dropout_rng is None; pass a PRNG key")
    typed = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if typed and rng.shape:
        raise ValueError(f"dropout_rng has shape {rng.shape}; expected one key (for one per example use jax.vmap)")
    if not typed and getattr(rng, "dtype", None) != jnp.uint32:
        raise TypeError(f"dropout_rng is {rng!r}; expected a PRNG key, as of jax.random.key")
    return jnp.pad(jax.random.bits(rng, (batch, 2), jnp.uint32), ((0, 0), (0, WORDS - 2)))
