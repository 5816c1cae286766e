"""What the built-in ops share: the config type, and canonical forms of arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..config.schema import leaf_fields
from ..core.kernel import BACKENDS, KERNELS
from ..errors import ConfigError
from ..params import BwdParams, Fields, FwdParams

_PRECISIONS = ("default", "high", "highest", "fastest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OpConfig(Fields):
    """Back end and tile sizes of an op, either direction; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`.
        fwd: parameters of the forward kernel.
        bwd: parameters of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type.

    Example:
        >>> OpConfig(backend="xla").backend
        'xla'
    """

    backend: str | None = None
    fwd: FwdParams | None = None
    bwd: BwdParams | None = None

    def __post_init__(self):
        if self.backend is not None and self.backend not in BACKENDS:
            raise ConfigError(f"backend is {self.backend!r}; expected None or one of {', '.join(BACKENDS)}")
        for name, kind in (("fwd", FwdParams), ("bwd", BwdParams)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} is {value!r}; expected None or a {kind.__name__}")


C = TypeVar("C", bound=OpConfig)


def explicit_config(config_type: type[C], config: Any, cfg: Any, backend: str | None) -> C | None:
    """The explicit config of a call, from its `config=` (or `cfg=`) and `backend=`.

    Raises:
        ConfigError: both spellings, another type, or two different back ends.
    """
    if config is not None and cfg is not None:
        raise ConfigError("config= and cfg= are two spellings of one argument; give one")
    config = cfg if config is None else config
    if config is not None and not isinstance(config, config_type):
        raise ConfigError(f"config is {config!r}; expected a {config_type.__name__}")
    if backend is None:
        return config
    if config is None:
        return config_type(backend=backend)
    if config.backend not in (None, backend):
        raise ConfigError(f"backend is {backend!r}, but config.backend is {config.backend!r}; give one")
    return dataclasses.replace(config, backend=backend)


def unread_by_all(config: OpConfig) -> str | None:
    """The first field, in words, that no back end of a config's op reads in either direction: another op's, say.

    It says so where a config is pinned. Where one is used its back end is known, which `choice.unread` asks.
    """
    return _unread_by_all(config, len(KERNELS))  # each layer asks that pins a config, whenever it is made


@functools.lru_cache(maxsize=1024)
def _unread_by_all(config: OpConfig, _num_kernels: int) -> str | None:
    tables = [kernel.fields for kernel in KERNELS.values() if kernel.config_cls is type(config)]
    if not tables or None in tables:
        return None
    known = {name: 0 for table in tables if table for names in table.values() for name in names}
    for name, value in leaf_fields(config):
        if value is not None and name not in known and name not in ("backend", "fwd", "bwd"):
            takes = ", ".join(known)
            return f"sets {name}={value!r}, which no back end of a {type(config).__name__} has; they take {takes}"
    return None


def as_array(name: str, x: Any) -> jax.Array:
    """An argument as an array, in the types that JAX has.

    Raises:
        TypeError: not an array, nor what makes one; an array of floats of 8 bits or fewer.
    """
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(x).__name__}; expected an array") from None
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 2:
        raise TypeError(f"{name} is {array.dtype}, which no kernel takes; cast it to bfloat16, and scale it")
    return array


def static_number(name: str, x: Any) -> float:
    """An argument as a number that is part of the program.

    Raises:
        TypeError: not a number, or one that is traced.
    """
    try:
        if not isinstance(x, (bool, str)):
            return float(x)
    except (TypeError, ValueError):  # a traced one among them
        pass
    raise TypeError(f"{name} is {x!r}; expected a number that is known when the program is traced")


def canonical_precision(precision: Any) -> Any:
    """The precision of products as static text: what is asked for, else JAX's default of this moment.

    Raises:
        ValueError: not a precision.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if isinstance(precision, list):
        precision = tuple(precision)
    if precision is None or precision in _PRECISIONS or precision in jax.lax.DotAlgorithmPreset.__members__:
        return precision
    if isinstance(precision, (jax.lax.Precision, jax.lax.DotAlgorithmPreset)):
        return precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision.name
    if isinstance(precision, tuple) and len(precision) == 2:
        return tuple(map(canonical_precision, precision))
    raise ValueError(
        f"precision is {precision!r}; expected a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, a name of one, "
        f"a pair of them or None; names: {', '.join(_PRECISIONS)}"
    )
