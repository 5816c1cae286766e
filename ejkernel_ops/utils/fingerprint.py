"""Names of devices and shardings that are equal in every process, and arrays without their values."""

from __future__ import annotations

import functools
import os
import platform as platform_module
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

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


def device_of(tree: Any) -> Any:
    """The device on which the first committed array of a pytree lives; `None` where there is none, as in a trace."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and getattr(x, "committed", False):
            return min(x.devices(), key=lambda device: device.id)
    return None


def device_fingerprint(device: Any = None) -> str:
    """A stable name of a device model: kind, model and compute capability.

    Args:
        device: a device, an array (where it lives, if it is committed there), a platform name (its first device), or
            `None` for the default device.

    Returns:
        Text such as `"gpu|NVIDIA H100 80GB HBM3|9.0"` or `"cpu|x86_64|8"` (a processor family and how many cores),
        equal for equal models in every process.

    Example:
        >>> device_fingerprint("cpu").split("|")[0]
        'cpu'
    """
    if isinstance(device, jax.Array):
        device = device_of(device)
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

    Equal for an array and for its tracer under Explicit mesh axes. Under Auto axes a tracer does not know how its
    array is sharded.

    Args:
        x: an array, a tracer or a `ShapeDtypeStruct`.

    Returns:
        `"single"` where each device has all of it, else the mesh axes with their sizes and the partition of each
        array axis (of a sharding without a mesh, its type and the shape of a part); never a device id.

    Example:
        >>> import jax.numpy as jnp
        >>> sharding_fingerprint(jnp.ones(3))
        'single'
    """
    sharding = getattr(jax.typeof(x), "sharding", None) if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if sharding is None:
        return "single" if isinstance(x, jax.Array) else None
    if sharding.is_fully_replicated:
        return "single"
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"{type(sharding).__name__}{list(sharding.shard_shape(x.shape))}"
    parts = [[] if part is None else list(part) if isinstance(part, tuple) else [part] for part in sharding.spec]
    parts += [[]] * (x.ndim - len(parts))  # trailing `None`s may be left out of a spec
    mesh = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
    return f"mesh({mesh})({','.join('*'.join(part) or '-' for part in parts)})"


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
