"""Attention on cuDNN, both directions, through the primitives under `jax.nn.dot_product_attention`.

The public function rounds the log-sum-exp to 16 bits, and has no backward pass from a saved one; the private primitives
do. `unsupported` says what cuDNN has no form for. What it has a form for but promises nothing about (queries that see
nothing, NaN in keys that nobody sees) is put in order before and after it.

Source: `jax/_src/cudnn/fused_attention_stablehlo.py` (Apache-2.0) for the operands; limits from there and from the
checks of NVIDIA's cudnn-frontend (MIT).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from ...environment import xla_is_deterministic
from .arrange import unseen_by_mask
from .xla import Statics

# The bias of a key that a mask hides: it weighs nothing. In float16's range, and small: cuDNN makes NaN of -inf and of
# large numbers, whose difference after a multiplication by log2(e) is off by their last bit.
_HIDDEN = -32768.0
_NEVER = 1e30  # a log-sum-exp from which every probability is 0
_NEG_INF = -float("inf")

# 9.10.0 and 9.10.1 have known bugs, earlier ones no window beside a bias; compute capability 10.3 needs 9.11.
_CUDNN = 91100
_NO_GPU = "cuDNN needs an NVIDIA GPU"
# Where XLA takes deterministic kernels alone, cuDNN's gradients are of that kind too. XLA reads its flags once.
_FIXED_ORDER = xla_is_deterministic()
_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_ARRAYS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"
)  # fmt: skip
_USED = (
    "_dot_product_attention_fwd_cuda_lowering", "_dot_product_attention_bwd_cuda_lowering", "check_cudnn_version",
    "_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p", "AttentionLayout.BTNH", "MaskType.NO_MASK",
    "MaskType.CAUSAL", "MaskType.PADDING", "MaskType.PADDING_CAUSAL",
)  # fmt: skip
_RESIDUALS = ("activation", "fwd_output", "grad_output")
_PARAMS = {"scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"}
_SINCE_0_12 = {"score_mod_name", "score_mod_jaxpr"}


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    kv_lengths: jax.Array | None,
    statics: Statics,
) -> tuple[jax.Array, jax.Array]:
    """Output in the type of `query`, and float32 log-sum-exp `(batch, q_len, num_heads)`; for what is eligible."""
    arrays, params = _operands(query, key, value, mask, kv_lengths, statics)
    out, stats = _bind("fwd", arrays, is_training=True, **params)
    lse = stats.transpose(0, 2, 1)
    live = _live(query.shape[1], key.shape[1], mask, kv_lengths, statics)
    if live is None:
        return out, lse
    return jnp.where(live[..., None], out, jnp.zeros_like(out)), jnp.where(live, lse, _NEG_INF)


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    kv_lengths: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    needs: Sequence[bool],
    statics: Statics,
) -> tuple[jax.Array | None, ...]:
    """Gradients of query, key and value, `None` where `needs` is false; `out` and `lse` may come from any back end."""
    if not (mask is None and kv_lengths is None):
        # A query that sees nothing has a log-sum-exp of -inf. What it holds, NaN included, makes no gradient.
        live = lse > _NEG_INF
        query, dout = (jnp.where(live[..., None], x, jnp.zeros_like(x)) for x in (query, dout))
        lse = jnp.where(live, lse, _NEVER)
    arrays, params = _operands(query, key, value, mask, kv_lengths, statics)
    residuals = lse.astype(jnp.float32).transpose(0, 2, 1), out.astype(query.dtype), dout.astype(query.dtype)
    dq, dk, dv = _bind("bwd", (*arrays, *residuals), **params)
    return (
        dq if needs[0] else None,
        _lengthened(dk, key.shape[1]) if needs[1] else None,
        _lengthened(dv, key.shape[1]) if needs[2] else None,
    )


def unsupported(
    arrays: Mapping[str, Any], statics: Statics, *, backward: bool, deterministic: bool = False
) -> str | None:
    """Why cuDNN cannot do a call; `None` where it can.

    Args:
        arrays: the operands by name, `None` where there is none: `query, key, value, bias, mask, q_offset,
            q_segment_ids, kv_segment_ids, kv_lengths, sinks`, and of a backward call `dlse`.
        statics: the other arguments.
        backward: whether it is the gradient that is computed.
        deterministic: whether gradients must have the same bits in each run.
    """
    return (
        _unsupported_arguments(arrays, statics, backward, deterministic)
        or _unsupported_shapes(arrays, statics, backward)
        or _unsupported_band(arrays, statics)
        or _unsupported_machine(arrays["query"].shape[3], backward)
    )


def _unsupported_arguments(
    arrays: Mapping[str, Any], statics: Statics, backward: bool, deterministic: bool
) -> str | None:
    given = {name for name, x in arrays.items() if x is not None}
    limits = (
        (statics.logits_soft_cap is not None, "cuDNN has no soft cap of logits"),
        (statics.dropout_rate > 0, "cuDNN's dropout draws other bits than the other back ends"),
        (
            statics.softmax_scale <= 0,
            f"softmax_scale is {statics.softmax_scale}: cuDNN is used with positive ones only",
        ),
        ("sinks" in given, "cuDNN in JAX has no sinks"),
        ("bias" in given, "cuDNN makes NaN of biases of great size, which hide keys elsewhere"),
        (bool(given & {"q_segment_ids", "kv_segment_ids"}), "segment ids have no form in cuDNN; a mask has"),
        ("q_offset" in given, "q_offset is an array: cuDNN's first query is at a position known in advance"),
        (backward and "dlse" in given, "cuDNN has no gradient through the log-sum-exp"),
        (
            backward and deterministic and not _FIXED_ORDER,
            "cuDNN adds gradients up in an order that varies between runs; pass deterministic=False (of layers, and of "
            "ejlayers.swap, reproducible=False) to allow it, or set XLA_FLAGS=--xla_gpu_deterministic_ops=true, with "
            "which it does not, and is slower",
        ),
    )
    return _first(limits)


def _unsupported_shapes(arrays: Mapping[str, Any], statics: Statics, backward: bool) -> str | None:
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    (batch, q_len, heads, head_dim), v_dim = query.shape, value.shape[3]
    kv_len = _keys_in_reach(q_len, key.shape[1], statics)
    limits = (
        (query.dtype not in (jnp.bfloat16, jnp.float16), f"cuDNN takes bfloat16 and float16, these are {query.dtype}"),
        (v_dim != head_dim, f"cuDNN needs one head_dim; query has {head_dim} and value {v_dim}"),
        (head_dim % 8 != 0, f"cuDNN needs a head_dim that is a multiple of 8, this is {head_dim}"),
        (0 in (batch, q_len, kv_len, heads, head_dim), "an array is empty"),
        (backward and q_len == kv_len == 1, "cuDNN has no gradient of one query and one key"),
        (
            backward and arrays["mask"] is not None and (q_len % 2 != 0 or kv_len % 2 != 0),
            f"cuDNN's gradient with a mask needs even lengths, these are {q_len} and {kv_len}",
        ),
    )
    return _first(limits)


def _unsupported_band(arrays: Mapping[str, Any], statics: Statics) -> str | None:
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    left, right = _band(q_len, kv_len, statics)
    if left is None and right is None:
        return None
    limits = (
        (
            statics.static_offset != 0,
            f"q_offset is {statics.static_offset}: cuDNN in JAX puts the first query at the first key",
        ),
        (right != 0, "cuDNN takes a window only where no query sees a later key"),
        (
            left is not None and q_len > kv_len,
            f"cuDNN takes a window only for at most as many queries as keys, these are {q_len} and {kv_len}",
        ),
    )
    return _first(limits)


def _unsupported_machine(head_dim: int, backward: bool) -> str | None:
    machine = _machine()
    if isinstance(machine, str):
        return machine
    capability, version = machine
    major = capability[0]
    # Hopper alone has gradients beyond 128; Ampere neither direction.
    most = 256 if major == 9 or (major > 9 and not backward) else 128
    limits = (
        (major < 8, f"cuDNN's attention needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"),
        (head_dim > most, f"cuDNN needs a head_dim of at most {most} here, this is {head_dim}"),
    )
    return _first(limits) or _too_old(version)


def _first(limits: Sequence[tuple[bool, str]]) -> str | None:
    """The reason of the first limit that is not kept."""
    return next((reason for broken, reason in limits if broken), None)


def missing() -> str | None:
    """What an installation lacks for cuDNN, on a machine that has a GPU; `None` where it lacks nothing."""
    machine = _machine()
    if isinstance(machine, str):
        return None if machine.startswith(_NO_GPU) else machine
    return _too_old(machine[1])


def _too_old(version: int) -> str | None:
    have = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    hint = "install a newer nvidia-cudnn-cu13 (or -cu12) from where jax came from"
    return f"cuDNN is {have}, 9.11 is needed: {hint}" if version < _CUDNN else None


def _machine() -> tuple[tuple[int, ...], int] | str:
    """Compute capability of this process's GPU and version of its cuDNN, or what is missing."""
    module = private_module()
    if isinstance(module, str):
        return module
    try:
        capability = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "")
    except RuntimeError:
        return f"{_NO_GPU}, and this process has no GPU"
    if not re.fullmatch(r"\d+\.\d+", capability):
        return _NO_GPU
    try:
        version = module.check_cudnn_version()
    except RuntimeError as error:
        return f"cuDNN is not found ({error}); install jax with its extra cuda13 or cuda12"
    return tuple(map(int, capability.split("."))), version


