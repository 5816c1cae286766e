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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AttentionConfig(OpConfig):
    """Back end and tile sizes of `flash_attention`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"cudnn"` or `"xla"`.
        fwd: `q_blocksize` and `kv_blocksize` of the forward kernel, in rows; of Triton's `num_warps` and
            `num_stages`, too. cuDNN has no parameters.
        bwd: the same of the backward kernel; on Triton of the kernel of key and value gradients, beside
            `blocksize_m` (queries), `blocksize_n` (keys), `num_warps_mn` and `num_stages_mn` of that of queries.

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


# Seconds on a GPU of each step of the loops, of each score, of each multiplication for it, and of each element of a
# block of queries and of keys: fitted to docs/benchmarks/tuning_table.csv (8 % off at the root mean square).
FORWARD_S = (18.5e-6, 3.8e-12, 5.3e-15, 5.6e-12, 2.3e-12)
BACKWARD_S = (28.4e-6, 5.4e-12, 14.6e-15, 11.0e-12, 10.3e-12)


def predicted_seconds(query: Any, key: Any, blocks: tuple[int, int], causal: bool, each: tuple[float, ...]) -> float:
    """Time of the XLA back end on a GPU: its steps, and what each of them computes, reads and writes."""
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = query.shape, key.shape
    block_q, block_kv = min(blocks[0], q_len), min(blocks[1], kv_len)
    num_q, num_kv = -(-q_len // block_q), -(-kv_len // block_kv)
    last = [min(num_kv, -(-(i + 1) * block_q // block_kv)) if causal else num_kv for i in range(num_q)]
    scores = batch * heads * block_q * block_kv
    counts = (1, scores, scores * dim, batch * heads * dim * block_q, batch * kv_heads * dim * block_kv)
    return sum(last) * sum(count * seconds for count, seconds in zip(counts, each))


def forward_config(blocks: tuple[int, int]) -> AttentionConfig:
    """Config of the XLA forward kernel."""
    return AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1]))


def backward_config(blocks: tuple[int, int]) -> AttentionConfig:
    """Config of the XLA backward kernel."""
    return AttentionConfig(backend="xla", bwd=BwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1]))


def compute_dtype(dtype: Any) -> Any:
    """The type of logits, softmax and sums: float32, or float64 for float64 inputs."""
    return jax.numpy.promote_types(dtype, jax.numpy.float32)
