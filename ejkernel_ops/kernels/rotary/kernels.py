"""The two kernels of rotary position embedding: tokens turned by the angles of their positions, and back."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.dims import Dims
from ...core.invocation import Invocation
from ...core.kernel import is_float
from ...params import BwdParams, FwdParams
from ..config import OpConfig
from ..on_triton import TritonRows
from ..rows import RowKernel, accumulated, over_rows
from . import triton_launch
from .scaling import frequencies


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RotaryConfig(OpConfig):
    """Back end and tile sizes of `rotary_embedding`; a field left `None` inherits.

    Args:
        backend: `"triton"`, `"pallas"`, `"cudnn"` or `"xla"`, of which `rotary_embedding` has `"triton"` and `"xla"`.
        fwd: `blocksize_m` of the forward kernel, in tokens of all examples; on Triton in heads of tokens, with
            `num_warps`.
        bwd: the same of the backward kernel.

    Raises:
        ConfigError: a field of the wrong type, or an unknown back end.

    Example:
        >>> from ejkernel_ops import FwdParams
        >>> RotaryConfig(fwd=FwdParams(blocksize_m=512)).fwd.blocksize_m
        512
    """


class TokenKernel(TritonRows, RowKernel):
    """A kernel whose rows are tokens: `x` is `(batch, length, heads, head_dim)`, `positions` `(batch or 1, length)`."""

    config_cls = RotaryConfig
    launch = triton_launch
    prefers_xla = True  # which is as fast, and fuses the slices of products of several projections

    def dims(self, **arguments: Any) -> Dims:
        """Examples, tokens and heads."""
        tokens = dict.fromkeys(("x", "out", "dout"), "b t h d")
        return Dims(operands={**tokens, "positions": "b t"}, outputs="b t h d", split="b t h")

    def triton_cfgs(self, inv: Invocation) -> list[RotaryConfig]:
        """Tiles."""
        if self.direction == "fwd":
            return [RotaryConfig(backend="triton", fwd=p) for p in triton_launch.params(FwdParams, inv)]
        return [RotaryConfig(backend="triton", bwd=p) for p in triton_launch.params(BwdParams, inv)]

    def num_rows(self, inv: Invocation) -> int:
        """The tokens of all examples."""
        return max(1, math.prod(inv.arguments["x"].shape[:2]))

    def resized(self, x: Any, rows: int) -> Any:
        """One example of so many tokens."""
        return jax.ShapeDtypeStruct((1, rows, *x.shape[2:]), x.dtype)

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Random arrays, and positions that count up: where all are 0, nothing turns."""
        made = super().make_inputs(inv, rng)
        return [x if is_float(x) else jnp.broadcast_to(jnp.arange(x.shape[1], dtype=x.dtype), x.shape) for x in made]


class RotaryBackward(TokenKernel):
    """The gradient of a rotary embedding: its cotangent, turned back."""

    name = "rotary_embedding_bwd"
    direction = "bwd"
    with_rows = ("x", "positions", "out", "dout")
    fields = {"xla": ("bwd.blocksize_m",), "triton": tuple(f"bwd.{name}" for name in triton_launch.FIELDS)}

    def run_xla(self, x, positions, out, dout, *, cfg, needs, theta, features, interleaved, scaling):
        """Chunks of tokens; `x` alone has a gradient, and it depends on neither input nor output."""
        options = dict(theta=theta, features=features, interleaved=interleaved, scaling=scaling)
        return turned(dout, positions, self.chunk(cfg), back=True, **options), None

    def run_triton(self, x, positions, out, dout, *, cfg, needs, theta, features, interleaved, scaling):
        """One kernel."""
        table = _table(positions, x, theta, features, scaling)
        return triton_launch.turned(dout, table, cfg.bwd, interleaved=interleaved, back=True), None


