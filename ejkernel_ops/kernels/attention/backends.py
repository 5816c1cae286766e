"""Which back ends can do a call of attention, and which one it gets when nobody has measured."""

from __future__ import annotations

import functools
import warnings

import jax.numpy as jnp

from ...core.invocation import Invocation
from ...triton_call import unavailable
from ...utils.fingerprint import platform_kind
from . import cudnn, tiles
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
    if inv.platform == "rocm":
        return "the Triton kernels are for NVIDIA GPUs"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"Triton takes bfloat16, float16 and float32, these are {query.dtype}"
    if max(query.shape[3], value.shape[3]) > _MOST_DIM:
        return (
            f"the Triton kernels take a head_dim of at most {_MOST_DIM}, these are {query.shape[3]}, {value.shape[3]}"
        )
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an array is empty"
    if max(x.size // x.shape[0] for x in (query, key, value)) >= _INT32:
        return "one example has 2**31 numbers or more"
    for name in ("bias", "sinks"):
        x = inv.arguments[name]
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"Triton takes a {name} in bfloat16, float16 or float32, this is {x.dtype}"
    return None


def _without_room(inv: Invocation) -> str | None:
    """Why the smallest tile does not fit the device; `None` where it does."""
    if "dout" not in inv.arguments:
        return tiles.illegal_forward(inv, tiles.forward_config(tiles.forward_tiles(inv)[0]).fwd)
    return tiles.illegal_backward(inv, tiles.backward_config(*tiles.backward_tiles(inv)[0]).bwd)


def preferred(inv: Invocation) -> str:
    """The back end that a call gets without tuning: the fastest one as measured on Hopper, of those that can do it.

    On a GPU a back end that is there but for an installation is missed with a warning, once.
    """
    if platform_kind(inv.platform) != "gpu":
        return "xla"
    reasons = {backend: unsupported(inv, backend) for backend in ("cudnn", "triton")}
    dense = inv.arguments["bias"] is not None or inv.arguments["mask"] is not None  # cuDNN reads all of it as a bias
    order = ("triton", "cudnn") if dense else ("cudnn", "triton")
    chosen = next((backend for backend in order if reasons[backend] is None), "xla")
    if chosen != "triton" and (missing := unavailable()) and reasons["triton"] == missing:
        _warn(f"attention runs on {chosen} instead of Triton where that would be chosen: {missing}")
    if reasons["cudnn"] and (missing := cudnn.missing()) and reasons["cudnn"] == missing:
        _warn(f"attention runs on {chosen} instead of cuDNN where that would be chosen: {missing}")
    return chosen


@functools.cache  # once in a process
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
