"""Which abstract calls were lowered in this process: what labels are looked up in; and moved between processes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import threading
import warnings
from collections import Counter, OrderedDict
from typing import Any

import jax

from .config.cache import Key
from .config.schema import parse_json
from .core.call import call_like
from .core.invocation import Invocation
from .core.kernel import find_kernel, require_kernel
from .core.snapshot import Snapshot
from .environment import recording
from .errors import CacheFormatError, ConfigError
from .utils.files import read_file, replace_file
from .utils.fingerprint import device_fingerprint
from .utils.values import value_form, value_of

_LIMIT = 4096
_FORMAT, _SCHEMA = "ejkernel_ops.invocations", 1
_calls: OrderedDict[Key, Invocation] = OrderedDict()  # never emptied: JAX does not lower a call twice
_hidden: set[Key] = set()
_lock = threading.Lock()


def record(inv: Invocation) -> None:
    """Keeps a call that was lowered, unless `EJKERNEL_OPS_RECORD=0`."""
    if not recording():
        return
    if inv.call is not None:  # overlays of the moment are no part of what was called
        inv.call = _bare(inv.call)
    _keep(Key(inv.device_fingerprint, inv.op_id_v, inv.call_key), inv)


@dataclasses.dataclass(frozen=True)
class SharedCall:
    """A call that XLA shares out over devices when it compiles.

    Args:
        call: its static part.
        arrays: how its arrays may be split.
        platform: what it was lowered for.
        operands: the types of its whole operands.
    """

    call: Any
    arrays: Any
    platform: str
    operands: list[jax.ShapeDtypeStruct]


_shared: OrderedDict[str, SharedCall] = OrderedDict()  # by label


def record_shared(label: str, shared: SharedCall) -> None:
    """Keeps a call whose parts are to be found later, unless `EJKERNEL_OPS_RECORD=0`."""
    if recording():
        with _lock:
            _shared[label] = shared
            if len(_shared) > _LIMIT:
                _shared.popitem(last=False)


def find_shared(label: str) -> SharedCall | None:
    """The recorded call of a label that stands for the parts of several devices."""
    return _shared.get(label)


def _bare(call: Any) -> Any:
    forward = None if call.forward is None else _bare(call.forward)
    return dataclasses.replace(call, snapshot=Snapshot(), explicit=(), forward=forward)


def _keep(key: Key, inv: Invocation) -> None:
    with _lock:
        _calls[key] = inv
        _calls.move_to_end(key)
        _hidden.discard(key)
        if len(_calls) > _LIMIT:
            _hidden.discard(_calls.popitem(last=False)[0])


def find_call(key: Key) -> Invocation | None:
    """The recorded call of a key, hidden ones too."""
    return _calls.get(key)


def record_invocation(*args: Any) -> None:
    """Records a call by hand; lowered calls record themselves.

    Args:
        *args: `device, op_id_v, call_key, kernel, args, kwargs`, or `kernel, inv`. Arrays are kept as
            shapes and dtypes only.

    Raises:
        TypeError: another number of arguments, or of other types.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops.kernels import LINEAR
        >>> inv = Invocation(LINEAR, (jnp.ones((2, 3)), jnp.ones((3, 4))))
        >>> record_invocation(LINEAR, inv)
        >>> inv.call_key in get_invocations()["linear@v1"]
        True
    """
    if len(args) == 2:
        kernel, inv = args
        if not isinstance(inv, Invocation) or inv.kernel != kernel:
            raise TypeError(f"got ({kernel!r}, {inv!r}); expected a kernel and an Invocation of it")
        _keep(Key(inv.device_fingerprint, inv.op_id_v, inv.call_key), inv)
    elif len(args) == 6:
        device, op_id_v, call_key, kernel, call_args, kwargs = args
        require_kernel(kernel)
        _keep(Key(device, op_id_v, call_key), Invocation(kernel, call_args, kwargs))
    else:
        raise TypeError(f"expected (kernel, inv) or 6 arguments, got {len(args)}")


def get_invocations(device: str | None = None) -> dict[str, dict[str, tuple[Any, tuple, dict]]]:
    """The recorded calls of a device.

    Args:
        device: device fingerprint; default that of the default device.

    Returns:
        A copy: op id and version -> call key -> (kernel, abstract args, abstract kwargs).

    Example:
        >>> isinstance(get_invocations(), dict)
        True
    """
    device = device or device_fingerprint()
    found: dict[str, dict[str, tuple[Any, tuple, dict]]] = {}
    with _lock:
        for key, inv in _calls.items():
            if key.device == device and key not in _hidden:
                found.setdefault(key.op_id_v, {})[key.call_key] = (inv.kernel, inv.args, dict(inv.kwargs))
    return found


def recorded_devices() -> Counter[str]:
    """How many recorded calls each device has, by fingerprint."""
    with _lock:
        return Counter(key.device for key in _calls if key not in _hidden)


def clear_invocations() -> None:
    """Hides all recorded calls from `get_invocations`; labels of programs lowered before still find theirs.

    Example:
        >>> clear_invocations()
        >>> get_invocations()
        {}
    """
    with _lock:
        _hidden.update(_calls)


# Between processes


def save_invocations(path: str | os.PathLike, device: str | None = None) -> None:
    """Writes the recorded calls of a device as JSON: shapes, dtypes and static values, no arrays.

    Calls with static arguments that cannot be read back, such as functions, are left out with a warning.

    Args:
        path: the file; it is replaced as a whole.
        device: device fingerprint; default that of the default device.

    Raises:
        FileNotFoundError: the folder does not exist.

    Example:
        >>> import tempfile, os
        >>> save_invocations(os.path.join(tempfile.mkdtemp(), "calls.json"))
    """
    device = device or device_fingerprint()
    with _lock:
        found = [(key, inv) for key, inv in _calls.items() if key.device == device and key not in _hidden]
    calls = []
    for key, inv in found:
        try:
            plain = call_to_plain(key, inv)
            call_from_plain(parse_json(json.dumps(plain)))
        except (ConfigError, CacheFormatError) as error:
            warnings.warn(f"{key.op_id_v}:{key.call_key} is not saved: {error}", stacklevel=2)
        else:
            calls.append(plain)
    replace_file(path, json.dumps({"format": _FORMAT, "schema": _SCHEMA, "calls": calls}, indent=1))


def load_invocations(path: str | os.PathLike, *, device: str | None = None) -> None:
    """Records the calls of a file that `save_invocations` wrote, so that `autotune_recorded` can tune them.

    Nothing is imported: the kernels must have been made in this process, and so must the types of static arguments,
    which may be enums and frozen dataclasses.

    Args:
        path: the file.
        device: device fingerprint to record them under, such as `device_fingerprint()` for calls that were saved on
            another machine; default the saved one.

    Raises:
        CacheFormatError: not such a file, damaged, or a call that has another key here; nothing is recorded then.
        ConfigError: a kernel that is not known in this process; nothing is recorded then.

    Example:
        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "calls.json")
        >>> save_invocations(path); load_invocations(path)
    """
    try:
        body = parse_json(read_file(path))
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise CacheFormatError("not saved invocations: the field 'format' is missing or another")
        if body.get("schema") != _SCHEMA:
            raise CacheFormatError(f"schema is {body.get('schema')!r}; this version reads {_SCHEMA}")
        calls = [call_from_plain(plain) for plain in body["calls"]]
    except CacheFormatError as error:
        raise CacheFormatError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CacheFormatError(f"{path}: damaged: {type(error).__name__}: {error}") from None
    for key, inv in calls:
        if device is not None:
            key, inv.platform = key._replace(device=device), None
        _keep(key, inv)


def call_to_plain(key: Key, inv: Invocation) -> dict[str, Any]:
    """A recorded call as JSON data.

    Raises:
        ConfigError: a static argument that could not be read back.
    """
    call = inv.call
    return {
        "device": key.device,
        "op": key.op_id_v,
        "key": key.call_key,
        "platform": inv.platform,
        "arguments": [[name, value_form(value, f"argument {name!r}")] for name, value in inv.arguments.items()],
        "needs": value_form(inv.needs, "needs"),
        "all_needs": [] if call is None or call.needs is None else list(call.needs),
        "forward": None if call is None or call.forward is None else call.forward.kernel.op_id_v,
        "residuals": inv.residuals,
    }


def call_from_plain(data: dict[str, Any]) -> tuple[Key, Invocation]:
    """The call of JSON data; its kernels must have been made in this process.

    Raises:
        CacheFormatError: damaged, or a call that has another key here.
        ConfigError: an unknown kernel.
    """
    key = Key(str(data["device"]), str(data["op"]), str(data["key"]))
    kernel = find_kernel(key.op_id_v)
    values = {str(name): value_of(form) for name, form in data["arguments"]}
    if list(values) != list(kernel.signature.parameters):
        raise CacheFormatError(f"{key.op_id_v} has the parameters {kernel.signature}, the file has {list(values)}")
    bound = inspect.BoundArguments(kernel.signature, values)  # type: ignore[arg-type]
    inv = Invocation(
        kernel, bound.args, bound.kwargs,
        needs=value_of(data["needs"]), residuals=bool(data["residuals"]), platform=data["platform"],
    )  # fmt: skip
    if inv.call_key != key.call_key:
        raise CacheFormatError(
            f"the call {key.op_id_v}:{key.call_key} has another key here, {inv.call_key}: the kernel or its attributes "
            "differ, or the key was made by hand"
        )
    inv.call, _ = call_like(inv, None if data["forward"] is None else find_kernel(str(data["forward"])))
    if needs := tuple(map(bool, data["all_needs"])):
        if inv.call.needs is None or len(needs) != len(inv.call.needs):
            raise CacheFormatError(f"{key.op_id_v}:{key.call_key} has needs of another length")
        inv.call = dataclasses.replace(inv.call, needs=needs)
    return key, inv
