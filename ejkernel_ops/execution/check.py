"""The numbers gate: a candidate may win only if it computes what XLA computes in float32."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.selection import heuristic
from ..core.call import Call, backward_call, call_like
from ..core.invocation import Invocation
from ..core.kernel import is_float
from ..core.primitive import execute, output_tree
from ..utils.fingerprint import platform_kind

# The slack beside the error of the plain path: another order of float32 sums, relative to the output's size.
_MAX_SLACK = 64 * np.finfo(np.float32).eps
_RMS_SLACK = 16 * np.finfo(np.float32).eps
_NEAR = 0.01  # relative, of a value that the plain computation cannot hold


def call_of(inv: Invocation) -> Call:
    """The static part of a recorded call, or of one made by hand."""
    return call_like(inv)[0]


def program(inv: Invocation, cfg: Any) -> Callable[..., list[Any]]:
    """A call with a given config as a function of its operands; with its backward, if they are tuned together."""
    call = call_of(inv)
    if call.residuals and call.kernel.tune_with_backward:
        return lambda *operands: _with_backward(call, cfg, operands, inv.platform)
    return lambda *operands: execute(call, cfg, operands, inv.platform)


def _with_backward(call: Call, cfg: Any, operands: Sequence[Any], platform: str | None) -> list[Any]:
    """Outputs of a call, and the gradients of all its float operands for cotangents of ones; residuals are its own."""
    outs = execute(call, cfg, operands, platform)
    tree = output_tree(call, operands)
    own = tree.children()[0].num_leaves
    cotangents = [jnp.ones_like(out) if is_float(out) else None for out in outs[:own]] + [None] * (len(outs) - own)
    back, arrays = backward_call(
        call, operands, jax.tree.unflatten(tree, outs), jax.tree.unflatten(tree, cotangents),
        tuple(map(is_float, operands)), (None,) * (len(outs) + sum(ct is not None for ct in cotangents)),
    )  # fmt: skip
    found = execute(back, heuristic(back.invocation(arrays, platform)), arrays, platform)
    return [*outs[:own], *found]


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


def _quickly(platform: str | None) -> dict[str, Any]:
    """Options with which XLA compiles sooner: a reference need not be fast, so its products are not tuned."""
    return {"xla_gpu_autotune_level": 0} if platform_kind(platform) == "gpu" else {}


class Reference:
    """What a call should compute for given operands, and how far a plain computation is off.

    Args:
        inv: the call.
        inputs: its operands.
        of: what of the call is computed, `program` or `gradients`.
    """

    def __init__(self, inv: Invocation, inputs: Sequence[Any], of: Callable[..., Any] = program):
        cfg = heuristic(inv, "xla" if "xla" in inv.kernel.backends else None)
        compiled = functools.partial(jax.jit, compiler_options=_quickly(inv.platform))
        self.exact = [_numpy(x) for x in compiled(of(_exactly(inv), cfg))(*map(float32, inputs))]
        outs = compiled(of(inv, cfg))(*inputs)
        self.types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in outs]
        self.plain = [_numpy(x) for x in outs]

    def fault(self, outs: Sequence[Any]) -> str | None:
        """Why outputs are wrong; `None` where they are right."""
        if len(outs) != len(self.exact):
            return f"{len(outs)} outputs, expected {len(self.exact)}"
        for index, (out, exact, plain) in enumerate(zip(outs, self.exact, self.plain)):
            if reason := _fault(out, exact, plain):
                return f"output {index}: {reason}"
        return None


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)


def _fault(out: Any, exact: np.ndarray, plain: np.ndarray) -> str | None:
    if out.shape != exact.shape:
        return f"shape {out.shape}, expected {exact.shape}"
    if not jnp.issubdtype(exact.dtype, jnp.inexact):
        return None if np.array_equal(out, exact) else "integers differ"
    if out.size == 0:
        return None
    found = {name: float(value) for name, value in _compare(out, exact, plain).items()}
    if found["bad"]:
        return f"{found['bad']:.0f} values are off where the plain computation overflows"
    limit = 2 * found["max allowed"] + _MAX_SLACK * found["max size"]
    if not found["max error"] <= limit:
        return f"largest error {found['max error']:.3g}, allowed {limit:.3g}"
    limit = 1.5 * found["rms allowed"] + _RMS_SLACK * found["rms size"]
    return None if found["rms error"] <= limit else f"RMS error {found['rms error']:.3g}, allowed {limit:.3g}"


@jax.jit
def _compare(out: Any, exact: Any, plain: Any) -> dict[str, Any]:
    """Errors of an output and of the plain one, largest and root mean square, where the device is: numbers are many."""
    if jnp.issubdtype(exact.dtype, jnp.complexfloating):
        out, exact, plain = (jnp.stack([x.real, x.imag]) for x in (out, exact, plain))
    out, exact, plain = (x.astype(jnp.promote_types(exact.dtype, jnp.float32)) for x in (out, exact, plain))
    error, allowed = _error(out, exact), _error(plain, exact)
    size = jnp.abs(jnp.where(jnp.isfinite(exact), exact, 0.0))
    # Where the plain computation overflows, a right value is what it has, or near the exact one.
    overflown = jnp.isinf(allowed)
    bad = overflown & (_error(out, plain) > 0) & (error > _NEAR * size)
    error, allowed = (jnp.where(overflown, 0.0, e) for e in (error, allowed))
    named = {"error": error, "allowed": allowed, "size": size}
    unit = jnp.where(size.max() > 0, size.max(), 1.0)  # so that no square overflows or vanishes
    return (
        {"bad": bad.sum()}
        | {f"max {name}": x.max() for name, x in named.items()}
        | {f"rms {name}": unit * jnp.sqrt(jnp.mean(jnp.square(x / unit))) for name, x in named.items()}
    )


def _error(x: Any, exact: Any) -> Any:
    """Absolute differences; equal infinities and equal NaNs differ by 0, unequal ones by infinity."""
    same = (x == exact) | (jnp.isnan(x) & jnp.isnan(exact))
    finite = jnp.isfinite(x) & jnp.isfinite(exact)
    return jnp.where(same, 0.0, jnp.where(finite, jnp.abs(x - exact), jnp.inf))
