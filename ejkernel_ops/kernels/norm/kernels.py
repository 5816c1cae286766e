"""The kernels of `rms_norm` and `layer_norm` on XLA: forward and backward, each in chunks of rows or all at once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..config import OpConfig
from ..rows import RowKernel, accumulated, by_rows, flat_rows, over_rows


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NormConfig(OpConfig):
    """Back end and tile sizes of `rms_norm` and `layer_norm`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which norms have `"xla"` so far.
        fwd: `blocksize_m` of the forward kernel, in rows of `x`.
        bwd: the same of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> NormConfig(fwd=FwdParams(blocksize_m=256)).fwd.blocksize_m
        256
    """


class NormBackward(RowKernel):
    """Gradients of a norm, in one pass over the rows.

    With `away`, the rows less their mean, and `g`, the cotangent, that of a row is `rstd * (g * scale -
    mean(g * scale) - away * rstd ** 2 * mean(g * scale * away))`, and that of the scale the sum of `g * away * rstd`.
    """

    config_cls = NormConfig
    direction = "bwd"
    with_rows = (
        "x", "residual", "normed", "summed", "mean", "rstd", "dnormed", "dsummed", "dmean", "drstd"
    )  # fmt: skip
    chunks = (1024, 256, 64)
    lazy_cotangents = True
    centred: ClassVar[bool]

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


class NormForward(RowKernel):
    """A norm over the last axis, of the sum with a residual; also that sum and the statistics, for the backward."""

    config_cls = NormConfig
    with_rows = ("x", "residual")
    chunks = (1024, 256, 64)
    rows, out_rows = (True, False, False, True), (True, True, True, True)
    centred: ClassVar[bool]

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
