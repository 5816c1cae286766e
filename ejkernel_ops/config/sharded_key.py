"""`default_key_builder_with_sharding`: the key of a call, with how its arguments are sharded."""

from __future__ import annotations

import jax

from ..core.invocation import Invocation
from ..core.kernel import Kernel, require_kernel
from ..utils.fingerprint import is_array, sharding_fingerprint
from ..utils.values import short_hash, stable_json
from .cache import Key


def default_key_builder_with_sharding(kernel: Kernel, args: tuple = (), kwargs: dict | None = None) -> Key:
    """The key of a call that tells apart how its arguments are sharded.

    Without a sharded argument it is the key that the call's label has. Labels themselves have no sharding in them:
    inside `shard_map` and under Explicit axes their shapes are those of one device's part.

    Args:
        kernel: the kernel.
        args: positional arguments: arrays, tracers under Explicit mesh axes, or `ShapeDtypeStruct`s with a sharding.
        kwargs: keyword arguments, likewise.

    Returns:
        A `Key`: the device model where the arguments are, name and version, and 16 hex digits.

    Raises:
        ConfigError: a static argument has no value-based form.
        TypeError: no kernel, or the arguments do not fit the kernel's signature.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops.kernels import LINEAR
        >>> default_key_builder_with_sharding(LINEAR, (jnp.ones((2, 3)), jnp.ones((3, 4)))).op_id_v
        'linear@v1'
    """
    require_kernel(kernel)
    args, kwargs = kernel.prepare(*args, **(kwargs or {}))
    inv = Invocation(kernel, args, kwargs)
    bound = kernel.signature.bind(*args, **kwargs)
    arrays = [x for x in jax.tree.leaves(tuple(bound.arguments.values())) if is_array(x)]
    shardings = [sharding_fingerprint(x) or "single" for x in arrays]
    digits = inv.call_key
    if set(shardings) - {"single"}:
        digits = short_hash(stable_json([digits, shardings]))
    return Key(inv.device_fingerprint, inv.op_id_v, digits)
