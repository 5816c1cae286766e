"""The two kernels of a linear map's cross-entropy: chunks of rows and of the vocabulary, whose logits are held."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.dims import Dims
from ...core.invocation import Invocation
from ...core.kernel import Kernel, random_array
from ...errors import ConfigError
from ...params import BwdParams, FwdParams
from ...utils.fingerprint import platform_kind
from ...utils.varying import equally_varying
from ..config import OpConfig
from ..on_triton import TritonRows
from ..rows import accumulated, held_back, over_rows, product, product_type, transposed, weight_gradient
from . import triton_launch
from .loss import IGNORED, Loss, Sums, counted

_HELD = {"cpu": 1 << 25, "gpu": 1 << 29, "tpu": 1 << 28}  # bytes of logits that are held at once
_FEWEST = 512  # columns of a chunk
# A chunk of fewer reads and writes more of the weight's gradient than it multiplies.
_FEWEST_ROWS = {"cpu": 1, "gpu": 2048, "tpu": 1024}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LinearCrossEntropyConfig(OpConfig):
    """Back end and chunks of `linear_cross_entropy`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which the op has `"triton"` and `"xla"`.
        fwd: `blocksize_m` rows by `blocksize_n` entries of the vocabulary: the logits that the forward holds. On Triton
            it holds those of all entries, and a program takes `blocksize_n` of them at a time with `num_warps`.
        bwd: the same of the backward, where it computes logits again.
        recompute: whether the backward computes logits again, or the forward makes the gradients, which takes one
            product less, and chunks of the whole vocabulary.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> LinearCrossEntropyConfig(recompute=False).recompute
        False
    """

    recompute: bool | None = None

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.recompute, (bool, type(None))):
            raise ConfigError(f"recompute is {self.recompute!r}; expected None, True or False")


def _sizes(inv: Invocation) -> tuple[int, int]:
    """Rows, and entries of the vocabulary."""
    hidden, weight, loss = (inv.arguments[name] for name in ("hidden", "weight", "loss"))
    return max(1, hidden.shape[0]), weight.shape[loss.vocab_axis]


def _held(inv: Invocation, itemsize: int = 4) -> int:
    """How many logits are held at once; XLA's are of the sums' type, whatever they were rounded to."""
    return _HELD[platform_kind(inv.platform)] // itemsize


def _below(most: int) -> int:
    """The greatest power of two that is no more."""
    return 1 << max(0, most.bit_length() - 1)


def _row_chunks(inv: Invocation, itemsize: int = 4) -> list[int]:
    """Rows of chunks of the whole vocabulary, the greatest first."""
    rows, vocab = _sizes(inv)
    most = max(_below(_held(inv, itemsize) // vocab), _FEWEST_ROWS[platform_kind(inv.platform)])
    return [min(rows, most), *(n for n in (most // 2, most // 4) if 16 <= n < rows)]


def _tiles(inv: Invocation) -> list[tuple[int, int]]:
    """Rows and entries of chunks that hold the most logits, those of most rows first."""
    rows, vocab = _sizes(inv)
    most = min(rows, _held(inv) // _FEWEST)
    heights = [most, *(n for n in (most // 4, most // 16) if n >= 16)]
    return [(m, min(vocab, max(_FEWEST, _below(_held(inv) // m)))) for m in heights]


def _missing(params: Any) -> str | None:
    missing = [n for n in ("blocksize_m", "blocksize_n") if params is None or getattr(params, n) is None]
    return f"{' and '.join(missing)} missing" if missing else None


def _odd_calls(inv: Invocation, with_rows: tuple[str, ...]) -> list[Invocation]:
    """The call with an odd count of rows, at most 127."""
    rows = max(1, min(_sizes(inv)[0], 128) - 1)

    def resized(name: str, value: Any) -> Any:
        if name not in with_rows:
            return value
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), value)

    return [inv.like(*map(resized, inv.arguments, inv.args))]


def _inputs(inv: Invocation, rng: np.random.Generator) -> list[Any]:
    """Hidden states, weights of logits near 1, labels of which some are ignored, bias, coefficients of a mean."""
    rows, vocab = _sizes(inv)
    made = dict.fromkeys(inv.arguments)
    for name in ("hidden", "weight", "bias", "coefficients"):
        if (like := inv.arguments[name]) is not None:
            made[name] = random_array(rng, like)
    made["weight"] = made["weight"] / np.sqrt(max(1, inv.arguments["hidden"].shape[1]))
    labels = rng.integers(0, vocab, rows)
    made["labels"] = jnp.asarray(np.where(rng.random(rows) < 0.1, IGNORED, labels), jnp.int32)[
        : inv.arguments["labels"].shape[0]
    ]
    made["coefficients"] = jnp.where(made["labels"] == IGNORED, 0.0, 1.0 / rows)
    return [x.astype(inv.arguments[n].dtype) for n, x in made.items() if x is not None]


# Chunks


def _over_vocabulary(step: Callable[[Any, Any, int], Any], carry: Any, vocab: int, size: int) -> Any:
    """`carry = step(carry, first, size)` for chunks of the vocabulary; the last one has what is left."""
    size = min(size, vocab)
    count = vocab // size
    if count == 1:
        carry = step(carry, 0, size)
    else:
        carry = jax.lax.scan(lambda carry, i: (step(carry, i * size, size), None), carry, jnp.arange(count))[0]
    return step(carry, count * size, vocab % size) if vocab % size else carry


def _columns(weight: jax.Array, bias: Any, first: Any, size: int, axis: int) -> tuple[jax.Array, Any]:
    """Weight and bias of some entries of the vocabulary."""
    if weight.shape[axis] == size:
        return weight, bias
    part = jax.lax.dynamic_slice_in_dim(weight, first, size, axis)
    return part, None if bias is None else jax.lax.dynamic_slice_in_dim(bias, first, size)


def _triton_chunks(inv: Invocation) -> list[int]:
    """The same on Triton, which holds logits in the type they are made in, and writes gradients over them."""
    hidden, weight, loss = (inv.arguments[name] for name in ("hidden", "weight", "loss"))
    return _row_chunks(inv, jnp.dtype(loss.made(hidden, weight)).itemsize)


def _gradient_types(hidden: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The types of the gradients that a forward makes, which are scaled later: float16 may have to wait for that."""
    wide = accumulated(hidden, weight)
    dh = hidden.dtype if hidden.dtype == jnp.bfloat16 else wide
    return dh, wide, None if bias is None else wide


