"""The kernels of `rms_norm` and `layer_norm`: on XLA in chunks of rows or all at once, on Triton in tiles of rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...core.dims import Dims
from ...core.invocation import Invocation
from ...utils.fingerprint import platform_kind
from ..config import OpConfig
from ..on_triton import TritonRows
from ..rows import RowKernel, accumulated, by_rows, flat_rows, over_rows
from . import triton_launch


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NormConfig(OpConfig):
    """Back end and tile sizes of `rms_norm` and `layer_norm`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which norms have `"triton"` and `"xla"`.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`; on Triton `num_warps` too.
        bwd: the same of the backward kernel; on Triton also `blocksize_k`, rows of which one program sums the gradients
            of scale and bias.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> NormConfig(fwd=FwdParams(blocksize_m=256)).fwd.blocksize_m
        256
    """


_DIMS = Dims(
    operands={
        **dict.fromkeys(("x", "residual", "normed", "summed", "dnormed", "dsummed"), "*rows f"),
        **dict.fromkeys(("mean", "rstd", "dmean", "drstd"), "*rows one"), "scale": "f", "bias": "f",
    },
    outputs=("*rows f", "*rows f", "*rows one", "*rows one"), split="*rows",
)  # fmt: skip


class NormBackward(TritonRows, RowKernel):
    """Gradients of a norm, in one pass over the rows.

    With `away`, the rows less their mean, and `g`, the cotangent, that of a row is `rstd * (g * scale -
    mean(g * scale) - away * rstd ** 2 * mean(g * scale * away))`, and that of the scale the sum of `g * away * rstd`.
    """

    config_cls = NormConfig
    launch = triton_launch
    direction = "bwd"
    with_rows = (
        "x", "residual", "normed", "summed", "mean", "rstd", "dnormed", "dsummed", "dmean", "drstd"
    )  # fmt: skip
    chunks = (1024, 256, 64)
    lazy_cotangents = True
    fields = {"xla": ("bwd.blocksize_m",), "triton": tuple(f"bwd.{n}" for n in triton_launch.BACKWARD_FIELDS)}
    centred: ClassVar[bool]

    def dims(self, **arguments: Any) -> Dims:
        """Rows."""
        return _DIMS

    def triton_cfgs(self, inv: Invocation) -> list[NormConfig]:
        """Tiles of rows, and rows of a program."""
        return [NormConfig(backend="triton", bwd=params) for params in triton_launch.backward_params(inv)]

    def candidate_cfgs_xla(self, inv: Invocation) -> list[NormConfig]:
        """All rows at once, and chunks where caches are great."""
        return self.candidate_cfgs(inv)[: 1 if platform_kind(inv.platform) == "gpu" else None]

    def run_triton(
        self, x, scale, bias, residual, normed, summed, mean, rstd, dnormed, dsummed, dmean, drstd, *, cfg, needs,
        epsilon,
    ):  # fmt: skip
        """Tiles of rows in Triton, once over all of them."""
        need_x, need_scale, need_bias, need_residual = (bool(n) for n in needs)
        dtotal, dscale, dbias = triton_launch.backward(
            x if summed is None else summed, scale, mean, rstd, dnormed, dsummed, params=cfg.bwd, centred=self.centred,
            needs=(need_x or need_residual, need_scale, need_bias),
        )  # fmt: skip
        dx, dresidual = (dtotal.astype(a.dtype) if n else None for a, n in ((x, need_x), (residual, need_residual)))
        return dx, dscale, dbias, dresidual

    def run_xla(
        self, x, scale, bias, residual, normed, summed, mean, rstd, dnormed, dsummed, dmean, drstd, *, cfg, needs,
        epsilon,
    ):  # fmt: skip
        """Chunks of rows: everything that a row gives while its chunk is in the caches."""
        need_x, need_scale, need_bias, need_residual = (bool(n) for n in needs)
        dtype = rstd.dtype
        total = x if summed is None else summed

        def gradients(total, mean, rstd, dnormed, dsummed, dmean, drstd):
            away = total.astype(dtype) - mean if self.centred else total.astype(dtype)
            grad = jnp.zeros_like(away) if dnormed is None else dnormed.astype(dtype)
            product = grad * away
            dscale = _sum_of_rows(rstd[:, 0], product) if need_scale else None
            dbias = _sum_of_rows(jnp.ones_like(rstd[:, 0]), grad) if need_bias else None
            if not (need_x or need_residual):
                return None, (dscale, dbias)
            features = away.shape[-1]
            weight = jnp.ones(features, dtype) if scale is None else scale.astype(dtype)
            drstd = _along(product, weight) + (0 if drstd is None else drstd)
            dtotal = grad * weight - away * (drstd * rstd / features * rstd)
            if self.centred:
                dtotal = dtotal - _along(grad, weight) / features
            dtotal = dtotal * rstd
            if dmean is not None:
                dtotal = dtotal + dmean / features
            if dsummed is not None:
                dtotal = dtotal + dsummed.astype(dtype)
            return dtotal.astype(total.dtype), (dscale, dbias)

        flat = [None if a is None else flat_rows(a) for a in (total, mean, rstd, dnormed, dsummed, dmean, drstd)]
        dtotal, (dscale, dbias) = over_rows(gradients, flat, self.chunk(cfg))
        dx, dresidual = (
            dtotal.reshape(a.shape).astype(a.dtype) if needed else None
            for a, needed in ((x, need_x), (residual, need_residual))
        )
        return dx, dscale, dbias, dresidual


class NormForward(TritonRows, RowKernel):
    """A norm over the last axis, of the sum with a residual; also that sum and the statistics, for the backward."""

    config_cls = NormConfig
    launch = triton_launch
    with_rows = ("x", "residual")
    chunks = (1024, 256, 64)
    rows, out_rows = (True, False, False, True), (True, True, True, True)
    fields = {"xla": ("fwd.blocksize_m",), "triton": tuple(f"fwd.{n}" for n in triton_launch.FORWARD_FIELDS)}
    centred: ClassVar[bool]

    def dims(self, **arguments: Any) -> Dims:
        """Rows."""
        return _DIMS

    def triton_cfgs(self, inv: Invocation) -> list[NormConfig]:
        """Tiles of rows."""
        return [NormConfig(backend="triton", fwd=params) for params in triton_launch.forward_params(inv)]

    def candidate_cfgs_xla(self, inv: Invocation) -> list[NormConfig]:
        """All rows at once, and chunks where caches are great."""
        return self.candidate_cfgs(inv)[: 1 if platform_kind(inv.platform) == "gpu" else None]

    def run_triton(self, x, scale=None, bias=None, residual=None, *, cfg, epsilon=1e-6):
        """Tiles of rows in Triton."""
        return triton_launch.forward(x, scale, bias, residual, params=cfg.fwd, centred=self.centred, epsilon=epsilon)

    def out_like(self, x, scale, bias, residual, *, epsilon):
        """Types of the norm, the sum and the statistics."""
        total = x if residual is None else x + residual
        statistic = total.astype(_accumulated(x, scale, bias, residual)).sum(-1, keepdims=True)
        return total, None if residual is None else total, statistic if self.centred else None, statistic

    def run_xla(self, x, scale=None, bias=None, residual=None, *, cfg, epsilon=1e-6):
        """Chunks of rows: sum, statistics and norm while a chunk is in the caches."""
        dtype = _accumulated(x, scale, bias, residual)

        def chunk(x, residual):
            summed = None if residual is None else x + residual
            centred, mean = (x if summed is None else _rounded(summed)).astype(dtype), None
            if self.centred:
                first = centred[..., :1]  # differences from it have an exact mean where all numbers are equal
                mean = first + (centred - first).mean(-1, keepdims=True)
                centred = centred - mean
            rstd = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
            normed = centred * rstd
            if scale is not None:
                normed = normed * scale.astype(dtype)
            if bias is not None:
                normed = normed + bias.astype(dtype)
            return normed.astype(x.dtype if summed is None else summed.dtype), summed, mean, rstd

        return by_rows(chunk, [x, residual], self.chunk(cfg))


class RmsNormBackward(NormBackward):
    """Gradients of `rms_norm`."""

    name = "rms_norm_bwd"
    centred = False


class LayerNormBackward(NormBackward):
    """Gradients of `layer_norm`."""

    name = "layer_norm_bwd"
    centred = True


class RmsNormForward(NormForward):
    """Each row over its root mean square."""

    name = "rms_norm"
    centred = False
    backward = RmsNormBackward()


class LayerNormForward(NormForward):
    """Each row less its mean, over its standard deviation."""

    name = "layer_norm"
    centred = True
    backward = LayerNormBackward()


# On a CPU, products of vectors and matrices take half the time of multiplying and then summing.


def _along(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """The weighted sum of each row, as a column."""
    return jax.lax.dot(rows, weight, precision=jax.lax.Precision.HIGHEST)[:, None]


def _sum_of_rows(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """The weighted sum of the rows, in parts: a product of thousands of rows would add them one by one in float32."""
    count, features = rows.shape
    part = math.gcd(count, 128)
    weights, rows = weights.reshape(count // part, part), rows.reshape(count // part, part, features)
    return jnp.einsum("pr,prf->pf", weights, rows, precision=jax.lax.Precision.HIGHEST).sum(0)


def _rounded(x: jax.Array) -> jax.Array:
    """The values of an array, which XLA would take as they were before they were rounded to its type."""
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def _accumulated(*arrays: Any) -> Any:
    """The type of sums over the arrays that are there."""
    return accumulated(*(a for a in arrays if a is not None))


RMS_NORM = RmsNormForward()
RMS_NORM_BWD = RmsNormForward.backward
LAYER_NORM = LayerNormForward()
LAYER_NORM_BWD = LayerNormForward.backward
