"""The ops in NumPy as documented, with hand-written gradients, and the rules that judge a kernel.

Each runs the same formulas in two ways: exactly, in float64 (long double for float64 inputs), and as a plain program
in the type of the inputs would: softmax and sums in float32, but probabilities, products and results rounded as they
are stored. A kernel may err at most about as much as the plain program does. For its backward that program keeps what
the attention kernels keep, output and not probabilities: where one key has nearly all the weight, the rounding of the
output is all the error there is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest


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
    rounded, work = _arithmetic(arrays["query"].dtype, plain)
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
    out = rounded(np.einsum("bhqk,bkhe->bqhe", rounded(probs * keep), v))
    results = {"out": out, "lse": lse}
    if dout is None:
        return results

    dout = np.asarray(dout).astype(work)
    dlse = work(0) if dlse is None else np.asarray(dlse).astype(work).transpose(0, 2, 1)[..., None]
    dprobs = rounded(np.einsum("bqhe,bkhe->bhqk", dout, v)) * keep
    mean = np.einsum("bqhe,bqhe->bhq", out, dout)[..., None]  # of dprobs
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


def linear(
    arrays: dict[str, Any],
    *,
    dout: Any,
    activation: str | None = None,
    weight_layout: str = "io",
    preferred_element_type: Any = None,
    plain: bool = False,
) -> dict[str, np.ndarray]:
    """`activation(x @ weight + bias)` as `out`, and the gradients of `x`, `weight` and `bias`; `x` has rows."""
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    dtype = np.promote_types(arrays["x"].dtype, arrays["weight"].dtype)
    out_dtype = np.dtype(dtype if preferred_element_type is None else preferred_element_type)
    rounded, work = _arithmetic(dtype, plain)
    x, weight = (arrays[n].astype(work) for n in ("x", "weight"))
    weight = weight if weight_layout == "io" else weight.T
    preact = rounded(x @ weight, out_dtype)
    if "bias" in arrays:
        preact = rounded(preact + arrays["bias"].astype(work), out_dtype)
    value, slope = (preact, 1) if activation is None else ACTIVATIONS[activation](preact)
    dpreact = rounded(np.asarray(dout).astype(work) * slope)
    flat_x, flat_d = x.reshape(-1, x.shape[-1]), dpreact.reshape(-1, dpreact.shape[-1])
    dweight = flat_x.T @ flat_d
    gradients = {
        "x": dpreact @ weight.T,
        "weight": dweight if weight_layout == "io" else dweight.T,
        "bias": flat_d.sum(0),
    }
    return {"out": rounded(value, out_dtype)} | {n: rounded(gradients[n], a.dtype) for n, a in arrays.items()}


def gated_linear(
    arrays: dict[str, Any], *, dout: Any, activation: str = "silu", weight_layout: str = "io", plain: bool = False
) -> dict[str, np.ndarray]:
    """`activation(x @ gate_weight + gate_bias) * (x @ up_weight + up_bias)` as `out`, and all gradients."""
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    fused = "up_weight" not in arrays
    dtype = np.result_type(*(arrays[n].dtype for n in ("x", "gate_weight", "up_weight") if n in arrays))
    rounded, work = _arithmetic(dtype, plain)

    def flipped(x: np.ndarray) -> np.ndarray:
        return x if weight_layout == "io" else x.T

    x, gate_weight = arrays["x"].astype(work), flipped(arrays["gate_weight"].astype(work))
    pair = np.split(gate_weight, 2, 1) if fused else [gate_weight, flipped(arrays["up_weight"].astype(work))]
    biases = [arrays[n].astype(work) if n in arrays else 0 for n in ("gate_bias", "up_bias")]
    gate, up = (rounded(x @ w + b) for w, b in zip(pair, biases))
    value, slope = ACTIVATIONS[activation](gate)
    dout = np.asarray(dout).astype(work)
    grads = [rounded(dout * up * slope), rounded(dout * value)]
    flat_x, flat = x.reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in grads]
    weights = [flat_x.T @ g for g in flat]
    gradients = {
        "x": sum(g @ w.T for g, w in zip(grads, pair)),
        "gate_weight": flipped(np.concatenate(weights, 1) if fused else weights[0]),
        "up_weight": flipped(weights[1]),
        "gate_bias": flat[0].sum(0),
        "up_bias": flat[1].sum(0),
    }
    return {"out": rounded(value * up)} | {n: rounded(gradients[n], a.dtype) for n, a in arrays.items()}


def mlp(
    arrays: dict[str, Any], *, dout: Any, activation: str = "gelu", weight_layout: str = "io", plain: bool = False
) -> dict[str, np.ndarray]:
    """`activation(x @ up_weight + up_bias) @ down_weight + down_bias`, gated or not, as layers; all gradients."""
    dtype = np.result_type(*(np.asarray(a).dtype for n, a in arrays.items() if not n.endswith("bias")))
    rounded, _ = _arithmetic(dtype, plain)
    options = {"weight_layout": weight_layout, "plain": plain}
    gated = "gate_weight" in arrays

    def layer(name: str, dout: Any, activation: str | None = None, x: Any = arrays["x"]) -> dict[str, np.ndarray]:
        given = {n: arrays[f"{name}_{n}"] for n in ("weight", "bias") if f"{name}_{n}" in arrays}
        return linear({"x": x, **given}, dout=dout, activation=activation, **options)

    features = arrays["up_weight"].shape[1 if weight_layout == "io" else 0]
    first, none = "gate" if gated else "up", np.zeros((*np.shape(arrays["x"])[:-1], features))
    value, up = layer(first, none, activation)["out"], layer("up", none)["out"] if gated else 1
    hidden = rounded(value * up)
    down = layer("down", dout, x=hidden.astype(dtype) if plain else hidden)
    made = {"down": down, first: layer(first, rounded(down["x"] * up), activation)}
    if gated:
        made["up"] = layer("up", rounded(down["x"] * value))
    gradients = {f"{name}_{n}": g for name, gs in made.items() for n, g in gs.items()}
    gradients["x"] = sum(rounded(made[n]["x"]) for n in ("up", "gate") if n in made)
    return {"out": down["out"]} | {n: rounded(gradients[n], np.asarray(a).dtype) for n, a in arrays.items()}


def linear_cross_entropy(
    arrays: dict[str, Any],
    labels: Any,
    *,
    dout: Any = 1.0,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight_layout: str = "io",
    logits_dtype: Any = None,
    plain: bool = False,
) -> dict[str, np.ndarray]:
    """The loss as `out`, and the gradients of `hidden`, `weight`, `bias` and `token_weights`."""
    arrays, labels = {name: np.asarray(x) for name, x in arrays.items()}, np.asarray(labels)
    dtype = np.promote_types(arrays["hidden"].dtype, arrays["weight"].dtype)
    rounded, work = _arithmetic(dtype, plain)
    hidden, weight = (arrays[n].astype(work) for n in ("hidden", "weight"))
    weight = weight if weight_layout == "io" else weight.T
    shape, vocab = labels.shape, weight.shape[1]
    hidden, labels = hidden.reshape(-1, weight.shape[0]), labels.reshape(-1)
    counted = labels != ignore_index
    hidden = np.where(counted[:, None], hidden, 0)
    hit = (labels[:, None] == np.arange(vocab)) & counted[:, None]
    made = np.dtype(logits_dtype or (dtype if dtype.name == "bfloat16" else work))
    raw = rounded(hidden @ weight, made) + (arrays["bias"].astype(work) if "bias" in arrays else 0)
    logits = raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
    top = logits.max(1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(1, keepdims=True)) + top
    target = (1 - label_smoothing) * hit + label_smoothing / vocab
    losses = np.where(counted, (lse - (target * logits).sum(1, keepdims=True) + z_loss * lse**2)[:, 0], 0)
    weights = np.where(counted, arrays["token_weights"].astype(work).reshape(-1) if "token_weights" in arrays else 1, 0)
    total = weights.sum() if reduction == "mean" and weights.sum() else work(1)
    each = losses * weights / total
    dout = np.broadcast_to(np.asarray(dout).astype(work).reshape(-1), labels.shape)
    scale = np.where(counted, dout * weights / total, 0)[:, None]
    dlogits = scale * (np.exp(logits - lse) * (1 + 2 * z_loss * lse) - target)
    if logits_soft_cap is not None:
        dlogits = dlogits * (1 - (logits / logits_soft_cap) ** 2)
    low = rounded(dlogits)
    dweight = hidden.T @ low
    each_dout = dout * losses
    shared = (each_dout * weights).sum() / (total * total) if reduction == "mean" else 0  # as differentiation has it
    gradients = {
        "hidden": (low @ weight.T).reshape(*shape, -1),
        "weight": dweight if weight_layout == "io" else dweight.T,
        "bias": rounded(dlogits, made).sum(0),
        "token_weights": np.where(counted, each_dout / total - shared, 0).reshape(shape),
    }
    out = each.reshape(shape) if reduction == "none" else each.sum()
    return {"out": out} | {n: rounded(gradients[n], a.dtype) for n, a in arrays.items()}


def rms_norm(arrays: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Each row of `x` (plus `residual`) over its root mean square: results as those of `layer_norm`."""
    return _norm(arrays, centred=False, **options)


