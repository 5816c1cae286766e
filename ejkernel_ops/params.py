"""Block sizes and launch parameters, one container for each direction."""

from __future__ import annotations

import dataclasses

from .errors import ConfigError

MOST = 1 << 20  # of a block
_LIMITS = {"num_warps": 32, "num_stages": 16, "num_warps_mn": 32, "num_stages_mn": 16}


def _check(params: FwdParams | BwdParams) -> None:
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        limit = _LIMITS.get(field.name, MOST)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= limit:
            raise ConfigError(
                f"{type(params).__name__}.{field.name} is {value!r}; expected None or an int in [1, {limit}]"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FwdParams:
    """Tile sizes and launch parameters of a forward kernel; a field left `None` inherits.

    Args:
        q_blocksize: query rows in a tile.
        kv_blocksize: key/value rows in a tile.
        blocksize_m: rows of a matrix product in a tile.
        blocksize_n: columns of a matrix product in a tile.
        blocksize_k: contracted elements in a tile.
        blocksize_heads: heads in a tile (decoding).
        blocksize_keys: keys in a split (decoding).
        num_key_splits: splits of the keys (decoding).
        num_warps: warps of 32 threads in a GPU block.
        num_stages: depth of a GPU software pipeline.

    Raises:
        ConfigError: a field is not `None` and not a positive int in its range.

    Example:
        >>> FwdParams(q_blocksize=128, kv_blocksize=64).kv_blocksize
        64
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_m: int | None = None
    blocksize_n: int | None = None
    blocksize_k: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    __post_init__ = _check


@dataclasses.dataclass(frozen=True, kw_only=True)
class BwdParams:
    """Tile sizes and launch parameters of a backward kernel; a field left `None` inherits.

    Args:
        q_blocksize: query rows in a tile.
        kv_blocksize: key/value rows in a tile.
        blocksize_m: rows of a matrix product in a tile.
        blocksize_n: columns of a matrix product in a tile.
        blocksize_k: contracted elements in a tile.
        num_warps: warps of 32 threads in a GPU block.
        num_stages: depth of a GPU software pipeline.
        num_warps_mn: warps of a second kernel, whose tile is `blocksize_m` by `blocksize_n`.
        num_stages_mn: pipeline depth of that kernel.

    Raises:
        ConfigError: a field is not `None` and not a positive int in its range.

    Example:
        >>> BwdParams(q_blocksize=64).num_warps is None
        True
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_m: int | None = None
    blocksize_n: int | None = None
    blocksize_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    num_warps_mn: int | None = None
    num_stages_mn: int | None = None

    __post_init__ = _check
