"""Which abstract calls were lowered in this process: what labels are looked up in."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from typing import Any

from .config.cache import Key
from .core.invocation import Invocation
from .core.snapshot import Snapshot
from .errors import ConfigError
from .utils.fingerprint import device_fingerprint

_LIMIT = 4096
_calls: OrderedDict[Key, Invocation] = OrderedDict()  # never emptied: JAX does not lower a call twice
_hidden: set[Key] = set()
_lock = threading.Lock()


def recording() -> bool:
    """Whether lowered calls are recorded."""
    value = os.environ.get("EJKERNEL_OPS_RECORD", "1")
    if value not in ("0", "1", ""):
        raise ConfigError(f"EJKERNEL_OPS_RECORD is {value!r}; expected 0 or 1")
    return value != "0"


def record(inv: Invocation) -> None:
    """Keeps a call that was lowered, unless `EJKERNEL_OPS_RECORD=0`."""
    if not recording():
        return
    if inv.call is not None:  # overlays of the moment are no part of what was called
        inv.call = dataclasses.replace(inv.call, snapshot=Snapshot(), explicit=())
    _keep(Key(inv.device_fingerprint, inv.op_id_v, inv.call_key), inv)


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
        TypeError: another number of arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops.kernels import LINEAR
        >>> inv = Invocation(LINEAR, (jnp.ones((2, 3)), jnp.ones((3, 4))))
        >>> record_invocation(LINEAR, inv)
        >>> inv.call_key in get_invocations()["linear@v1"]
        True
    """
    if len(args) == 2:
        _keep(Key(args[1].device_fingerprint, args[1].op_id_v, args[1].call_key), args[1])
    elif len(args) == 6:
        device, op_id_v, call_key, kernel, call_args, kwargs = args
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


def clear_invocations() -> None:
    """Hides all recorded calls from `get_invocations`; labels of programs lowered before still find theirs.

    Example:
        >>> clear_invocations()
        >>> get_invocations()
        {}
    """
    with _lock:
        _hidden.update(_calls)
