"""Attention in NumPy as the documentation defines it, with hand-written gradients, and the rules that judge a kernel.

`attention` runs the same formulas in two ways: exactly, in float64 (long double for float64 inputs), and as a plain
program in the type of the inputs would, rounding what such a program stores. A kernel may err at most about as
much as the plain program does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

FLOATS = ("query", "key", "value", "bias", "sinks")  # the arguments that have a gradient


def is_low(dtype: Any) -> bool:
    """Whether a type is shorter than float32."""
    return np.dtype(dtype).itemsize < 4


def epsilon(dtype: Any) -> float:
    """Distance from 1 to the next number of the type that sums are in: float32, or float64 for float64."""
    return float(np.finfo(np.float32 if is_low(dtype) else dtype).eps)


def visible(
    shape: tuple[int, int, int, int],
    *,
    mask: Any = None,
    causal: bool = False,
    q_offset: Any = 0,
    sliding_window: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    kv_lengths: Any = None,
) -> np.ndarray:
    """Which keys each query sees: bool of shape `(batch, num_heads, q_len, kv_len)`."""
    batch, _, q_len, kv_len = shape
    offset = np.asarray(kv_len - q_len if isinstance(q_offset, str) else q_offset)
    at = np.arange(q_len)[:, None] + np.broadcast_to(offset, (batch,))[:, None, None, None]
    keys = np.arange(kv_len)
    seen = np.ones(shape, bool)
    if mask is not None:
        seen &= np.asarray(mask)
    if causal:
        seen &= keys <= at
    if sliding_window is not None:
        left, right = (sliding_window, sliding_window) if isinstance(sliding_window, int) else sliding_window
        seen &= (keys >= at - left) & (keys <= at + (0 if causal else right))
    if q_segment_ids is not None or kv_segment_ids is not None:
        q_ids = np.asarray(kv_segment_ids if q_segment_ids is None else q_segment_ids)[:, None, :, None]
        kv_ids = np.asarray(q_segment_ids if kv_segment_ids is None else kv_segment_ids)[:, None, None, :]
        seen &= (q_ids == kv_ids) & (q_ids >= 0)
    if kv_lengths is not None:
        seen &= keys < np.asarray(kv_lengths)[:, None, None, None]
    return seen


def attention(
    arrays: dict[str, Any],
    *,
    dout: Any = None,
    dlse: Any = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    keep: Any = None,
    plain: bool = False,
    **masks: Any,
) -> dict[str, np.ndarray]:
    """Attention and its gradients.

    Args:
        arrays: `query`, `key`, `value`, and `bias` and `sinks` where there are any.
        dout: cotangent of the output; `None` for no gradients.
        dlse: cotangent of the log-sum-exp; `None` for zero.
        softmax_scale: default `head_dim ** -0.5`.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        keep: dropout's factor of each probability, 0 or `1 / (1 - rate)`, `(batch, num_heads, q_len, kv_len)`.
        plain: compute in the type of the inputs, as a plain program would, instead of exactly.
        **masks: as in `visible`.

    Returns:
        `out`, `lse`, and with `dout` the gradients of `query, key, value, bias, sinks, softmax_scale`.
    """
    arrays = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    query_type = arrays["query"].dtype
    rounded, work = _arithmetic(query_type, plain)
    q, k, v = (arrays[n].astype(work) for n in ("query", "key", "value"))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scale = work(q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    bias = arrays["bias"].astype(work) if "bias" in arrays else work(0)
    sinks = arrays["sinks"].astype(work)[None, :, None, None] if "sinks" in arrays else work(-np.inf)

    raw = np.einsum("bqhd,bkhd->bhqk", q, k)
    capped = raw * scale
    if logits_soft_cap is not None:
        capped = logits_soft_cap * np.tanh(capped / logits_soft_cap)
    scores = np.where(visible(raw.shape, **masks), capped + bias, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sinks)
    top = np.where(np.isfinite(top), top, 0)
    weights, sink_weight = np.exp(scores - top), np.exp(sinks - top)
    total = weights.sum(-1, keepdims=True) + sink_weight
    live, total = total > 0, np.where(total > 0, total, 1)
    probs, sink_prob = weights / total, sink_weight / total
    lse = np.where(live, np.log(total) + top, -np.inf)[..., 0].transpose(0, 2, 1)
    keep = work(1) if keep is None else np.asarray(keep, work)
    out = np.einsum("bhqk,bkhe->bqhe", rounded(probs * keep), v)
    results = {"out": rounded(out, query_type), "lse": lse}
    if dout is None:
        return results

    dout = np.asarray(dout).astype(work)
    dlse = work(0) if dlse is None else np.asarray(dlse).astype(work).transpose(0, 2, 1)[..., None]
    dprobs = rounded(np.einsum("bqhe,bkhe->bhqk", dout, v)) * keep
    mean = (probs * dprobs).sum(-1, keepdims=True)
    dscores = probs * (dprobs - mean + dlse)
    dlogits = dscores if logits_soft_cap is None else dscores * (1 - (capped / logits_soft_cap) ** 2)
    low = rounded(dlogits)
    gradients = {
        "query": np.einsum("bhqk,bkhd->bqhd", low, k) * scale,
        "key": _over_groups(np.einsum("bhqk,bqhd->bkhd", low, q) * scale, group),
        "value": _over_groups(np.einsum("bhqk,bqhe->bkhe", rounded(probs * keep), dout), group),
        "softmax_scale": (dlogits * raw).sum(),
    }
    if "bias" in arrays:
        gradients["bias"] = _over_broadcast(dscores, arrays["bias"].shape)
    if "sinks" in arrays:
        gradients["sinks"] = (sink_prob * (dlse - mean)).sum((0, 2, 3))
    return results | {n: rounded(g, arrays[n].dtype if n in arrays else work) for n, g in gradients.items()}


def _arithmetic(dtype: Any, plain: bool) -> tuple[Callable, Any]:
    """How a value is stored, and the type that sums are in."""
    if not plain:
        return (lambda x, dtype=None: x), (np.longdouble if np.dtype(dtype).itemsize == 8 else np.float64)
    work = np.float32 if is_low(dtype) else np.dtype(dtype).type
    return (lambda x, to=dtype: x.astype(to).astype(work)), work


def _over_groups(x: np.ndarray, group: int) -> np.ndarray:
    """Sums the gradient of a key or value head over the query heads that share it."""
    return x.reshape(*x.shape[:2], x.shape[2] // group, group, x.shape[3]).sum(3)


def _over_broadcast(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums a gradient over the axes that an argument of this shape was broadcast along."""
    full = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(a for a, n in enumerate(full) if n == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


def assert_as_good_as_plain(actual: dict[str, Any], exact: dict[str, Any], plain: dict[str, Any], dtype: Any) -> None:
    """Checks results, by name, against the error that a plain program makes.

    Largest error at most twice, and root mean square error at most 1.5 times that of the plain program, both
    against the exact result; plus a few roundings of the sums' type where that program happens to make no error.
    """
    for name, value in actual.items():
        got, want, naive = (np.asarray(x).astype(np.longdouble) for x in (value, exact[name], plain[name]))
        assert got.shape == want.shape, f"{name} has shape {got.shape}; expected {want.shape}"
        infinite = np.isinf(want)
        np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=f"{name} where it is infinite")
        got, want, naive = (x[~infinite] for x in (got, want, naive))
        assert np.isfinite(got).all(), f"{name} has {np.sum(~np.isfinite(got))} values that are not finite"
        if not got.size:
            continue
        error, allowed, floor = np.abs(got - want), np.abs(naive - want), epsilon(dtype) * max(1, np.abs(want).max())
        most, bound = error.max(), 2 * allowed.max() + 8 * floor
        assert most <= bound, f"{name}: largest error {most:.3g}, allowed {bound:.3g}"
        rms, bound = np.sqrt((error**2).mean()), 1.5 * np.sqrt((allowed**2).mean()) + 2 * floor
        assert rms <= bound, f"{name}: root mean square error {rms:.3g}, allowed {bound:.3g}"


def probe_arrays(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of the same shapes for which attention is the mean index of the keys that each query sees, and 1."""
    key, value = np.asarray(arrays["key"]), np.asarray(arrays["value"])
    probe = np.zeros_like(value)
    probe[..., 0], probe[..., 1] = np.arange(value.shape[1])[None, :, None], 1
    return {"query": np.zeros_like(arrays["query"]), "key": key, "value": probe}


def assert_uniform(out: Any, shape: tuple[int, int, int, int], **masks: Any) -> None:
    """Checks the output for `probe_arrays`: any key that is lost or leaked shows, whatever its weight would be."""
    seen = visible(shape, **masks).transpose(0, 2, 1, 3)
    count = seen.sum(-1)
    mean = (seen * np.arange(shape[3])).sum(-1) / np.maximum(count, 1)
    np.testing.assert_allclose(np.asarray(out)[..., 0], mean, rtol=1e-5, err_msg="mean index of the visible keys")
    np.testing.assert_allclose(np.asarray(out)[..., 1], count > 0, rtol=1e-5, err_msg="sum of the probabilities")


def bfloat16(x: Any) -> np.ndarray:
    """An array rounded to bfloat16."""
    return np.asarray(x).astype(ml_dtypes.bfloat16)
