"""Configs of attention: their type, heuristics and candidates."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ...params import BwdParams, FwdParams
from ..config import OpConfig

_SCORES_BYTES = 4 << 20  # a block of scores, over all heads and examples, that stays in a CPU's caches


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(OpConfig):
    """Back end and tile sizes of `flash_attention`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`.
        fwd: `q_blocksize` and `kv_blocksize` of the forward kernel, in rows.
        bwd: the same of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type.

    Example:
        >>> AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=256, kv_blocksize=256)).fwd.q_blocksize
        256
    """


def sizes(query: Any, key: Any) -> tuple[int, int, int]:
    """Examples times heads, query length, key length."""
    return query.shape[0] * query.shape[2], query.shape[1], key.shape[1]


def _block(query: Any, key: Any) -> int:
    """The largest power of two, 64 to 1024, whose block of scores fits the caches."""
    heads, _, _ = sizes(query, key)
    block = 1024
    while block > 64 and heads * block * block * 4 > _SCORES_BYTES:
        block //= 2
    return block


def _clamped(block: int, length: int) -> int:
    """A block size no larger than the power of two that holds the length."""
    return max(1, min(block, 1 << max(0, length - 1).bit_length()))


def block_sizes(query: Any, key: Any) -> tuple[int, int]:
    """Heuristic query and key/value block sizes of the XLA back end."""
    block = _block(query, key)
    _, q_len, kv_len = sizes(query, key)
    return _clamped(block, q_len), _clamped(block, kv_len)


def candidate_block_sizes(query: Any, key: Any) -> list[tuple[int, int]]:
    """Pairs of block sizes worth trying: around the heuristic, square and oblong, each once."""
    block = _block(query, key)
    _, q_len, kv_len = sizes(query, key)
    scales = [(1, 1), (2, 2), (1, 2), (2, 1), (0.5, 0.5), (0.5, 2), (4, 4), (0.5, 1), (1, 4)]
    pairs = [(_clamped(max(16, int(block * q)), q_len), _clamped(max(16, int(block * k)), kv_len)) for q, k in scales]
    return list(dict.fromkeys(pairs))


def forward_config(blocks: tuple[int, int]) -> AttentionConfig:
    """Config of the XLA forward kernel."""
    return AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1]))


def backward_config(blocks: tuple[int, int]) -> AttentionConfig:
    """Config of the XLA backward kernel."""
    return AttentionConfig(backend="xla", bwd=BwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1]))


def compute_dtype(dtype: Any) -> Any:
    """The type of logits, softmax and sums: float32, or float64 for float64 inputs."""
    return jax.numpy.promote_types(dtype, jax.numpy.float32)
