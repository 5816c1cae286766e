"""Block sizes and launch parameters, one container for each direction."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

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


class Fields:
    """What the dataclasses of configs share: unknown fields are refused with a hint, unset ones are not shown."""

    def __new__(cls, *args: Any, **kwargs: Any):  # noqa: D102
        known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        for name in kwargs.keys() - set(known):
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {_hint(name, known)}")
        return super().__new__(cls)

    def __repr__(self):
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        shown = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"{type(self).__name__}({', '.join(shown)})"


def _hint(name: str, known: list[str]) -> str:
    if "fwd" in known and (kinds := [k for k in (FwdParams, BwdParams) if name in k.__dataclass_fields__]):
        return f"it is one of {kinds[0].__name__}: {kinds[0].__name__[:3].lower()}={kinds[0].__name__}({name}=...)"
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FwdParams(Fields):
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
        ConfigError: an unknown field, or one that is neither `None` nor a positive int in its range.

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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BwdParams(Fields):
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
        ConfigError: an unknown field, or one that is neither `None` nor a positive int in its range.

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
