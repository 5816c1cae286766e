"""Values as text that is equal exactly where they are equal, in every process; and read back from it."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import json
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.core import ShapedArray

from ..errors import CacheFormatError, ConfigError


def stable_json(obj: Any, *, where: str = "value") -> str:
    """Deterministic JSON text of a value: equal text exactly where values are equal, in every process.

    Args:
        obj: numbers, strings, containers, dtypes, enums, dataclasses, functions, abstract arrays.
        where: how errors name the value.

    Returns:
        Compact JSON with sorted keys.

    Raises:
        ConfigError: something in `obj` has no value-based form; the text names it.

    Example:
        >>> stable_json({"b": 1, "a": (2,)}) == stable_json({"a": (2,), "b": 1})
        True
    """
    return json.dumps(value_form(obj, where), sort_keys=True, separators=(",", ":"))


def short_hash(text: str) -> str:
    """The first 16 hex digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def value_of(form: Any) -> Any:
    """The value of a form that `value_form` made. Imports nothing; builds enums and frozen dataclasses only.

    Raises:
        CacheFormatError: no such form, or that of a function, or of a type that is not imported here.
    """
    if form is None or type(form) in (bool, int, str):
        return form
    try:
        ((kind, data),) = ((k, v) for k, v in form.items() if k != "fields")
        if kind == "dataclass":
            return _dataclass_of(data, form["fields"])
        return _READERS[kind](data)
    except CacheFormatError:
        raise
    except Exception as error:  # a border: what a class raises of values that it does not know is endless
        raise CacheFormatError(f"{str(form)[:200]} is not a value that can be read back: {error!r}") from None


def _dataclass_of(name: str, fields: dict) -> Any:
    cls = imported_dataclass(name)
    if cls is None:
        raise CacheFormatError(f"the dataclass {name!r} is not imported here: import its module")
    return cls(**{field: value_of(value) for field, value in fields.items()})


def imported_dataclass(name: str) -> type | None:
    """The frozen dataclass `module:qualname`, if its module is imported."""
    found = _imported(name)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return None
    return found if found.__dataclass_params__.frozen else None  # type: ignore[attr-defined]


def _imported(name: str) -> Any:
    """What a name leads to by way of modules and classes, past any code that would make or import it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    return found


@functools.cache
def _dtypes() -> dict[str, np.dtype]:
    """The number types by name. NumPy reads other text than names, too, and compiles some of it."""
    given = [*np.sctypeDict.values(), *(getattr(ml_dtypes, name) for name in dir(ml_dtypes))]
    scalars = [t for t in given if isinstance(t, type) and issubclass(t, np.generic)]
    known = {
        np.dtype(t) for t in scalars if not issubclass(t, (np.flexible, np.object_, np.datetime64, np.timedelta64))
    }
    return {dtype.name: dtype for dtype in known}


def _dtype_of(name: Any) -> np.dtype:
    if (found := _dtypes().get(name)) is None:
        raise CacheFormatError(f"{str(name)[:200]!r} is no number type")
    return found


def _scalar_of(data: Any) -> np.generic:
    name, text = data
    dtype = _dtype_of(name)
    kinds = ((np.bool_, lambda t: t == "True"), (np.integer, int), (np.floating, float), (np.complexfloating, complex))
    for kind, read in kinds:
        if jax.numpy.issubdtype(dtype, kind):
            return dtype.type(read(text))
    raise CacheFormatError(f"{name!r} is no number type")


def _namedtuple_of(data: Any) -> Any:
    name, *items = data
    found = _imported(name)
    fields = getattr(found, "_fields", None)
    if not (isinstance(found, type) and issubclass(found, tuple) and fields is not None):
        raise CacheFormatError(f"the named tuple {name!r} is not imported here: import its module")
    if len(items) != len(fields):
        raise CacheFormatError(f"the named tuple {name!r} has {len(items)} values; expected {', '.join(fields)}")
    return tuple.__new__(found, map(value_of, items))


def _array_of(data: Any) -> jax.ShapeDtypeStruct:
    name, shape, weak = data
    if any(type(n) is not int or n < 0 for n in shape):
        raise CacheFormatError(f"an array of shape {shape!r} has no sizes to tune for")
    impl = _KEY_IMPLS.get(name)
    if impl is not None:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    else:
        dtype = _dtype_of(name)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=bool(weak))


def _enum_of(name: str) -> enum.Enum:
    path, _, member = name.rpartition(".")
    found = _imported(path)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise CacheFormatError(f"the enum {path!r} is not imported here: import its module")
    return found[member]


_KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
_READERS = {
    "float": float,
    "complex": complex,
    "enum": _enum_of,
    "array": _array_of,
    "dtype": _dtype_of,
    "scalar": _scalar_of,
    "namedtuple": _namedtuple_of,
    "tuple": lambda data: tuple(map(value_of, data)),
    "list": lambda data: list(map(value_of, data)),
    "dict": lambda data: {value_of(key): value_of(value) for key, value in data},
    "set": lambda data: frozenset(map(value_of, data)),
}


def _code_digest(code: types.CodeType) -> str:
    """A digest of what a function does, blind to its file, its line and its name."""

    def const(value):
        if isinstance(value, frozenset):  # its order depends on the hash seed of the process
            return "set", sorted(map(repr, value))
        if isinstance(value, tuple):
            return "tuple", [const(part) for part in value]
        return _code_digest(value) if isinstance(value, types.CodeType) else repr(value)

    consts = [const(value) for value in code.co_consts]
    text = repr((code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _importable_name(obj: Any) -> str | None:
    """`module:qualname` where that name leads back to this very object."""
    name, module = getattr(obj, "__qualname__", None), getattr(obj, "__module__", None)
    if not name or not module or "<" in name:
        return None
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is obj else None


def _callable_form(fn: Any, where: str) -> Any:
    if isinstance(fn, functools.partial):
        parts = {"func": fn.func, "args": fn.args, "keywords": fn.keywords}
        return {"partial": value_form(parts, where)}
    name = _importable_name(fn)
    if isinstance(fn, types.FunctionType):
        return _function_form(fn, name, where)
    if name is not None:
        return {"object": name}
    if isinstance(fn, types.MethodType):
        return {"method": value_form([fn.__func__, fn.__self__], where)}
    raise ConfigError(
        f"{where} is {fn!r}, which has no value-based form, so calls with different values of it could "
        "not be told apart; pass a function, a functools.partial or a frozen dataclass"
    )


def _function_form(fn: types.FunctionType, name: str | None, where: str) -> Any:
    """Code and the values that it reads: closure, defaults, and the globals of a function that has no lasting name."""
    open_now = _open_functions.__dict__.setdefault("ids", set())
    if id(fn) in open_now:
        return {"recursive": fn.__qualname__}
    cells = [c.cell_contents for c in fn.__closure__ or ()]
    parts: list[Any] = [cells, list(fn.__defaults__ or ()), fn.__kwdefaults__ or {}]
    open_now.add(id(fn))
    try:
        if name is None or fn.__module__ == "__main__":  # a library's function is known by its name and code
            parts.append({n: fn.__globals__[n] for n in _global_names(fn.__code__) if n in fn.__globals__})
        values = value_form(parts, f"{where}, by a value that {fn.__qualname__} reads,")
    finally:
        open_now.discard(id(fn))
    return {"function": [name, fn.__module__], "code": _code_digest(fn.__code__), "values": values}


_open_functions = threading.local()  # functions whose form is being made: one that reads itself must end


def _global_names(code: types.CodeType) -> list[str]:
    """The global names that a function, or one inside of it, loads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(_global_names(const))
    return sorted(names)


