"""`PersistentCache`: tuned configs on disk, one checksummed JSON file for each."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from ..core.kernel import KERNELS
from ..environment import cache_dir
from ..errors import CacheFormatError, ConfigError, EjkernelError
from ..utils.files import replace_file
from ..utils.values import imported_dataclass, stable_json
from .cache import Key, count_write, split_key, split_put
from .schema import from_plain, parse_json, to_json

_SCHEMA = 2
_MAX_BYTES = 1 << 20
_PLAIN = {f"builtins:{kind.__name__}": kind for kind in (bool, int, float, str, list, tuple, dict)}


class PersistentCache:
    """Configs on disk.

    A file that is missing, damaged or foreign is a miss; no file breaks a model. Each entry is a file of its own,
    replaced atomically, so that processes cannot lose each other's entries and a reader sees a whole entry or none.
    Nothing is pickled; reading imports nothing.

    Args:
        path: folder; default `EJKERNEL_CACHE_DIR`, else the platform's cache folder. It is made when
            something is first written.
        cfg_type: type of the configs under keys that name no kernel of this process, or one that declares no type;
            default the type that was put, if it is a plain one or its module is imported here.

    Example:
        >>> import tempfile
        >>> cache = PersistentCache(tempfile.mkdtemp(), cfg_type=int)
        >>> cache.put("my key", 32)
        >>> cache.get("my key")
        32
    """

    def __init__(self, path: str | os.PathLike | None = None, cfg_type: type | None = None):
        self._path, self.cfg_type = path, cfg_type
        self.stats: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The folder."""
        return cache_dir() if self._path is None else Path(self._path).expanduser()

    def get(self, key: Any, op_id_v: str | None = None, call_key: str | None = None) -> Any:
        """The config under a key, or `None`: `get(key)` or `get(device, op_id_v, call_key)`.

        Raises:
            ConfigError: the key has no value-based form.
        """
        key = split_key(key, (op_id_v, call_key))
        file, text = self._file(key)
        try:
            cfg = self._read(file, key, text)
        except FileNotFoundError:
            self.stats["miss"] += 1
            return None
        except (OSError, EjkernelError, UnicodeError) as error:
            self._warn("read", f"{file}: {error}")
            return None
        self.stats["hit"] += 1
        return cfg

    def put(self, key: Any, *rest: Any) -> None:
        """Stores a config: `put(key, cfg)` or `put(device, op_id_v, call_key, cfg)`.

        Raises:
            ConfigError: the key or the config has no value-based form.
        """
        others, cfg = split_put(rest)
        key = split_key(key, others)
        file, text = self._file(key)
        kind = f"{type(cfg).__module__}:{type(cfg).__qualname__}"
        body = {"schema": _SCHEMA, "key": json.loads(text), "type": kind, "config": json.loads(to_json(cfg))}
        try:
            self._type_of(key, kind)
        except CacheFormatError as error:
            raise ConfigError(f"config {cfg!r} could not be read back: {error}") from None
        body["sha256"] = _checksum(body)
        try:
            self._write(file, json.dumps(body, sort_keys=True, indent=1))
        except OSError as error:
            self._warn("write", f"{file}: {error}")
            return
        self.stats["written"] += 1
        count_write()

    def discard(self, key: Any) -> None:
        """Removes the entry of a key, if there is one."""
        file, _ = self._file(key)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self._warn("remove", f"{file}: {error}")
        count_write()

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def _file(self, key: Any) -> tuple[Path, str]:
        text = stable_json(key, where="cache key")
        return self.path / f"{hashlib.sha256(text.encode()).hexdigest()}.json", text

    def _read(self, file: Path, key: Any, text: str) -> Any:
        with open(file, "rb", opener=_open) as f:
            raw = f.read(_MAX_BYTES + 1) or b""  # `None`: a pipe with nothing in it
        if len(raw) > _MAX_BYTES:
            raise CacheFormatError("larger than 1 MiB")
        body = parse_json(raw.decode())
        if not isinstance(body, dict) or set(body) != {"schema", "key", "type", "config", "sha256"}:
            raise CacheFormatError("not a cache entry")
        if body["schema"] != _SCHEMA:
            raise CacheFormatError(f"schema {body['schema']!r}; this version reads {_SCHEMA}")
        if body.pop("sha256") != _checksum(body):
            raise CacheFormatError("checksum does not match: the file is damaged")
        if body["key"] != json.loads(text):
            raise CacheFormatError("holds another key")
        return from_plain(body["config"], self._type_of(key, str(body["type"])))

    def _type_of(self, key: Any, stored: str) -> type:
        kernel = KERNELS.get(key.op_id_v) if isinstance(key, Key) else None
        found = kernel.config_cls if kernel is not None and kernel.config_cls is not None else self.cfg_type
        if found is None:
            found = type_named(stored)
        if found is None:
            raise CacheFormatError(
                f"the type {stored!r} is no plain one, nor a frozen dataclass of a module that is imported here: "
                "import it, or pass cfg_type="
            )
        return found

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, text)

    def _warn(self, kind: str, text: str) -> None:
        self.stats[f"{kind}_failed"] += 1
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            warnings.warn(f"config cache: could not {kind} {text} (a miss; later ones are not reported)", stacklevel=4)


def type_named(stored: str) -> type | None:
    """The type of a stored config: a plain one, or a frozen dataclass whose module is imported here."""
    return _PLAIN.get(stored) or imported_dataclass(stored)


def _open(file: str, flags: int) -> int:
    """Opens neither through a link nor waiting for a pipe."""
    return os.open(file, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _checksum(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
