"""`CacheEntry`: one config on disk, and the checks that its file must pass."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.kernel import KERNELS
from ..errors import CacheFormatError
from ..utils.values import imported_dataclass, value_of
from .cache import Key, is_key
from .neighbours import HintsKey, read_hints
from .schema import from_plain, parse_json

SCHEMA = 3
_FORMAT = "ejkernel_ops.cache"
_MAX_BYTES = 1 << 20
FILE_NAME = re.compile(r"[0-9a-f]{64}\.json")
_PLAIN = {f"builtins:{kind.__name__}": kind for kind in (bool, int, float, str, list, tuple, dict)}
_FIELDS = {"schema", "key", "type", "config", "versions", "sha256"}


class OtherSchemaError(CacheFormatError):
    """The file was written by another version of this package."""


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """A stored config as JSON data: nothing of it is built before it is asked for by its key.

    Args:
        key: the form of the key, as `stable_json` writes it.
        type: `module:qualname` of the config.
        config: the config.
        versions: what it was tuned with.
    """

    key: Any
    type: str
    config: Any
    versions: dict[str, str]

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return file_name(self.key)

    @property
    def value(self) -> Any:
        """The key; raises `CacheFormatError` where it is of a type that is not imported here."""
        return value_of(self.key)

    def to_plain(self) -> dict[str, Any]:
        """JSON data with schema and checksum."""
        body = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return body | {"sha256": _checksum(body)}

    def dumps(self) -> str:
        """The text of its file."""
        return json.dumps(self.to_plain(), sort_keys=True, indent=1)

    @classmethod
    def from_plain(cls, body: Any) -> CacheEntry:
        """Checks JSON data.

        Raises:
            CacheFormatError: no entry, or a damaged one.
            OtherSchemaError: one of another version of this package.
        """
        if not isinstance(body, dict) or "schema" not in body:
            raise CacheFormatError("not a cache entry")
        if body["schema"] != SCHEMA:
            raise OtherSchemaError(f"schema {body['schema']!r}; this version reads {SCHEMA}")
        if set(body) != _FIELDS:
            raise CacheFormatError(f"not a cache entry: it has the fields {', '.join(sorted(body))}")
        body = dict(body)
        if body.pop("sha256") != _checksum(body):
            raise CacheFormatError("checksum does not match: the file is damaged")
        if not isinstance(body["type"], str) or not _is_text_by_text(body["versions"]):
            raise CacheFormatError("type is no text, or versions are no texts by name")
        return cls(body["key"], body["type"], body["config"], body["versions"])

    @classmethod
    def loads(cls, raw: bytes) -> CacheEntry:
        """Checks the bytes of a file; errors as `from_plain`."""
        if len(raw) > _MAX_BYTES:
            raise CacheFormatError("larger than 1 MiB")
        try:
            return cls.from_plain(parse_json(raw.decode()))
        except UnicodeDecodeError as error:
            raise CacheFormatError(f"no text: {error}") from None


def file_name(key_form: Any) -> str:
    """The name of the file of a key: a digest, so that no name of an op, however hostile, is ever part of a path.

    The schema is in it, so that versions of this package with another one neither misread nor replace each other's.
    """
    text = json.dumps([SCHEMA, key_form], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest() + ".json"


def read_entry(file: Path) -> CacheEntry:
    """The entry in a file, fully checked, but for its config.

    Raises:
        CacheFormatError: as `CacheEntry.from_plain`, or that of another file's key.
        OSError: the file cannot be read, or is a link.
    """
    with open(file, "rb", opener=_open) as f:
        entry = CacheEntry.loads(f.read(_MAX_BYTES + 1) or b"")  # `None`: a pipe with nothing in it
    if entry.file_name != file.name:
        raise CacheFormatError("holds another key")
    return entry


def dump_entries(entries: Iterable[CacheEntry]) -> str:
    """Entries as one text."""
    body = {"format": _FORMAT, "schema": SCHEMA, "entries": [entry.to_plain() for entry in entries]}
    return json.dumps(body, sort_keys=True, indent=1)


def load_entries(text: str | bytes) -> list[CacheEntry]:
    """The entries of such a text; configs of kernels that are known here are checked, too.

    Raises:
        CacheFormatError: no such text, or an entry that is damaged or illegal: then which.
    """
    body = parse_json(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT or not isinstance(body.get("entries"), list):
        raise CacheFormatError("not exported entries: the field 'format' or 'entries' is missing or another")
    found = []
    for number, plain in enumerate(body["entries"], 1):
        try:
            found.append(entry := CacheEntry.from_plain(plain))
            key = value_of(entry.key)
            if isinstance(key, HintsKey) or _kernel_type(key) is not None:
                config_of(entry, key)
        except CacheFormatError as error:
            raise CacheFormatError(f"entry {number} of {len(body['entries'])}: {error}") from None
    return found


def _open(file: str, flags: int) -> int:
    """Opens neither through a link nor waiting for a pipe."""
    return os.open(file, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def config_of(entry: CacheEntry, key: Any, default: type | None = None) -> Any:
    """The config of an entry, of the type that `config_type` tells.

    Raises:
        CacheFormatError: there is no such type, or the config is none of it.
    """
    cfg = from_plain(entry.config, config_type(key, entry.type, default))
    if isinstance(key, HintsKey):  # a text that holds configs
        read_hints(cfg, key.kind, _kernel_type(key) or Any)
    return cfg


def config_type(key: Any, stored: str, default: type | None) -> type:
    """The type of the config under a key: what its kernel declares, else the default, else the stored one.

    Raises:
        CacheFormatError: there is none.
    """
    found = str if isinstance(key, HintsKey) else _kernel_type(key) or default or type_named(stored)
    if found is None:
        raise CacheFormatError(
            f"the type {stored!r} is no plain one, nor a frozen dataclass of a module that is imported here: "
            "import it, or pass cfg_type="
        )
    return found


def _kernel_type(key: Any) -> type | None:
    """The type that a kernel of this process declares for its configs."""
    known = isinstance(key, (Key, HintsKey)) and is_key(key)  # one that was forged may hold anything
    return getattr(KERNELS.get(key.op_id_v), "config_cls", None) if known else None


def type_named(stored: str) -> type | None:
    """The type of a stored config: a plain one, or a frozen dataclass whose module is imported here."""
    return _PLAIN.get(stored) or imported_dataclass(stored)


def _checksum(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _is_text_by_text(data: Any) -> bool:
    return isinstance(data, dict) and all(isinstance(value, str) for value in data.values())