def layer_norm(arrays: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Each row of `x` (plus `residual`) less its mean, over its standard deviation.

    Args:
        arrays: `x`, and `scale`, `bias` and `residual` where there are any.
        **options: `dout` and `dsummed`, the cotangents; `epsilon`; `plain` as in `attention`.

    Returns:
        `out`, `summed` with a residual, and the gradient of each array.
    """
    return _norm(arrays, centred=True, **options)


def _norm(
    arrays: dict[str, Any],
    *,
    centred: bool,
    dout: Any,
    dsummed: Any = 0,
    epsilon: float = 1e-6,
    plain: bool = False,
) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    rows = [arrays[n] for n in ("x", "residual") if n in arrays]
    rounded, work = _arithmetic(np.result_type(*[a.dtype for a in rows]), plain)
    total = rounded(sum(a.astype(work) for a in rows))
    away = total - total.mean(-1, keepdims=True) if centred else total
    rstd = 1 / np.sqrt((away * away).mean(-1, keepdims=True) + work(epsilon))
    xhat, dout = away * rstd, np.asarray(dout).astype(work)
    scale, bias = (arrays[n].astype(work) if n in arrays else work(n == "scale") for n in ("scale", "bias"))
    inner = dout * scale
    mean = inner.mean(-1, keepdims=True) if centred else 0
    dtotal = rstd * (inner - mean - xhat * (inner * xhat).mean(-1, keepdims=True)) + np.asarray(dsummed).astype(work)
    over_rows = tuple(range(dout.ndim - 1))
    gradients = {
        "x": dtotal, "residual": dtotal, "scale": (dout * xhat).sum(over_rows), "bias": dout.sum(over_rows)
    }  # fmt: skip
    results = {"out": rounded(xhat * scale + bias)} | ({"summed": total} if "residual" in arrays else {})
    return results | {n: rounded(gradients[n], a.dtype) for n, a in arrays.items()}


def rotary(
    x: Any,
    positions: Any,
    *,
    dout: Any,
    theta: float = 10000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
    scaling: Any = None,
    plain: bool = False,
) -> dict[str, np.ndarray]:
    """Rotary embedding as `out`, and the gradient of `x`; `positions` are `(length,)` or `(batch, length)`."""
    x = np.asarray(x)
    rounded, work = _arithmetic(x.dtype, plain)
    features = round(fraction * x.shape[-1])
    freqs, factor = rotary_frequencies(theta, features, scaling)
    angles = (np.asarray(positions).astype(work)[..., None] * np.asarray(freqs).astype(work))[..., None, :]
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    half = features // 2
    even, odd = (slice(0, features, 2), slice(1, features, 2)) if interleaved else (slice(half), slice(half, features))

    def turned(x: np.ndarray, sin: np.ndarray) -> np.ndarray:
        x = np.asarray(x).astype(work)
        out = x.copy()
        out[..., even] = x[..., even] * cos - x[..., odd] * sin
        out[..., odd] = x[..., odd] * cos + x[..., even] * sin
        return rounded(out)

    return {"out": turned(x, sin), "x": turned(dout, -sin)}


def rotary_frequencies(theta: float, features: int, scaling: Any) -> tuple[list[float], float]:
    """The angle of each pair for one position, by the published formulas one by one, and the factor of cos and sin."""
    plain = [theta ** (-2 * i / features) for i in range(features // 2)]
    if scaling is None:
        return plain, 1.0
    s, kind = scaling.factor, scaling.kind
    if kind == "linear":
        return [f / s for f in plain], 1.0
    if kind == "ntk":
        base = theta * s ** (features / (features - 2))
        return [base ** (-2 * i / features) for i in range(features // 2)], 1.0
    length = scaling.original_length
    if kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        found = []
        for f in plain:
            wavelength = 2 * math.pi / f
            smooth = (length / wavelength - low) / (high - low)
            if wavelength < length / high:
                found.append(f)
            elif wavelength > length / low:
                found.append(f / s)
            else:
                found.append((1 - smooth) * f / s + smooth * f)
        return found, 1.0
    fast, slow = (
        features * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), features - 1)
    high = high + 0.001 if low == high else high
    ramps = [min(1, max(0, (i - low) / (high - low))) for i in range(features // 2)]
    factor = scaling.attention_factor or 0.1 * math.log(s) + 1
    return [f / s * ramp + f * (1 - ramp) for f, ramp in zip(plain, ramps)], factor


def _gelu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = math.sqrt(2 / math.pi)
    t = np.tanh(scale * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)


def _gelu_exact(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cdf = (1 + np.vectorize(math.erf, [float])(x / math.sqrt(2)).astype(x.dtype)) / 2
    return x * cdf, cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _silu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


ACTIVATIONS = {  # value and derivative
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "silu": _silu,
    "relu": lambda x: (np.maximum(x, 0), (x > 0).astype(x.dtype)),
    "squared_relu": lambda x: (np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)),
}


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


def pairwise(factors: dict[str, tuple]) -> Iterator[dict[str, Any]]:
    """Cases in which every two levels of any two factors meet: greedy, the same in each run."""
    rng, names = random.Random(0), list(factors)
    levels = [{(n, i) for i in range(len(factors[n]))} for n in names]
    todo = {pair for a, b in itertools.combinations(levels, 2) for pair in itertools.product(a, b)}
    while todo:
        wanted, trials = sorted(todo), []
        for _ in range(50):
            case = {n: rng.randrange(len(factors[n])) for n in names} | dict(rng.choice(wanted))
            trials.append(list(itertools.combinations(case.items(), 2)))
        best = max(trials, key=lambda pairs: len(todo.intersection(pairs)))
        todo -= set(best)
        yield {n: factors[n][i] for pair in best for n, i in pair}


def mostly_once(cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`, of which a third runs on every version of JAX: numbers depend on it little."""
    return [pytest.param(case, marks=[pytest.mark.once] if i % 3 else []) for i, case in enumerate(cases)]


def case_name(case: dict[str, Any]) -> str:
    """A short name: the levels that are not off, with the factor's name where it is needed."""
    unclear = (int, tuple)
    texts = [f"{n[:6]}={v}" if isinstance(v, unclear) and v is not True else str(v) for n, v in case.items() if v]
    return "-".join(text.replace(" ", "") for text in texts)
