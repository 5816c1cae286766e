"""Names of devices, shardings and values that are equal in every process."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import json
import os
import platform as platform_module
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from ..errors import ConfigError

_BACKENDS = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}


def platform_kind(platform: str | None = None) -> str:
    """`"gpu"`, `"tpu"` or `"cpu"` for a JAX platform name (default: JAX's default back end)."""
    platform = platform or jax.default_backend()
    return "gpu" if platform in ("gpu", "cuda", "rocm") else "tpu" if platform == "tpu" else "cpu"


def device_kind() -> str:
    """What the default device is: `"gpu"`, `"tpu"` or `"cpu"`.

    Returns:
        One of the three names.

    Example:
        >>> device_kind() in ("gpu", "tpu", "cpu")
        True
    """
    return platform_kind()


def get_device_platform(platform: str | None = None) -> str:
    """Which kernel language suits a device best: `"triton"`, `"pallas"` or `"xla"`.

    Args:
        platform: a JAX platform name; `None` is JAX's default back end.

    Returns:
        `"triton"` for GPUs, `"pallas"` for TPUs, `"xla"` for the rest.

    Example:
        >>> get_device_platform("cuda")
        'triton'
    """
    return _BACKENDS[platform_kind(platform)]


@functools.lru_cache(maxsize=256)
def _fingerprint(device: Any) -> str:
    kind = platform_kind(device.platform)
    if kind == "cpu":  # JAX calls every processor "cpu"
        return f"cpu|{platform_module.machine()}|{os.cpu_count()}"
    capability = getattr(device, "compute_capability", None)
    parts = [kind, device.device_kind, *([capability] if capability else [])]
    return "|".join(" ".join(str(part).split()) for part in parts)


def device_fingerprint(device: Any = None) -> str:
    """A stable name of a device model: kind, model and compute capability.

    Args:
        device: a device, a platform name (its first device), or `None` for the default device.

    Returns:
        Text such as `"gpu|NVIDIA H100 80GB HBM3|9.0"` or `"cpu|x86_64|8"` (a processor family and how many cores),
        equal for equal models in every process.

    Example:
        >>> device_fingerprint("cpu").split("|")[0]
        'cpu'
    """
    if device is None:
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        try:
            device = jax.local_devices(backend=device)[0]
        except RuntimeError:  # lowered for a platform that this process does not have
            return f"{platform_kind(device)}|{device}"
    return _fingerprint(device)


def sharding_fingerprint(x: Any) -> str | None:
    """The sharding of an array as stable text, `None` for anything without one.

    Args:
        x: an array, a tracer or a `ShapeDtypeStruct`.

    Returns:
        Mesh axes and sizes and the partition spec; never a device id.

    Example:
        >>> import jax.numpy as jnp
        >>> sharding_fingerprint(jnp.ones(3))
        'single'
    """
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"mesh({mesh}){tuple(sharding.spec)}" if mesh else "single"
    return "single" if len(sharding.device_set) == 1 else f"{type(sharding).__name__}"


def is_array(x: Any) -> bool:
    """Whether `x` is an operand: an array, a tracer, a NumPy scalar or an abstract array."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def abstractify(tree: Any) -> Any:
    """Replaces each array of a pytree by its `ShapeDtypeStruct`; other leaves stay.

    Args:
        tree: any pytree.

    Returns:
        The same tree with shapes, dtypes and weak types in place of arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> abstractify({"x": jnp.ones(3), "n": 2})["x"].shape
        (3,)
    """

    def leaf(x):
        if not is_array(x):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))

    return jax.tree.map(leaf, tree)


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
        return {"partial": _form(parts, where)}
    name = _importable_name(fn)
    if isinstance(fn, types.FunctionType):
        return _function_form(fn, name, where)
    if name is not None:
        return {"object": name}
    if isinstance(fn, types.MethodType):
        return {"method": _form([fn.__func__, fn.__self__], where)}
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
        values = _form(parts, f"{where}, by a value that {fn.__qualname__} reads,")
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


def _form(obj: Any, where: str) -> Any:  # one branch for each kind of value
    """JSON data that is equal exactly where values are equal; refuses what has no such form."""
    if obj is None or isinstance(obj, (bool, str)):
        return obj
    if isinstance(obj, enum.Enum):
        return {"enum": f"{type(obj).__module__}:{type(obj).__qualname__}.{obj.name}"}
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
        return {"scalar": [obj.dtype.name, obj.item()]}
    if isinstance(obj, type):
        dtype = _as_dtype(obj)
        return {"dtype": dtype.name} if dtype is not None else {"type": f"{obj.__module__}:{obj.__qualname__}"}
    if dataclasses.is_dataclass(obj):
        fields = {f.name: _form(getattr(obj, f.name), f"{where}.{f.name}") for f in dataclasses.fields(obj)}
        return {"dataclass": f"{type(obj).__module__}:{type(obj).__qualname__}", "fields": fields}
    if isinstance(obj, (tuple, list)):
        kind = "tuple" if isinstance(obj, tuple) else "list"
        return {kind: [_form(x, f"{where}[{i}]") for i, x in enumerate(obj)]}
    if isinstance(obj, Mapping):
        items = [[_form(k, f"{where} key"), _form(v, f"{where}[{k!r}]")] for k, v in obj.items()]
        return {"dict": sorted(items, key=lambda kv: json.dumps(kv[0], sort_keys=True))}
    if isinstance(obj, (set, frozenset)):
        return {"set": sorted((_form(x, where) for x in obj), key=lambda x: json.dumps(x, sort_keys=True))}
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
    return json.dumps(_form(obj, where), sort_keys=True, separators=(",", ":"))


def short_hash(text: str) -> str:
    """The first 16 hex digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