@functools.cache
def private_module() -> ModuleType | str:
    """JAX's private module with the primitives, or why it cannot be used with this JAX."""
    differs = f"jax {jax.__version__} differs inside from 0.10.2 to 0.12, which cuDNN attention is written for"
    try:
        module = importlib.import_module(_MODULE)
        fwd, bwd, *_ = operator.attrgetter(*_USED)(module)
    except (ImportError, AttributeError) as error:
        return f"{differs}: {error}"
    for lowering, arrays, params in ((fwd, _ARRAYS, {*_PARAMS, "is_training"}), (bwd, _ARRAYS + _RESIDUALS, _PARAMS)):
        names = tuple(inspect.signature(lowering).parameters)[1:]  # after the context
        rest = set(names[len(arrays) :]) - {"score_mod_args"} - _SINCE_0_12
        if names[: len(arrays)] != arrays or rest != params:
            return f"{differs}: its primitives take {', '.join(names)}"
    return module


def _bind(direction: str, arrays: Sequence[jax.Array], **params: Any) -> Sequence[jax.Array]:
    """Binds a primitive; those that partition themselves are left out, since a call is local to a device already."""
    module = private_module()
    if isinstance(module, str):
        raise NotImplementedError(module)
    taken = inspect.signature(getattr(module, f"_dot_product_attention_{direction}_cuda_lowering")).parameters
    newer = dict.fromkeys(name for name in sorted(_SINCE_0_12) if name in taken)
    params["mask_type"] = module.MaskType[params["mask_type"]]
    layout = module.AttentionLayout.BTNH.value
    return getattr(module, f"_dot_product_attention_{direction}_p").bind(*arrays, layout=layout, **params, **newer)


