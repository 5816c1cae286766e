"""Configs in memory: `Key`, `ConfigCache`, and `overlay_cache` that lays some on top for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.snapshot import Overlay, Reentrant, entered, with_overlay
from ..errors import ConfigError


class Key(NamedTuple):
    """What a config is stored under.

    Args:
        device: device fingerprint.
        op_id_v: name and version of the kernel.
        call_key: 16 hex digits of the call.

    Example:
        >>> Key("cpu|cpu", "flash_attention@v1", "0123456789abcdef").op_id_v
        'flash_attention@v1'
    """

    device: str
    op_id_v: str
    call_key: str


_lock, _writes = threading.Lock(), [0]


def generation() -> int:
    """How many times any cache was written in this process."""
    return _writes[0]


def count_write() -> None:
    """Makes calls that are made from now on look again."""
    with _lock:
        _writes[0] += 1


def split_put(rest: tuple) -> tuple[tuple, Any]:
    """The rest of the key, and the config, of `put(key, cfg)` or `put(device, op_id_v, call_key, cfg)`."""
    if not rest:
        raise TypeError("no config; expected one key, or device, op_id_v and call_key, and then a config")
    if rest[-1] is None:
        raise ConfigError("cfg is None; expected a config: None means that there is none")
    return rest[:-1], rest[-1]


def split_key(key: Any, others: tuple) -> Hashable:
    """`get(key)` and `get(device, op_id_v, call_key)` are both documented."""
    others = () if others == (None, None) else others
    if others:
        if len(others) != 2 or None in others:
            raise TypeError("expected one key, or device, op_id_v and call_key")
        return Key(str(key), *map(str, others))
    return key


class ConfigCache:
    """Configs of this process, safe to use from several threads.

    Example:
        >>> cache = ConfigCache()
        >>> cache.put("cpu|cpu", "matmul@v1", "0123456789abcdef", 32)
        >>> cache.get("cpu|cpu", "matmul@v1", "0123456789abcdef")
        32
        >>> cache.put("any key", 7); "any key" in cache, cache.get("other")
        (True, None)
    """

    def __init__(self) -> None:
        self._configs: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, op_id_v: str | None = None, call_key: str | None = None) -> Any:
        """The config under a key, or `None`.

        Args:
            key: a key, or the device fingerprint where the other two are given.
            op_id_v: name and version of the kernel.
            call_key: 16 hex digits of the call.
        """
        return self._configs.get(split_key(key, (op_id_v, call_key)))

    def put(self, key: Any, *rest: Any) -> None:
        """Stores a config: `put(key, cfg)` or `put(device, op_id_v, call_key, cfg)`.

        Raises:
            ConfigError: the config is `None`.
        """
        others, cfg = split_put(rest)
        with self._lock:
            self._configs[split_key(key, others)] = cfg
        count_write()

    def discard(self, key: Hashable) -> None:
        """Forgets the config under a key, if there is one."""
        with self._lock:
            self._configs.pop(key, None)
        count_write()

    def clear(self) -> None:
        """Forgets all configs."""
        with self._lock:
            self._configs.clear()
        count_write()

    def keys(self) -> list[Hashable]:
        """The keys, a copy."""
        with self._lock:
            return list(self._configs)

    def items(self) -> list[tuple[Hashable, Any]]:
        """Keys and configs, a copy."""
        with self._lock:
            return list(self._configs.items())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._configs

    def __len__(self) -> int:
        return len(self._configs)


def is_key(key: Any) -> bool:
    """Whether it is three texts."""
    return isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)


def _as_key(key: Any) -> Key:
    if not is_key(key):
        raise ConfigError(f"overlay key is {key!r}; expected Key(device, op_id_v, call_key)")
    return Key(*key)


class overlay_cache(Reentrant):  # documented as a function
    """Context in which the given configs win over every cache; inner overlays win over outer ones.

    The configs are copied here, so later changes of the mapping have no effect. Functions that are
    already jitted retrace once for each new content; equal content, and leaving, never retrace.

    Args:
        configs: mapping of `Key(device, op_id_v, call_key)` to config, or a `ConfigCache` (of which
            only such keys count).

    Raises:
        ConfigError: a key of another form, or a config that cannot be compared by value.

    Example:
        >>> key = Key("cpu|cpu", "matmul@v1", "0123456789abcdef")
        >>> with overlay_cache({key: 32}):
        ...     pass
    """

    def __init__(self, configs: Mapping[Any, Any] | ConfigCache):
        if isinstance(configs, ConfigCache):
            self.configs = {_as_key(k): cfg for k, cfg in configs.items() if is_key(k)}
        elif isinstance(configs, Mapping):
            self.configs = {_as_key(k): cfg for k, cfg in configs.items()}
        else:
            raise ConfigError(f"configs is {configs!r}; expected a mapping of Key to config, or a ConfigCache")
        for key, cfg in self.configs.items():
            if cfg is None:
                raise ConfigError(f"the config of {key} is None; expected a config: leave out what has none")

    @functools.cached_property
    def _overlay(self) -> Overlay:
        return Overlay(MappingProxyType(dict(self.configs)))

    @property
    def digest(self) -> str:
        """Digest of the content, equal in every process."""
        return self._overlay.digest

    def _open(self) -> contextlib.AbstractContextManager:
        return entered(functools.partial(with_overlay, overlay=self._overlay))