def _only_counted(hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """Zeros in ignored rows: what they hold must reach nothing."""
    return jnp.where((labels == IGNORED)[:, None], 0, hidden)


def _sums(hidden: Any, weight: Any, bias: Any, labels: Any, loss: Loss, size: int, precision: Any) -> Sums:
    """The sums of rows over chunks of the vocabulary."""
    own = loss.first(weight)

    def step(sums: Sums, first: Any, size: int) -> Sums:
        part = _columns(weight, bias, first, size, loss.vocab_axis)
        return sums.plus(loss.logits(hidden, *part, precision), labels, own + first)

    start = Sums.none(hidden.shape[0], accumulated(hidden, weight))
    given = [x for x in (hidden, weight, bias, labels) if x is not None]
    start = jax.tree.map(lambda x: equally_varying([x], *given)[0], start)
    return loss.joined(_over_vocabulary(step, start, weight.shape[loss.vocab_axis], size))


def _reduced(losses: jax.Array, coefficients: jax.Array, reduce: bool) -> jax.Array:
    weighted = losses * coefficients.astype(losses.dtype)
    return weighted.sum() if reduce else weighted


def with_gradients_triton(
    hidden: Any, weight: Any, labels: Any, bias: Any, scale: Any, params: Any, loss: Loss, precision: Any,
    wanted: tuple[bool, bool, bool] = (True, True, True), final: bool = False, known: Sums | None = None,
) -> tuple[tuple[Sums, jax.Array], tuple[Any, Any, Any]]:  # fmt: skip
    """Sums and losses of rows, and the gradients of `sum(scale * losses)` that are wanted, in chunks of rows.

    Of a chunk's logits one kernel makes statistics and gradient, which takes their place if it can. Gradients are of
    types that can be scaled where they are not `final`. If the sums are known, there is no need to make them.
    """
    vocab, layout, own = loss.vocab(weight), loss.weight_layout, loss.first(weight)
    dh_type = product_type(hidden.dtype if final else _gradient_types(hidden, weight, bias)[0], hidden, weight)
    need_h, need_w, need_b = wanted

    def chunk(hidden, labels, scale, *known):
        hidden = _only_counted(hidden, labels)
        logits = loss.product(hidden, weight, precision)
        made = logits.dtype if need_b and bias is not None else hidden.dtype
        if loss.vocab_axes:  # what a gradient needs is known when all devices have their sums
            here = None if known else triton_launch.of_rows(logits, labels - own, scale, bias, params, loss)[0]
            sums = Sums(*known) if here is None else loss.joined(here)
            wide = loss.from_product(logits, bias)
            grad = loss.gradient(wide, labels, sums, scale, own, vocab).astype(made)
        else:
            scale = counted(scale, labels, vocab)
            sums, grad = triton_launch.of_rows(logits, labels, scale, bias, params, loss, made)
        low = grad.astype(hidden.dtype)
        dh = product(low, weight, transposed(layout), dh_type, precision) if need_h else None
        dw = weight_gradient(hidden, low, layout, jnp.float32, precision) if need_w else None
        db = grad.sum(0, dtype=jnp.float32) if need_b and bias is not None else None
        return (sums, loss.losses(labels, sums, vocab), dh), (dw, db)

    arrays = [hidden, labels, scale, *jax.tree.leaves(known)]
    (sums, losses, dh), (dw, db) = over_rows(chunk, arrays, params.blocksize_m)
    return (sums, losses), (dh, dw, db)


def _dims(*, loss: Loss, reduce: bool, **arguments: Any) -> Dims:
    """Rows may be split, and the vocabulary. Gradients that the forward made are whole where the backward has them."""
    weight, out = "in v" if loss.weight_layout == "io" else "v in", "" if reduce else "n"
    return Dims(
        operands={
            "hidden": "n in | v", "weight": f"{weight} | n", "labels": "n", "bias": "v | n", "coefficients": "n",
            "out": out, "residuals": ("n", ("n in", weight, "v"), ""), "dout": out,
        },
        outputs=f"{out} | v", residuals=("n | v", ("n in", weight, "v"), "| n v"), split="n v",
    )  # fmt: skip


def _over_vocab_of(axes: dict[str, tuple[str, ...]], loss: Loss) -> Loss:
    """The loss where these axes split the vocabulary, or the part of it that others left to this device."""
    return dataclasses.replace(loss, vocab_axes=(*loss.vocab_axes, *axes.get("v", ())))


class OneDevice(Kernel):
    """What both kernels share: on one device they are tuned, where there is no one to ask for sums."""

    def alone(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With the part of the vocabulary that a device has for all of it."""
        return {"loss": dataclasses.replace(kwargs["loss"], vocab_axes=())}


class LinearCrossEntropyBackward(TritonRows, OneDevice):
    """Gradients of hidden states, weight, bias and coefficients: those that the forward made, or made here."""

    name = "linear_cross_entropy_bwd"
    config_cls = LinearCrossEntropyConfig
    launch = triton_launch
    fields = {
        "xla": ("bwd.blocksize_m", "bwd.blocksize_n"),
        "triton": tuple(f"bwd.{name}" for name in triton_launch.FIELDS),
    }

    def dims(self, **arguments: Any) -> Dims:
        """Rows, and the vocabulary."""
        return _dims(**arguments)

    def on_shards(
        self, run: Any, axes: dict[str, tuple[str, ...]], *operands: Any, loss: Loss, reduce: bool, **statics: Any
    ) -> Any:
        """Gradients are summed where they are made here, and not those that the forward made."""
        *others, out, residuals, dout = operands
        if "v" in axes:  # of which each device has the whole, and the kernel wants a share
            dout = dout / jax.lax.axis_size(axes["v"])
        statics |= {"loss": _over_vocab_of(axes, loss), "reduce": reduce}
        gradients = run(*others, out, residuals, dout, **statics)
        over = {"hidden": axes.get("v", ()), "weight": axes.get("n", ()), "bias": axes.get("n", ())}
        parts = {name: gradients[name] for name, axes in over.items() if axes and gradients[name] is not None}

        def summed(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: equally_varying([jax.lax.psum(part, over[name])], part)[0] for name, part in parts.items()}

        if (forward := run.forward_cfg(*others, **statics)) is None and reduce:  # who shares further chooses
            return gradients | jax.lax.cond(residuals[2], lambda parts: parts, summed, parts)
        return gradients if forward is not None and not forward.recompute else gradients | summed(parts)

    def narrow(self, cfg: LinearCrossEntropyConfig) -> LinearCrossEntropyConfig:
        """The backward part of an op's config."""
        return dataclasses.replace(cfg, fwd=None, recompute=None)

    def candidate_cfgs(self, inv: Invocation) -> list[LinearCrossEntropyConfig]:
        """All rows, and chunks of the vocabulary."""
        tiles = [BwdParams(blocksize_m=m, blocksize_n=n) for m, n in _tiles(inv)]
        return [LinearCrossEntropyConfig(backend="xla", bwd=tile) for tile in tiles]

    candidate_cfgs_xla = candidate_cfgs

    def triton_cfgs(self, inv: Invocation) -> list[LinearCrossEntropyConfig]:
        """Chunks of rows."""
        params = triton_launch.params(BwdParams, _triton_chunks(inv), _sizes(inv)[1])
        return [LinearCrossEntropyConfig(backend="triton", bwd=bwd) for bwd in params]

    def heuristic_cfg(self, inv: Invocation) -> LinearCrossEntropyConfig:
        """The greatest chunks."""
        return self.candidate_cfgs(inv)[0]

    def illegal(self, inv: Invocation, cfg: LinearCrossEntropyConfig) -> str | None:
        """A missing chunk; every other one is legal, for it is cut to the sizes."""
        return super().illegal(inv, cfg) if cfg.backend == "triton" else _missing(cfg.bwd)

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """None: gradients that the forward made have the shapes of its operands."""
        return []

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Operands, the statistics of the forward, and no gradients: those are made here."""
        operands = _inputs(inv, rng)
        names = [n for n in ("hidden", "weight", "labels", "bias", "coefficients") if inv.arguments[n] is not None]
        given = dict(zip(names, operands))
        loss, vocab = inv.arguments["loss"], _sizes(inv)[1]
        hidden = _only_counted(given["hidden"], given["labels"])
        tile, precision = _tiles(inv)[0][1], inv.arguments["precision"]
        sums = jax.jit(lambda h, w, b, y: _sums(h, w, b, y, loss, tile, precision))(
            hidden, given["weight"], given.get("bias"), given["labels"]
        )
        losses = loss.losses(given["labels"], sums, vocab)
        out = _reduced(losses, given["coefficients"], inv.arguments["reduce"])
        gradients = inv.arguments["residuals"][1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), gradients)
        dout = random_array(rng, inv.arguments["dout"])
        return jax.tree.leaves((operands, out, ((sums, losses), zeros, jnp.zeros((), bool)), dout))

    def run_xla(
        self, hidden, weight, labels, bias, coefficients, out, residuals, dout, *, cfg, needs, loss, reduce, precision
    ):  # fmt: skip
        """Scales what the forward made, or computes logits again, chunk by chunk."""
        need_h, need_w, _, need_b, need_c = (bool(n) for n in needs)
        (sums, losses), gradients, made = residuals
        dcoefficients = losses * dout if need_c else None
        if loss.vocab_axes:  # each device has the loss of all
            dout = jax.lax.psum(dout, loss.vocab_axes)
        wanted = need_h, need_w, need_b

        def scaled(_):
            types = (None if x is None else x.dtype for x in (hidden, weight, bias))
            return [(dout * x).astype(t) if need else None for need, x, t in zip(wanted, gradients, types)]

        def again(_):
            scale = coefficients.astype(losses.dtype) * dout
            later = held_back(hidden, scale)  # not as the forward's logits, which XLA would hold
            if cfg.backend == "triton":
                low = weight.astype(hidden.dtype)
                known = sums if loss.vocab_axes else None  # else one kernel makes them and the gradient
                found = with_gradients_triton(
                    later, low, labels, bias, scale, cfg.bwd, loss, precision, wanted, final=True, known=known
                )[1]
            else:
                found = self._again(later, weight, bias, labels, sums, scale, cfg.bwd, wanted, loss, precision)
            return [None if g is None else g.astype(x.dtype) for g, x in zip(found, (hidden, weight, bias))]

        if not any(wanted):
            found = [None] * 3
        elif reduce:
            found = jax.lax.cond(made, scaled, again, None)
        else:
            found = again(None)
        dh, dw, db = found
        return dh, dw, None, db, dcoefficients

    run_triton = run_xla

    def _again(self, hidden, weight, bias, labels, sums, scale, tile, wanted, loss, precision):
        need_h, need_w, need_b = wanted
        dtype, vocab, own = accumulated(hidden, weight), loss.vocab(weight), loss.first(weight)
        low_weight = weight.astype(hidden.dtype)
        held = weight.dtype if tile.blocksize_m >= hidden.shape[0] else dtype  # of one chunk the gradient itself

        def chunk(hidden, labels, scale, *statistics):
            hidden, sums = _only_counted(hidden, labels), Sums(*statistics)

            def step(carry, first, size):
                dh, dw, db = carry
                w, b = _columns(low_weight, bias, first, size, loss.vocab_axis)
                logits = loss.logits(hidden, w, b, precision)
                grad = loss.gradient(logits, labels, sums, scale, own + first, vocab)
                low = grad.astype(hidden.dtype)
                if need_h:
                    dh = dh + product(low, w, transposed(loss.weight_layout), dtype, precision)
                if need_w:
                    part = weight_gradient(hidden, low, loss.weight_layout, dtype, precision).astype(held)
                    dw = jax.lax.dynamic_update_slice_in_dim(dw, part, first, loss.vocab_axis)
                if need_b:
                    db = jax.lax.dynamic_update_slice_in_dim(db, grad.sum(0), first, 0)
                return dh, dw, db

            zeros = (
                jnp.zeros(hidden.shape, dtype) if need_h else None,
                jnp.zeros(weight.shape, held) if need_w else None,
                jnp.zeros(bias.shape, dtype) if need_b else None,
            )
            given = [x for x in (hidden, weight, bias, labels, scale) if x is not None]
            zeros = jax.tree.map(lambda x: equally_varying([x], *given)[0], zeros)
            dh, dw, db = _over_vocabulary(step, zeros, weight.shape[loss.vocab_axis], tile.blocksize_n)
            return None if dh is None else dh.astype(hidden.dtype), (dw, db)

        dh, (dw, db) = over_rows(chunk, [hidden, labels, scale, *jax.tree.leaves(sums)], tile.blocksize_m)
        return dh, dw, db


class LinearCrossEntropyForward(TritonRows, OneDevice):
    """Cross-entropy of a linear map's logits, summed with coefficients or not."""

    name = "linear_cross_entropy"
    config_cls = LinearCrossEntropyConfig
    launch = triton_launch
    fields = {
        "xla": ("fwd.blocksize_m", "fwd.blocksize_n", "recompute"),
        "triton": (*(f"fwd.{name}" for name in triton_launch.FIELDS), "recompute"),
    }
    backward = LinearCrossEntropyBackward()
    tune_with_backward = True
    rows, out_rows = (True, False, True, False, True), (True,)

    def dims(self, **arguments: Any) -> Dims:
        """Rows, and the vocabulary."""
        return _dims(**arguments)

    def on_shards(self, run: Any, axes: dict[str, tuple[str, ...]], *operands: Any, loss: Loss, **statics: Any) -> Any:
        """Where the vocabulary is split, the devices tell each other the sums of each row."""
        return run(*operands, loss=_over_vocab_of(axes, loss), **statics)

    def narrow(self, cfg: LinearCrossEntropyConfig) -> LinearCrossEntropyConfig:
        """The forward part of an op's config."""
        return dataclasses.replace(cfg, bwd=None)

    def candidate_cfgs(self, inv: Invocation) -> list[LinearCrossEntropyConfig]:
        """Gradients made in the forward, from chunks of rows, where there may be; else chunks of the vocabulary."""
        here = _row_chunks(inv) if self._may_be_made_here(inv) else []
        vocab = _sizes(inv)[1]
        tiles = [(m, vocab, False) for m in here] + [(*tile, True) for tile in _tiles(inv)]
        return [
            LinearCrossEntropyConfig(backend="xla", fwd=FwdParams(blocksize_m=m, blocksize_n=n), recompute=recompute)
            for m, n, recompute in tiles
        ]

    candidate_cfgs_xla = candidate_cfgs

    def triton_cfgs(self, inv: Invocation) -> list[LinearCrossEntropyConfig]:
        """Gradients made in the forward where there may be, chunks of rows."""
        params = triton_launch.params(FwdParams, _triton_chunks(inv), _sizes(inv)[1])
        recompute = not self._may_be_made_here(inv)
        return [LinearCrossEntropyConfig(backend="triton", fwd=fwd, recompute=recompute) for fwd in params]

    @staticmethod
    def _may_be_made_here(inv: Invocation) -> bool:
        """Whether the forward makes gradients if nobody says: in float16 they wait for the scale of the loss."""
        return bool(inv.residuals and inv.arguments["reduce"]) and inv.arguments["hidden"].dtype != jnp.float16

    def heuristic_cfg(self, inv: Invocation) -> LinearCrossEntropyConfig:
        """Gradients made in the forward where there may be, the greatest chunks."""
        return self.candidate_cfgs(inv)[0]

    def illegal(self, inv: Invocation, cfg: LinearCrossEntropyConfig) -> str | None:
        """A missing chunk, or gradients in the forward where there can be none."""
        if cfg.recompute is None:
            return "recompute is missing"
        if not cfg.recompute and not inv.arguments["reduce"]:
            return "without a reduction gradients wait for the cotangents: recompute=False cannot make them before"
        if cfg.backend == "triton":
            return super().illegal(inv, cfg)
        if not cfg.recompute and inv.residuals and cfg.fwd is not None and cfg.fwd.blocksize_n is not None:
            if cfg.fwd.blocksize_n < (vocab := _sizes(inv)[1]):
                return f"recompute=False takes chunks of the whole vocabulary, blocksize_n={vocab}"
        return _missing(cfg.fwd)

    def by_rows(self, kwargs: dict[str, Any], cfg: LinearCrossEntropyConfig | None) -> dict[str, Any] | None:
        """A loss for each row, unless the caller wants gradients made in the forward, which cannot be."""
        made_here = cfg is not None and cfg.recompute is False
        return {"reduce": False} if kwargs["reduce"] and not made_here else None

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """One with an odd count of rows."""
        return _odd_calls(inv, ("hidden", "labels", "coefficients"))

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Operands with valid labels."""
        return _inputs(inv, rng)

    def out_like(self, hidden, weight, labels, bias, coefficients, *, loss, reduce, precision):
        """Type of the loss."""
        return _reduced(coefficients.astype(accumulated(hidden, weight)), coefficients, reduce)

    def run_xla(self, hidden, weight, labels, bias, coefficients, *, cfg, loss, reduce, precision):
        """Chunks of rows and of the vocabulary: the loss alone."""
        losses = self._statistics(hidden, weight, labels, bias, cfg, loss, precision)[1]
        return _reduced(losses, coefficients, reduce)

    run_triton = run_xla  # which looks at the config where the two differ

    def fwd_with_residuals_xla(self, hidden, weight, labels, bias, coefficients, *, cfg, loss, reduce, precision):
        """The loss, the statistics of the rows, and the gradients, if they are made here."""
        if cfg.recompute:
            sums, losses = self._statistics(hidden, weight, labels, bias, cfg, loss, precision)
            given = zip((hidden, weight, bias), _gradient_types(hidden, weight, bias))
            gradients = [jnp.zeros(x.shape, t) if reduce and x is not None else None for x, t in given]
        else:
            make = with_gradients_triton if cfg.backend == "triton" else self._with_gradients
            scale = coefficients.astype(accumulated(hidden, weight))
            low = weight.astype(hidden.dtype)
            (sums, losses), gradients = make(hidden, low, labels, bias, scale, cfg.fwd, loss, precision)
            types = _gradient_types(hidden, weight, bias)
            gradients = [None if g is None else g.astype(t) for g, t in zip(gradients, types)]
        made = jnp.asarray(not cfg.recompute)
        return _reduced(losses, coefficients, reduce), ((sums, losses), tuple(gradients), made)

    fwd_with_residuals_triton = fwd_with_residuals_xla

    def _statistics(self, hidden, weight, labels, bias, cfg, loss, precision):
        weight = weight.astype(hidden.dtype)
        vocab, own = loss.vocab(weight), loss.first(weight)

        def chunk(hidden, labels):
            hidden = _only_counted(hidden, labels)
            if cfg.backend == "triton":
                sums = loss.joined(triton_launch.sums(hidden, weight, labels - own, bias, cfg.fwd, loss, precision))
            else:
                sums = _sums(hidden, weight, bias, labels, loss, cfg.fwd.blocksize_n, precision)
            return (sums, loss.losses(labels, sums, vocab)), ()

        return over_rows(chunk, [hidden, labels], cfg.fwd.blocksize_m)[0]

    def _with_gradients(self, hidden, weight, labels, bias, scale, tile, loss, precision):
        dtype, vocab, own = accumulated(hidden, weight), loss.vocab(weight), loss.first(weight)

        def chunk(hidden, labels, scale):
            hidden = _only_counted(hidden, labels)
            logits = loss.logits(hidden, weight, bias, precision)
            sums = loss.joined(Sums.none(hidden.shape[0], dtype).plus(logits, labels, own))
            losses = loss.losses(labels, sums, vocab)
            grad = loss.gradient(logits, labels, sums, scale, own, vocab)
            low = grad.astype(hidden.dtype)
            dh = product(low, weight, transposed(loss.weight_layout), dtype, precision)
            dw = weight_gradient(hidden, low, "oi", dtype, precision)
            return (sums, losses, dh), (dw, None if bias is None else grad.sum(0))

        # In this layout, whatever the weight has: of few rows a CPU takes 1.5 times as long to make the other one.
        (sums, losses, dh), (dw, db) = over_rows(chunk, [hidden, labels, scale], tile.blocksize_m)
        return (sums, losses), (dh, dw.T if loss.weight_layout == "io" else dw, db)


LINEAR_CROSS_ENTROPY = LinearCrossEntropyForward()
LINEAR_CROSS_ENTROPY_BWD = LinearCrossEntropyForward.backward
