"""Configs as dotted fields and as JSON: merging partial ones, reading and writing typed ones."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from ..errors import CacheFormatError, ConfigError

T = TypeVar("T")


def leaf_fields(cfg: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a config by dotted name, nested dataclasses opened; one nameless field for other types."""
    if not dataclasses.is_dataclass(cfg):
        yield prefix.rstrip("."), cfg
        return
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaf_fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def merge(high: Any, low: Any) -> Any:
    """`high` with its `None` fields taken from `low`; a config that is no dataclass wins as a whole."""
    if high is None:
        return low
    if low is None or type(high) is not type(low) or not dataclasses.is_dataclass(high):
        return high
    fields = {f.name: merge(getattr(high, f.name), getattr(low, f.name)) for f in dataclasses.fields(high)}
    return dataclasses.replace(high, **fields)  # type: ignore[type-var]


def to_json(config: Any) -> str:
    """A config as JSON text; `from_json` with its type reads it back equal.

    A dataclass whose fields change their meaning sets `config_version = 2` (a `ClassVar`); text of another version is
    then refused.

    Args:
        config: a dataclass (nested ones too), or plain numbers, strings, lists, sets and dicts.

    Returns:
        Compact JSON with sorted keys, equal in every process; fields that are `None` by default and still are left out.

    Raises:
        ConfigError: a value has no JSON form.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> to_json(FwdParams(num_warps=4))
        '{"num_warps":4}'
    """
    try:
        plain = _plain(config)
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config {config!r} has no JSON form: {error}") from None


def from_json(text: str | bytes, config_type: type[T]) -> T:
    """Reads a config of a given type, strictly.

    Args:
        text: JSON text.
        config_type: the type to build, nested dataclasses included.

    Returns:
        A `config_type`.

    Raises:
        CacheFormatError: no JSON, an unknown field, a wrong type, a value out of range or another `config_version`.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> from_json('{"num_warps": 4}', FwdParams).num_warps
        4
    """
    return from_plain(parse_json(text), config_type)


def parse_json(text: str | bytes) -> Any:
    """JSON data; refuses NaN, infinities, repeated names and deep nesting."""

    def unique(pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"the name {name[:64]!r} occurs twice in one object")
        return found

    def refuse(word):
        raise ValueError(f"{word} is not allowed")

    def finite(word):
        value = float(word)
        return value if abs(value) < float("inf") else refuse(word)

    try:
        text = text if isinstance(text, str) else text.decode()  # what else it might be is not guessed, nor imported
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise CacheFormatError(f"not valid JSON: {error}") from None


def from_plain(data: Any, config_type: type[T]) -> T:
    """Builds a typed config from JSON data, strictly."""
    data = _known(data, config_type, "config")
    try:
        return msgspec.convert(data, config_type, strict=True, str_keys=True)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise CacheFormatError(f"not a {getattr(config_type, '__name__', config_type)}: {error}") from None


def _version(config_type: Any) -> int:
    return getattr(config_type, "config_version", 1)


def _known(data: Any, config_type: Any, where: str) -> Any:
    """Data of a dataclass without its version: msgspec passes over unknown names, a config may not."""
    if not dataclasses.is_dataclass(config_type) or not isinstance(data, dict):
        return data
    data = dict(data)
    version, name = data.pop("@version", 1), getattr(config_type, "__name__", str(config_type))
    if version != _version(config_type):
        raise CacheFormatError(f"{where} is of version {version!r} of {name}; this is version {_version(config_type)}")
    known = _field_types(config_type)
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise CacheFormatError(f"{where} has an unknown field {name!r}; {hint}")
        for cls in known[name]:
            data[name] = _known(value, cls, f"{where}.{name}")
    return data


@functools.lru_cache(maxsize=256)
def _field_types(config_type: type) -> dict[str, tuple[type, ...]]:
    """The classes that each field of a dataclass may hold: looked up once, for it evaluates annotations."""
    options = {
        f.name: getattr(f.type, "types", (f.type,))
        for f in msgspec.inspect.type_info(config_type).fields  # type: ignore[attr-defined]
    }
    return {name: tuple(x.cls for x in types if hasattr(x, "cls")) for name, types in options.items()}


def _plain(config: Any) -> Any:
    """JSON data of a config; a dataclass without the fields that are `None` by default and still are."""
    if dataclasses.is_dataclass(config):
        fields = [(f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)]
        plain = {name: _plain(value) for name, value, default in fields if not (value is None and default is None)}
        return plain if (version := _version(config)) == 1 else plain | {"@version": version}
    if isinstance(config, dict):
        return {key: _plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [_plain(value) for value in config]
    return msgspec.to_builtins(config, order="deterministic")
