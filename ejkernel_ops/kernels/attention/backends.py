"""Which back ends can do a call of attention, and which one it gets when nobody has measured."""

from __future__ import annotations

import functools
import warnings

import jax.numpy as jnp

from ...core.invocation import Invocation
from ...triton_call import unavailable
from ...utils.fingerprint import platform_kind
from ..on_triton import FLOATS, unfit_device
from . import cudnn, tiles
from .triton_spec import dot_precision
from .xla import Statics

_MOST_DIM = 256
_INT32 = 2**31


def unsupported(inv: Invocation, backend: str) -> str | None:
    """Why a back end cannot do a call of attention, either direction; `None` where it can."""
    if backend == "triton":
        return _unsupported_triton(inv) or unavailable() or _without_room(inv)
    if backend == "cudnn":
        return cudnn.unsupported(
            inv.arguments, Statics(**inv.kwargs), backward="dout" in inv.arguments,
            deterministic=inv.kwargs.get("deterministic", True),
        )  # fmt: skip
    return None


def _unsupported_triton(inv: Invocation) -> str | None:
    query, key, value = (inv.arguments[name] for name in ("query", "key", "value"))
    if reason := unfit_device(inv):
        return reason
    if query.dtype not in FLOATS:
        return f"Triton takes bfloat16, float16 and float32, these are {query.dtype}"
    if max(query.shape[3], value.shape[3]) > _MOST_DIM:
        return (
            f"the Triton kernels take a head_dim of at most {_MOST_DIM}, these are {query.shape[3]}, {value.shape[3]}"
        )
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an array is empty"
    out_size = query.size // query.shape[3] * value.shape[3]
    if max(out_size, query.size, key.size, value.size) // query.shape[0] >= _INT32:
        return "one example has 2**31 numbers or more, beyond what the kernels can address: split heads or length"
    if query.dtype == jnp.float32 and dot_precision(inv.kwargs["precision"]) is None:
        return f"Triton has no products of precision {inv.kwargs['precision']!r}"
    for name in ("bias", "sinks"):
        x = inv.arguments[name]
        if x is not None and x.dtype not in FLOATS:
            return f"Triton takes a {name} in bfloat16, float16 or float32, this is {x.dtype}: cast it"
    return None


def _without_room(inv: Invocation) -> str | None:
    """Why the smallest tile does not fit the device; `None` where it does."""
    if "dout" not in inv.arguments:
        return tiles.illegal_forward(inv, tiles.forward_config(tiles.forward_tiles(inv)[0]).fwd)
    return tiles.illegal_backward(inv, tiles.backward_config(*tiles.backward_tiles(inv)[0]).bwd)


def preferred(inv: Invocation) -> str:
    """The back end that a call gets without tuning: the fastest one as measured on Hopper, of those that can do it.

    On a GPU a faster one that only has to be installed is missed with a warning, once.
    """
    if platform_kind(inv.platform) != "gpu":
        return "xla"
    for backend in _order(inv):
        if (reason := unsupported(inv, backend)) is None:
            return backend
        if reason == (unavailable() if backend == "triton" else cudnn.missing()):
            _warn(backend, reason)
    return "xla"


def _order(inv: Invocation) -> tuple[str, ...]:
    """The back ends before XLA, the fastest first."""
    if inv.arguments["query"].dtype == jnp.float32 and dot_precision(inv.kwargs["precision"]) == "ieee":
        return ()  # products without tensor cores are cuBLAS's domain
    if inv.arguments["mask"] is not None or _is_slow_in_a_fixed_order(inv):
        return ("triton", "cudnn")  # cuDNN reads a mask as a bias of all queries by all keys
    return ("cudnn", "triton")


def _is_slow_in_a_fixed_order(inv: Invocation) -> bool:
    """Whether a fixed order of sums costs cuDNN more than this gradient takes on Triton."""
    small = inv.arguments["query"].shape[3] <= 64 or inv.kwargs["sliding_window"] is not None
    return "dout" in inv.arguments and inv.kwargs["deterministic"] and small


@functools.cache  # once in a process
def _warn(backend: str, reason: str) -> None:
    warnings.warn(f"attention would run on {backend}, and takes the next back end: {reason}", stacklevel=2)
