"""Configs of attention: their type, heuristics and candidates."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ...params import BwdParams, FwdParams
from ...utils.fingerprint import platform_kind
from ..config import OpConfig

# A block of scores over all heads and examples: one that stays in a CPU's caches; one that fills a GPU.
_SCORES_BYTES = {"cpu": 4 << 20, "gpu": 512 << 20, "tpu": 64 << 20}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(OpConfig):
    """Back end and tile sizes of `flash_attention`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which `flash_attention` has `"xla"` so far.
        fwd: `q_blocksize` and `kv_blocksize` of the forward kernel, in rows.
        bwd: the same of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=256, kv_blocksize=256)).fwd.q_blocksize
        256
    """


def _block(query: Any, platform: str | None) -> int:
    """The largest power of two, 64 to 4096, whose block of scores is of the right size for the device."""
    heads, block, most = query.shape[0] * query.shape[2], 4096, _SCORES_BYTES[platform_kind(platform)]
    while block > 64 and heads * block * block * 4 > most:
        block //= 2
    return block


def _clamped(block: int, length: int) -> int:
    """A block size no larger than the power of two that holds the length."""
    return max(1, min(block, 1 << max(0, length - 1).bit_length()))


def block_sizes(query: Any, key: Any, platform: str | None = None) -> tuple[int, int]:
    """Heuristic query and key/value block sizes of the XLA back end."""
    block = _block(query, platform)
    return _clamped(block, query.shape[1]), _clamped(block, key.shape[1])


def candidate_block_sizes(query: Any, key: Any, platform: str | None = None) -> list[tuple[int, int]]:
    """Pairs of block sizes worth trying: around the heuristic, square and oblong, each once."""
    block = _block(query, platform)
    scales = [(1, 1), (2, 2), (1, 2), (2, 1), (0.5, 0.5), (0.5, 2), (4, 4), (0.5, 1), (1, 4)]
    pairs = [(max(16, int(block * q)), max(16, int(block * k))) for q, k in scales]
    return list(dict.fromkeys((_clamped(q, query.shape[1]), _clamped(k, key.shape[1])) for q, k in pairs))


# Seconds of a step of the loops, FLOP/s, bytes/s of memory, and bytes of cache: to order candidates, no more.
_MACHINE = {"cpu": (5e-6, 1e11, 2e10, 8e6), "gpu": (8e-5, 4e14, 2.5e12, 4e7), "tpu": (1e-5, 1e14, 1e12, 1e8)}


def predicted_seconds(
    query: Any, key: Any, blocks: tuple[int, int], causal: bool, passes: int, platform: str | None
) -> float:
    """Time of the XLA back end: its steps, and in each the products and the passes over a block of scores."""
    step, flops, bandwidth, cache = _MACHINE[platform_kind(platform)]
    (batch, q_len, heads, dim), (block_q, block_kv) = query.shape, blocks
    num_q, num_kv = -(-q_len // block_q), -(-key.shape[1] // block_kv)
    last = [min(num_kv, -(-(i + 1) * block_q // block_kv)) if causal else num_kv for i in range(num_q)]
    scores = batch * heads * block_q * block_kv
    spilled = max(0.1, min(1.0, 4 * scores / cache))  # what does not fit the cache goes to memory and back
    work = scores * (2 * dim * passes / flops + 4 * 3 * passes * spilled / bandwidth)
    return sum(last) * (step + work)


def forward_config(blocks: tuple[int, int]) -> AttentionConfig:
    """Config of the XLA forward kernel."""
    return AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1]))


def backward_config(blocks: tuple[int, int]) -> AttentionConfig:
    """Config of the XLA backward kernel."""
    return AttentionConfig(backend="xla", bwd=BwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1]))


def compute_dtype(dtype: Any) -> Any:
    """The type of logits, softmax and sums: float32, or float64 for float64 inputs."""
    return jax.numpy.promote_types(dtype, jax.numpy.float32)
