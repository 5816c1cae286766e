"""The two kernels of a linear map on XLA: one product, or a loop over chunks of rows that stay in the caches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.invocation import Invocation
from ...core.kernel import Kernel, random_array
from ...params import BwdParams, FwdParams
from ...utils.varying import equally_varying
from ..activations import ACTIVATIONS, derivative
from ..config import OpConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(OpConfig):
    """Back end and tile sizes of `linear`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which `linear` has `"xla"` so far.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`.
        bwd: the same of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> LinearConfig(fwd=FwdParams(blocksize_m=512)).fwd.blocksize_m
        512
    """


def _num_rows(x: Any) -> int:
    return max(1, math.prod(x.shape[:-1]))


def _candidate_rows(x: Any) -> list[int]:
    """All rows at once, which is the heuristic, and chunks."""
    rows = _num_rows(x)
    return [rows, *(n for n in (4096, 1024, 256) if n < rows)]


def _odd_calls(inv: Invocation, with_rows: tuple[str, ...]) -> list[Invocation]:
    """The call with an odd count of rows, at most 1023."""
    rows = min(_num_rows(inv.arguments["x"]), 1024)
    odd = max(1, rows - 1 if rows % 2 == 0 else rows - 2)

    def resized(name: str, x: Any) -> Any:
        return jax.ShapeDtypeStruct((odd, x.shape[-1]), x.dtype) if name in with_rows and x is not None else x

    return [inv.like(*map(resized, inv.arguments, inv.args))]


def _out_axis(weight_layout: str) -> int:
    return 1 if weight_layout == "io" else 0


def product(x: jax.Array, weight: jax.Array, weight_layout: str, dtype: Any, precision: Any) -> jax.Array:
    """`x @ weight` over the last axis of `x`, sums in `dtype`."""
    contract = ((x.ndim - 1,), (1 - _out_axis(weight_layout),))
    return jax.lax.dot_general(x, weight, (contract, ((), ())), precision=precision, preferred_element_type=dtype)


def _accumulate(*arrays: jax.Array) -> Any:
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


class LinearBackward(Kernel):
    """Gradients of a linear map with bias and activation."""

    name = "linear_bwd"
    config_cls = LinearConfig
    fields = {"xla": ("bwd.blocksize_m",)}
    lazy_cotangents = True

    def narrow(self, cfg: LinearConfig) -> LinearConfig:
        """The backward part of an op's config."""
        return dataclasses.replace(cfg, fwd=None)

    def heuristic_cfg(self, inv: Invocation) -> LinearConfig:
        """All rows at once: XLA's products are hard to beat, and shards stay whole."""
        return LinearConfig(backend="xla", bwd=BwdParams(blocksize_m=_num_rows(inv.arguments["x"])))

    def candidate_cfgs(self, inv: Invocation) -> list[LinearConfig]:
        """All rows at once, and chunks."""
        rows = _candidate_rows(inv.arguments["x"])
        return [LinearConfig(backend="xla", bwd=BwdParams(blocksize_m=n)) for n in rows]

    def illegal(self, inv: Invocation, cfg: LinearConfig) -> str | None:
        """A missing tile; every other one is legal, for it is cut to the rows."""
        return None if cfg.bwd is not None and cfg.bwd.blocksize_m is not None else "blocksize_m is missing"

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """One with an odd count of rows."""
        return _odd_calls(inv, ("x", "out", "preact", "dout", "dpreact"))

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Random operands; the saved activation input is random too, for it is only differentiated at."""
        return [random_array(rng, leaf) for leaf in inv.operands]

    def run_xla(
        self,
        x,
        weight,
        bias,
        out,
        preact,
        dout,
        dpreact,
        *,
        cfg,
        needs,
        activation,
        weight_layout,
        out_dtype,
        precision,
    ):
        """Chunks of rows: the activation's derivative and three products while a chunk is in the caches."""
        need_x, need_w, need_b = (bool(n) for n in needs)
        dtype, out_axis = _accumulate(x, weight), _out_axis(weight_layout)

        def gradients(x, preact, dout, dpreact):
            grad = (
                jnp.zeros(preact.shape if dout is None else dout.shape, dtype) if dout is None else dout.astype(dtype)
            )
            if activation is not None:
                grad = grad * derivative(activation, preact.astype(dtype))
            if dpreact is not None:
                grad = grad + dpreact.astype(dtype)
            low = grad.astype(x.dtype)
            other = "oi" if weight_layout == "io" else "io"
            dx = product(low, weight, other, dtype, precision) if need_x else None
            left, right = (x, low) if out_axis == 1 else (low, x)
            contract = (((0,), (0,)), ((), ()))
            dw = (
                jax.lax.dot_general(left, right, contract, precision=precision, preferred_element_type=dtype)
                if need_w
                else None
            )
            return dx, (dw, grad.sum(0) if need_b else None)

        rows = math.prod(x.shape[:-1])
        flat = [None if a is None else a.reshape(rows, a.shape[-1]) for a in (x, preact, dout, dpreact)]
        chunk = min(cfg.bwd.blocksize_m, _num_rows(x))
        dx, (dw, db) = _over_rows(gradients, flat, chunk, summed=True)
        return None if dx is None else dx.reshape(x.shape), dw, db


class LinearForward(Kernel):
    """A linear map over the last axis, with bias and activation; also the activation's input, for the backward."""

    name = "linear"
    config_cls = LinearConfig
    fields = {"xla": ("fwd.blocksize_m",)}
    rows, out_rows = (True, False, False), (True, True)
    backward = LinearBackward()

    def narrow(self, cfg: LinearConfig) -> LinearConfig:
        """The forward part of an op's config."""
        return dataclasses.replace(cfg, bwd=None)

    def heuristic_cfg(self, inv: Invocation) -> LinearConfig:
        """All rows at once: XLA's products are hard to beat, and shards stay whole."""
        return LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=_num_rows(inv.arguments["x"])))

    def candidate_cfgs(self, inv: Invocation) -> list[LinearConfig]:
        """All rows at once, and chunks."""
        rows = _candidate_rows(inv.arguments["x"])
        return [LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=n)) for n in rows]

    def illegal(self, inv: Invocation, cfg: LinearConfig) -> str | None:
        """A missing tile; every other one is legal, for it is cut to the rows."""
        return None if cfg.fwd is not None and cfg.fwd.blocksize_m is not None else "blocksize_m is missing"

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """One with an odd count of rows."""
        return _odd_calls(inv, ("x",))

    def out_like(self, x, weight, bias, *, activation, weight_layout, out_dtype, precision):
        """Types of output and saved activation input."""
        out = product(x, weight, weight_layout, None, None).astype(out_dtype)
        return out, None if activation is None else out

    def run_xla(
        self, x, weight, bias=None, *, cfg, activation=None, weight_layout="io", out_dtype=None, precision=None
    ):
        """Chunks of rows: product, bias and activation while a chunk is in the caches."""
        dtype, out_dtype = _accumulate(x, weight), jnp.result_type(x, weight) if out_dtype is None else out_dtype

        def chunk(x):
            preact = product(x, weight, weight_layout, dtype, precision)
            if bias is not None:
                preact = preact + bias.astype(dtype)
            saved = preact.astype(out_dtype)
            if activation is None:
                return (saved, None), ()
            return (ACTIVATIONS[activation](preact).astype(out_dtype), saved), ()

        size = min(cfg.fwd.blocksize_m, _num_rows(x))
        if size == _num_rows(x):
            return chunk(x)[0]
        outs, _ = _over_rows(chunk, [x.reshape(_num_rows(x), x.shape[-1])], size, summed=False)
        return jax.tree.map(lambda a: a.reshape(*x.shape[:-1], a.shape[-1]), outs)


def _over_rows(fn: Any, arrays: list[Any], size: int, *, summed: bool) -> tuple[Any, Any]:
    """Applies `fn` to chunks of rows: its first results joined, its second summed over the chunks."""
    rows = arrays[0].shape[0]
    if size >= rows:
        return fn(*arrays)
    whole = rows // size * size
    chunks = [None if a is None else a[:whole].reshape(rows // size, size, a.shape[1]) for a in arrays]
    tail = fn(*[None if a is None else a[whole:] for a in arrays]) if whole < rows else None

    def step(total, chunk):
        joined, part = fn(*chunk)
        return jax.tree.map(jnp.add, total, part), joined

    start = jax.eval_shape(lambda *c: fn(*c)[1], *[None if c is None else c[0] for c in chunks])
    zeros = jax.tree.map(
        lambda t: equally_varying([jnp.zeros(t.shape, t.dtype)], *[a for a in arrays if a is not None])[0], start
    )
    total, joined = jax.lax.scan(step, zeros, chunks)
    joined = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), joined)
    if tail is not None:
        joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), joined, tail[0])
        total = jax.tree.map(jnp.add, total, tail[1]) if summed else total
    return joined, total


LINEAR = LinearForward()
LINEAR_BWD = LinearForward.backward