def _operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    kv_lengths: jax.Array | None,
    statics: Statics,
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arrays and parameters that both primitives take."""
    batch, q_len = query.shape[:2]
    left, right = _band(q_len, key.shape[1], statics)
    kv_len = _keys_in_reach(q_len, key.shape[1], statics)
    key, value = key[:, :kv_len], value[:, :kv_len]
    mask = None if mask is None else mask[..., :kv_len]
    seen = _seen_keys(key.shape[2], kv_len, mask, kv_lengths)
    if seen is not None:  # what the others hold, NaN included, must not reach a product
        key, value = (jnp.where(seen[..., None], x, jnp.zeros_like(x)) for x in (key, value))
    unused = jnp.zeros((0,), query.dtype)
    tile = unused if mask is None else _tile(mask, (q_len, kv_len), query.dtype)
    lengths = (unused, unused)
    if kv_lengths is not None:
        # One key at least, for a length of 0 is none to cuDNN: its key is 0, its row not `_live`.
        lengths = jnp.full((batch,), q_len, jnp.int32), jnp.clip(kv_lengths, 1, kv_len).astype(jnp.int32)
    kind = ("PADDING_" if kv_lengths is not None else "") + ("CAUSAL" if right == 0 else "")
    params = {
        "scale": float(statics.softmax_scale),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (mask is not None, False),  # has a bias, which needs a gradient
        "mask_type": kind.removesuffix("_") or "NO_MASK",
        "sliding_window_length": None if left is None else left + 1,  # cuDNN counts the query's own key
    }
    return (query, key, value, tile, *lengths, unused, unused, unused, unused), params


def _band(q_len: int, kv_len: int, statics: Statics) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query sees; `None` on a side where that hides none."""
    offset = statics.static_offset or 0
    left, right = statics.sliding_window or (None, None)
    right = 0 if statics.causal else right
    if left is not None and offset + q_len - 1 <= left:
        left = None
    if right is not None and offset + right >= kv_len - 1:
        right = None
    return left, right