def value_form(obj: Any, where: str) -> Any:  # one branch for each kind of value
    """JSON data that is equal exactly where values are equal; refuses what has no such form."""
    if isinstance(obj, enum.Enum):  # before what an enum may also be
        return {"enum": f"{type(obj).__module__}:{type(obj).__qualname__}.{obj.name}"}
    if obj is None or isinstance(obj, (bool, str)):
        return obj
    if isinstance(obj, int):
        return int(obj)
    if isinstance(obj, (float, complex)):
        return {"float": repr(obj)} if isinstance(obj, float) else {"complex": repr(obj)}
    if isinstance(obj, (jax.ShapeDtypeStruct, ShapedArray)):
        shape = [int(n) if isinstance(n, (int, np.integer)) else str(n) for n in obj.shape]  # text: symbolic ones
        return {"array": [str(obj.dtype), shape, bool(getattr(obj, "weak_type", False))]}
    if isinstance(obj, types.ModuleType):
        return {"module": obj.__name__}
    if isinstance(obj, np.dtype):
        return {"dtype": obj.name}
    if isinstance(obj, np.generic):
        return {"scalar": [obj.dtype.name, str(obj.item())]}
    if isinstance(obj, type):
        dtype = _as_dtype(obj)
        return {"dtype": dtype.name} if dtype is not None else {"type": f"{obj.__module__}:{obj.__qualname__}"}
    if dataclasses.is_dataclass(obj):
        fields = {f.name: value_form(getattr(obj, f.name), f"{where}.{f.name}") for f in dataclasses.fields(obj)}
        return {"dataclass": f"{type(obj).__module__}:{type(obj).__qualname__}", "fields": fields}
    if isinstance(obj, tuple) and (fields := getattr(obj, "_fields", None)) is not None:
        name = f"{type(obj).__module__}:{type(obj).__qualname__}"
        return {"namedtuple": [name, *(value_form(x, f"{where}.{f}") for f, x in zip(fields, obj))]}
    if isinstance(obj, (tuple, list)):
        kind = "tuple" if isinstance(obj, tuple) else "list"
        return {kind: [value_form(x, f"{where}[{i}]") for i, x in enumerate(obj)]}
    if isinstance(obj, Mapping):
        items = [[value_form(k, f"{where} key"), value_form(v, f"{where}[{k!r}]")] for k, v in obj.items()]
        return {"dict": sorted(items, key=lambda kv: json.dumps(kv[0], sort_keys=True))}
    if isinstance(obj, (set, frozenset)):
        return {"set": sorted((value_form(x, where) for x in obj), key=lambda x: json.dumps(x, sort_keys=True))}
    if callable(obj):
        return _callable_form(obj, where)
    raise ConfigError(
        f"{where} is a {type(obj).__module__}.{type(obj).__qualname__}, which has no value-based form; "
        "pass numbers, strings, tuples, dicts, dtypes, functions or frozen dataclasses"
    )


def _as_dtype(obj: type) -> np.dtype | None:
    """The dtype that a NumPy or JAX scalar type, such as `jnp.float32`, stands for."""
    if issubclass(obj, np.generic):
        try:
            return np.dtype(obj)
        except TypeError:  # an abstract one, such as `np.floating`
            return None
    dtype = getattr(obj, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) and getattr(jax.numpy, dtype.name, None) is obj else None
