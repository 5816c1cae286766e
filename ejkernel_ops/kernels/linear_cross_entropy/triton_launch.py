"""Cross-entropy on Triton: which calls its kernel takes, its blocks, and its launch on a chunk of logits."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ...core.invocation import Invocation
from ...params import BwdParams, FwdParams
from ...triton_call import triton_call, unavailable
from ..on_triton import given, missing, power_of_two, too_many, unfit_arrays, unfit_device
from ..rows import accumulated
from .loss import Loss, Sums

P = TypeVar("P", FwdParams, BwdParams)
FIELDS = ("blocksize_m", "blocksize_n", "num_warps")
_BLOCKS = ((2048, 4), (4096, 8), (8192, 16))  # columns of a block and warps, the best first


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpec:
    """What the kernel is compiled for: columns of a row and of a block, the loss, and what there is."""

    vocab: int
    block: int
    soft_cap: float
    z_loss: float
    smoothing: float
    has_bias: bool
    want_gradient: bool


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot do a call; `None` where it can."""
    hidden, weight = inv.arguments["hidden"], inv.arguments["weight"]
    if accumulated(hidden, weight) != jnp.float32:
        return f"Triton takes bfloat16, float16 and float32, these sums are {accumulated(hidden, weight)}"
    return unfit_device(inv) or unfit_arrays(inv, ("hidden", "weight", "bias")) or unavailable()


def params(kind: type[P], chunks: list[int], vocab: int) -> list[P]:
    """Rows of a chunk, columns of a block and warps, the best first."""
    blocks = [(min(block, power_of_two(vocab)), warps) for block, warps in _BLOCKS]
    pairs = [(chunks[0], *block) for block in blocks] + [(rows, *blocks[0]) for rows in chunks[1:]]
    return [kind(blocksize_m=m, blocksize_n=n, num_warps=w) for m, n, w in dict.fromkeys(pairs)]


def illegal(inv: Invocation, cfg: Any) -> str | None:
    """Why the kernel cannot run with a config; `None` where it can."""
    params, direction = (cfg.bwd, "bwd") if "dout" in inv.arguments else (cfg.fwd, "fwd")
    if fault := missing(params, ("blocksize_n", "num_warps"), direction):
        return fault
    if params.blocksize_m is None:
        return f"blocksize_m missing in {params}"
    return too_many(params.blocksize_n // (32 * params.num_warps))


def of_rows(
    logits: jax.Array, labels: jax.Array, scale: jax.Array, bias: Any, params: Any, loss: Loss, gradient: Any = None
) -> tuple[Sums, Any]:
    """Statistics of rows of logits `(rows, vocab)`, without bias and cap, and their gradient in a given type.

    Of the type of the logits the gradient takes their place.
    """
    from .triton_rows import rows_of_logits

    rows, vocab = logits.shape
    spec = RowSpec(
        vocab=vocab, block=params.blocksize_n, soft_cap=loss.soft_cap or 0.0, z_loss=loss.z_loss,  # type: ignore[arg-type]
        smoothing=loss.label_smoothing, has_bias=bias is not None, want_gradient=gradient is not None,
    )  # fmt: skip
    number = jax.ShapeDtypeStruct((rows,), jnp.float32)
    made = jax.ShapeDtypeStruct(logits.shape if spec.want_gradient else (1,), gradient or logits.dtype)
    over_logits = {0: 4} if spec.want_gradient and made.dtype == logits.dtype else None
    *sums, grad = triton_call(
        rows_of_logits, logits, labels, scale, *given(scale, bias), out_types=[number, number, number, number, made],
        grid=(rows,), num_warps=params.num_warps, num_stages=1, name="rows_of_logits",
        input_output_aliases=over_logits, spec=spec,
    )  # fmt: skip
    return Sums(*sums), grad if spec.want_gradient else None


def sums(hidden: Any, weight: Any, labels: Any, bias: Any, params: Any, loss: Loss, precision: Any) -> Sums:
    """Statistics of rows, all of whose logits are held."""
    logits = loss.product(hidden, weight, precision)
    return of_rows(logits, labels, jnp.zeros(labels.shape, jnp.float32), bias, params, loss)[0]