class RotaryForward(TokenKernel):
    """Pairs of features of every head, turned by angles in proportion to the position of the token."""

    name = "rotary_embedding"
    with_rows = ("x", "positions")
    rows, out_rows = (True, "broadcast"), (True,)
    backward = RotaryBackward()
    fields = {"xla": ("fwd.blocksize_m",), "triton": tuple(f"fwd.{name}" for name in triton_launch.FIELDS)}

    def out_like(self, x, positions, *, theta, features, interleaved, scaling):
        """The type of the output."""
        return x

    def run_xla(self, x, positions, *, cfg, theta, features, interleaved, scaling):
        """Chunks of tokens."""
        options = dict(theta=theta, features=features, interleaved=interleaved, scaling=scaling)
        return turned(x, positions, self.chunk(cfg), back=False, **options)

    def run_triton(self, x, positions, *, cfg, theta, features, interleaved, scaling):
        """One kernel."""
        table = _table(positions, x, theta, features, scaling)
        return triton_launch.turned(x, table, cfg.fwd, interleaved=interleaved, back=False)


ROTARY = RotaryForward()
ROTARY_BWD = RotaryForward.backward


def turned(x: jax.Array, positions: jax.Array, size: int, *, back: bool, **options: Any) -> jax.Array:
    """All tokens turned by the angles of their positions, or back, in chunks of `size` tokens."""

    def chunk(x, positions):
        cos, sin = _cos_sin(positions, accumulated(x), options["theta"], options["features"], options["scaling"])
        return _turned(x, cos, -sin if back else sin, options["features"], options["interleaved"]), ()

    tokens = x.shape[0] * x.shape[1]
    if size >= tokens:
        return chunk(x, positions)[0]
    positions = jnp.broadcast_to(positions, x.shape[:2])
    return over_rows(chunk, [x.reshape(tokens, *x.shape[2:]), positions.reshape(tokens)], size)[0].reshape(x.shape)


def _cos_sin(positions: jax.Array, dtype: Any, theta: float, features: int, scaling: Any) -> jax.Array:
    """Cosines and sines of each token's angles, both `(..., 1, features / 2)`, with the factor that scaling has."""
    freqs, factor = frequencies(theta, features, scaling)
    angles = positions.astype(dtype)[..., None] * jnp.asarray(freqs, dtype)
    both = factor * jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    # On a CPU XLA takes cos and sin for cheap and computes them again for each head; what is gathered it keeps.
    return both.at[np.arange(2)].get(mode="promise_in_bounds")[..., None, :]


def _table(positions: jax.Array, x: jax.Array, theta: float, features: int, scaling: Any) -> jax.Array:
    """The same for a kernel, `(2, tokens, features / 2)`: of one example's tokens where all share them."""
    if positions.shape[0] > 1:
        positions = jnp.broadcast_to(positions, x.shape[:2])
    return _cos_sin(positions, accumulated(x), theta, features, scaling).reshape(2, positions.size, features // 2)


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array, features: int, interleaved: bool) -> jax.Array:
    """The first features, in pairs, turned by angles of these cosines and sines."""
    stacked = functools.partial(_stacked, features=features, interleaved=interleaved)
    if interleaved:
        return stacked(x, cos, sin)
    halves = functools.partial(_halves, features=features)
    return jax.lax.platform_dependent(x, cos, sin, cpu=stacked, default=halves)


def _halves(x: jax.Array, cos: jax.Array, sin: jax.Array, features: int) -> jax.Array:
    """The halves apart: a GPU takes 0.6 of the time of pairs that are stacked, and may fuse what slices `x`."""
    first, second, rest = jnp.split(x, [features // 2, features], -1)
    first, second = (half.astype(cos.dtype) for half in (first, second))
    both = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(half.astype(x.dtype) for half in both), rest], -1)


def _stacked(x: jax.Array, cos: jax.Array, sin: jax.Array, features: int, interleaved: bool) -> jax.Array:
    """Pairs on an axis of their own: a CPU takes 0.6 to 0.9 of the time of halves."""
    shape, axis = ((features // 2, 2), -1) if interleaved else ((2, features // 2), -2)
    pairs = x[..., :features].astype(cos.dtype).reshape(*x.shape[:-1], *shape)
    first, second = (jax.lax.index_in_dim(pairs, i, axis % pairs.ndim, keepdims=False) for i in (0, 1))
    both = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis)
    both = both.reshape(*x.shape[:-1], features).astype(x.dtype)
    return jnp.concatenate([both, x[..., features:]], -1)