def _keys_in_reach(q_len: int, kv_len: int, statics: Statics) -> int:
    """How many keys causality leaves to the last query: cuDNN multiplies some of the others by 0, which keeps NaN."""
    return min(q_len, kv_len) if _band(q_len, kv_len, statics)[1] == 0 else kv_len


def _seen_keys(kv_heads: int, kv_len: int, mask: jax.Array | None, kv_lengths: jax.Array | None) -> jax.Array | None:
    """Keys that a query may see by each mask alone, broadcastable to `(batch, kv_len, kv_heads)`; `None`: all."""
    seen = None if mask is None else ~unseen_by_mask(mask, kv_heads)
    if kv_lengths is not None:
        within = jnp.arange(kv_len)[:, None] < kv_lengths[:, None, None]
        seen = within if seen is None else seen & within
    return seen


def _tile(mask: jax.Array, lengths: tuple[int, int], dtype: Any) -> jax.Array:
    """A mask as a bias, which cuDNN broadcasts over batch and heads alone."""
    tile = jnp.where(mask, jnp.zeros((), dtype), jnp.asarray(_HIDDEN, dtype))
    return jnp.broadcast_to(tile, (*tile.shape[:2], *lengths))


def _live(
    q_len: int, kv_len: int, mask: jax.Array | None, kv_lengths: jax.Array | None, statics: Statics
) -> jax.Array | None:
    """Queries that see a key, broadcastable to `(batch, q_len, num_heads)`; `None`: all do in any case."""
    if mask is None and kv_lengths is None:
        return None
    left, right = _band(q_len, kv_len, statics)
    if mask is None and kv_lengths is not None:  # the first key that the window leaves has to be there
        first = 0 if left is None else jnp.maximum(jnp.arange(q_len) - left, 0)
        return jnp.broadcast_to((first < kv_lengths[:, None])[..., None], (kv_lengths.shape[0], q_len, 1))
    rows, cols = jnp.arange(q_len)[:, None], jnp.arange(kv_len)
    parts = [
        mask,
        None if kv_lengths is None else cols < kv_lengths[:, None, None, None],
        None if left is None else cols >= rows - left,
        None if right is None else cols <= rows,
    ]
    seen = functools.reduce(jnp.logical_and, [part for part in parts if part is not None])
    return seen.any(-1).swapaxes(1, 2)


def _lengthened(x: jax.Array, length: int) -> jax.Array:
    """Zeros for the keys that were out of reach."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
