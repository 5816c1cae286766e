"""`PersistentCache`: tuned configs on disk, one checksummed JSON file for each."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..environment import cache_dir, without_tilde
from ..errors import CacheFormatError, ConfigError
from ..utils.files import leftovers, replace_file
from ..utils.values import stable_json
from ..utils.versions import tuned_with
from .cache import count_write, split_key, split_put
from .entry import FILE_NAME, CacheEntry, OtherSchemaError, config_of, config_type, file_name, read_entry
from .problems import Problems
from .schema import to_json

_WRITING_S = 3600.0  # no writer takes so long: what is older was left by one that was killed


class PersistentCache:
    """Configs on disk.

    A file that is missing, damaged or foreign is a miss; no file and no disk breaks a model. The first problem of each
    kind is a warning, all are counted. Each entry is a file of its own, replaced atomically, so that processes cannot
    lose each other's entries and a reader sees a whole entry or none. Nothing is pickled; reading imports nothing.

    Args:
        path: folder; default `EJKERNEL_CACHE_DIR`, else the platform's cache folder. It is made when
            something is first written.
        cfg_type: type of the configs under keys that name no kernel of this process, or one that declares no type;
            default the type that was put, if it is a plain one or its module is imported here.

    Raises:
        ConfigError: a path that is no path.

    Example:
        >>> import tempfile
        >>> cache = PersistentCache(tempfile.mkdtemp(), cfg_type=int)
        >>> cache.put("my key", 32)
        >>> cache.get("my key"), cache.keys(), cache.clear()
        (32, ['my key'], 1)
    """

    def __init__(self, path: str | os.PathLike | None = None, cfg_type: type | None = None):
        if path is not None and not (isinstance(path, (str, os.PathLike)) and path and "\0" not in str(path)):
            raise ConfigError(f"path is {path!r}; expected a folder, or None for the user's cache folder")
        self._path, self.cfg_type = path, cfg_type
        self._problems = Problems()

    @property
    def path(self) -> Path:
        """The folder."""
        return cache_dir() if self._path is None else without_tilde(self._path)

    @property
    def stats(self) -> Counter[str]:
        """How often what happened: `hit`, `miss`, `written`, and problems by reason, as in `write failed: ENOSPC`.

        `hit other versions` are the hits that were tuned with another jax, driver or version of this package.
        """
        return self._problems.stats

    # One entry

    def get(self, key: Any, op_id_v: str | None = None, call_key: str | None = None) -> Any:
        """The config under a key, or `None`: `get(key)` or `get(device, op_id_v, call_key)`.

        Args:
            key: a key, or the device fingerprint where the other two are given.
            op_id_v: name and version of the kernel.
            call_key: 16 hex digits of the call.

        Raises:
            ConfigError: the key has no value-based form.
        """
        key = split_key(key, (op_id_v, call_key))
        form = _form(key)
        name = file_name(form)
        try:
            entry = read_entry(self.path / name)
            cfg = config_of(entry, key, self.cfg_type)
        except FileNotFoundError:
            self._problems.count("miss")
            return None
        except ConfigError:  # of the environment
            raise
        except Exception as error:  # a border: not even a config type that fails to check its values breaks a model
            self._problems.failed("read", self.path / name, error)
            return None
        self._problems.count("hit", *(["hit other versions"] if entry.versions != tuned_with() else []))
        return cfg

    def put(self, key: Any, *rest: Any) -> None:
        """Stores a config: `put(key, cfg)` or `put(device, op_id_v, call_key, cfg)`.

        Args:
            key: a key, or the device fingerprint where name and call key follow.
            *rest: the rest of a key that is given in parts, and the config.

        Raises:
            ConfigError: the key or the config has no value-based form.
        """
        others, cfg = split_put(rest)
        key = split_key(key, others)
        kind = f"{type(cfg).__module__}:{type(cfg).__qualname__}"
        entry = CacheEntry(_form(key), kind, json.loads(to_json(cfg)), tuned_with())
        try:
            config_type(key, kind, self.cfg_type)
        except CacheFormatError as error:
            raise ConfigError(f"config {cfg!r} could not be read back: {error}") from None
        self.put_entry(entry)

    def put_entry(self, entry: CacheEntry) -> bool:
        """Stores an entry, such as `entries` of another folder gave.

        Args:
            entry: the entry.

        Returns:
            Whether it is stored.
        """
        try:
            folder = self.path
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(folder / entry.file_name, entry.dumps())
        except OSError as error:
            self._problems.failed("write", self._path or entry.file_name, error)
            return False
        if self._problems.count("written") == 1:
            self._remove(self._leftovers())
        count_write()
        return True

    def discard(self, key: Any) -> None:
        """Removes the entry of a key, if there is one."""
        name = file_name(_form(key))
        self._remove(self._listed(lambda folder: [folder / name]))
        count_write()

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    # All entries

    def entries(self) -> Iterator[CacheEntry]:
        """The entries of this version's schema; a damaged file is left out."""
        for file in self.files():
            try:
                yield read_entry(file)
            except (FileNotFoundError, OtherSchemaError):  # removed meanwhile; of another version of this package
                continue
            except (OSError, CacheFormatError) as error:
                self._problems.failed("read", file, error)

    def keys(self) -> list[Any]:
        """The keys, but for those of types that are not imported here."""
        found = []
        for entry in self.entries():
            try:
                found.append(entry.value)
            except CacheFormatError:
                continue
        return found

    def clear(self, which: Callable[[CacheEntry], bool] | None = None) -> int:
        """Removes entries.

        Args:
            which: whether to remove an entry; default all, damaged files and those of other schemas too.

        Returns:
            How many files it removed.
        """
        if which is None:
            return self._remove(self.files() + self._leftovers(0.0))
        return self._remove([self.path / entry.file_name for entry in self.entries() if which(entry)])

    def sweep(self, max_age: float | None = None) -> int:
        """Removes damaged files, and what killed writers left more than an hour ago.

        Sound entries of other schemas stay: another version of this package may use them.

        Args:
            max_age: removes all that was written longer ago, too, in seconds; default nothing.

        Returns:
            How many files it removed.
        """
        before = -1.0 if max_age is None else time.time() - max_age
        return self._remove(self._leftovers() + [file for file in self.files() if self._is_refuse(file, before)])

    def _is_refuse(self, file: Path, before: float) -> bool:
        try:
            if file.lstat().st_mtime < before:
                return True
            read_entry(file)
        except OtherSchemaError:
            return False
        except CacheFormatError:
            return True
        except FileNotFoundError:
            return False
        except OSError as error:  # it may be readable again tomorrow
            self._problems.failed("read", file, error)
        return False

    # Files

    def files(self) -> list[Path]:
        """The files that have the name of an entry, damaged or not; others in the folder are somebody else's."""
        return self._listed(lambda folder: [folder / name for name in os.listdir(folder) if FILE_NAME.fullmatch(name)])

    def _leftovers(self, seconds: float = _WRITING_S) -> list[Path]:
        return self._listed(lambda folder: leftovers(folder, seconds))

    def _listed(self, look: Callable[[Path], list[Path]]) -> list[Path]:
        try:
            return sorted(look(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._problems.failed("list", self._path or "the cache folder", error)
            return []

    def _remove(self, files: list[Path]) -> int:
        removed = 0
        for file in files:
            try:
                file.unlink()
                removed += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                self._problems.failed("remove", file, error)
        if removed:
            count_write()
        return removed


def _form(key: Any) -> Any:
    return json.loads(stable_json(key, where="cache key"))
