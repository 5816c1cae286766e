"""The numbers gate: a candidate may win only if it computes what XLA computes in float32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.selection import heuristic
from ..core.call import Call, call_like
from ..core.invocation import Invocation
from ..core.kernel import is_float
from ..core.primitive import execute

# The slack beside the error of the plain path: another order of float32 sums, relative to the output's size.
_MAX_SLACK = 64 * np.finfo(np.float32).eps
_RMS_SLACK = 16 * np.finfo(np.float32).eps
_NEAR = 0.01  # relative, of a value that the plain computation cannot hold


def call_of(inv: Invocation) -> Call:
    """The static part of a recorded call, or of one made by hand."""
    return call_like(inv)[0]


def program(inv: Invocation, cfg: Any) -> Callable[..., list[Any]]:
    """A call with a given config as a function of its operands."""
    call = call_of(inv)
    return lambda *operands: execute(call, cfg, operands, inv.platform)


def gradients(inv: Invocation, cfg: Any) -> Callable[..., list[Any]]:
    """The gradients of a call by JAX's own derivative of its code, for cotangents of ones, of every float operand."""
    run = program(inv, cfg)

    def pulled(*operands: Any) -> list[Any]:
        floats = [i for i, x in enumerate(operands) if is_float(x)]

        def outputs(*values: Any) -> list[Any]:
            mixed = list(operands)
            for i, value in zip(floats, values):
                mixed[i] = value
            return [out for out in run(*mixed) if is_float(out)]

        outs, pull = jax.vjp(outputs, *[operands[i] for i in floats])
        return list(pull([jnp.ones_like(out) for out in outs]))

    return pulled


def _exactly(inv: Invocation) -> Invocation:
    """The call with exact products and no result of fewer bits than float32: a rounded reference knows no rounding."""
    exact = copy.copy(inv)
    exact.call = _widened(call_of(inv))
    return exact


def _widened(call: Call) -> Call:
    """The static part of a call, with exact products and wide results."""

    def wide(leaf: Any) -> Any:
        small = isinstance(leaf, np.dtype) and jnp.issubdtype(leaf, jnp.floating) and jnp.finfo(leaf).bits < 32
        return np.dtype(np.float32) if small else leaf

    values = dict(zip(call.names, jax.tree.unflatten(call.treedef, list(map(wide, call.leaves)))))
    if "precision" in values:
        values["precision"] = "highest"
    leaves, treedef = jax.tree.flatten(tuple(values.values()))
    return dataclasses.replace(call, leaves=tuple(leaves), treedef=treedef)


def float32(x: Any) -> Any:
    """A float array of fewer bits as float32."""
    small = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if small else x


class Reference:
    """What a call should compute for given operands, and how far a plain computation is off.

    Args:
        inv: the call.
        inputs: its operands.
        of: what of the call is computed, `program` or `gradients`.
    """

    def __init__(self, inv: Invocation, inputs: Sequence[Any], of: Callable[..., Any] = program):
        cfg = heuristic(inv, "xla" if "xla" in inv.kernel.backends else None)
        exact = of(_exactly(inv), cfg)
        self.exact = [_numpy(x) for x in jax.jit(exact)(*map(float32, inputs))]
        outs = jax.jit(of(inv, cfg))(*inputs)
        self.types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in outs]
        self.plain = [_numpy(x) for x in outs]

    def fault(self, outs: Sequence[Any]) -> str | None:
        """Why outputs are wrong; `None` where they are right."""
        if len(outs) != len(self.exact):
            return f"{len(outs)} outputs, expected {len(self.exact)}"
        for index, (out, exact, plain) in enumerate(zip(outs, self.exact, self.plain)):
            if reason := _fault(_numpy(out), exact, plain):
                return f"output {index}: {reason}"
        return None


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)


def _error(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Absolute differences; equal infinities and equal NaNs differ by 0, unequal ones by infinity."""
    same = (x == exact) | (np.isnan(x) & np.isnan(exact))
    finite = np.isfinite(x) & np.isfinite(exact)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(same, 0.0, np.where(finite, np.abs(x.astype(np.float64) - exact), np.inf))


def _fault(out: np.ndarray, exact: np.ndarray, plain: np.ndarray) -> str | None:
    if out.shape != exact.shape:
        return f"shape {out.shape}, expected {exact.shape}"
    if np.issubdtype(exact.dtype, np.complexfloating):
        out, exact, plain = (np.stack([np.real(x), np.imag(x)]) for x in (out, exact, plain))
    if not np.issubdtype(exact.dtype, np.floating):
        return None if np.array_equal(out, exact) else "integers differ"
    if out.size == 0:
        return None
    error, allowed = _error(out, exact), _error(plain, exact)
    size = np.abs(np.where(np.isfinite(exact), exact, 0.0))
    overflown = np.isinf(allowed)
    if overflown.any():  # there a right value is what the plain computation has, or near the exact one
        bad = overflown & (_error(out, plain) > 0) & (error > _NEAR * size)
        if bad.any():
            return f"{bad.sum()} values are off where the plain computation overflows"
        error, allowed = (np.where(overflown, 0.0, e) for e in (error, allowed))
    worst, limit = error.max(), 2 * allowed.max() + _MAX_SLACK * size.max()
    if not worst <= limit:
        return f"largest error {worst:.3g}, allowed {limit:.3g}"
    rms = [float(np.sqrt(np.mean(np.square(e)))) for e in (error, allowed, size)]
    limit = 1.5 * rms[1] + _RMS_SLACK * rms[2]
    return None if rms[0] <= limit else f"RMS error {rms[0]:.3g}, allowed {limit:.3g}"
