"""What ops on rows share on XLA: chunks of rows that stay in the caches, products, types of sums."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.spread import is_spread
from ..params import MOST, BwdParams, FwdParams
from ..utils.varying import equally_varying


class RowKernel(Kernel):
    """A kernel over rows `(..., features)` whose one parameter on XLA is the rows of a chunk, `blocksize_m`.

    Attributes:
        direction: `"fwd"` or `"bwd"`, the part of the op's config that is its own.
        with_rows: the names of the arguments that have rows; the first one tells how many.
        chunks: rows of a chunk that tuning tries besides all rows.
    """

    direction: ClassVar[str] = "fwd"
    with_rows: ClassVar[tuple[str, ...]] = ("x",)
    chunks: ClassVar[tuple[int, ...]] = (4096, 1024, 256)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "fields" not in vars(cls) and ("direction" in vars(cls) or cls.fields is None):
            cls.fields = {"xla": (f"{cls.direction}.blocksize_m",)}

    def narrow(self, cfg: Any) -> Any:
        """The part of an op's config that is of this direction."""
        return dataclasses.replace(cfg, **{"bwd" if self.direction == "fwd" else "fwd": None})

    def chunk(self, cfg: Any) -> int:
        """The rows of a chunk: all of them where XLA spreads arrays over a mesh, for chunks would gather the shards."""
        return sys.maxsize if is_spread() else getattr(cfg, self.direction).blocksize_m

    def num_rows(self, inv: Invocation) -> int:
        """The rows of a call."""
        return num_rows(inv.arguments[self.with_rows[0]])

    def resized(self, x: Any, rows: int) -> Any:
        """An array like `x` with so many rows."""
        return jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype)

    def config(self, rows: int) -> Any:
        """The config of a number of rows."""
        params = FwdParams if self.direction == "fwd" else BwdParams
        return self.config_cls(backend="xla", **{self.direction: params(blocksize_m=min(rows, MOST))})  # type: ignore[misc]

    def heuristic_cfg(self, inv: Invocation) -> Any:
        """All rows at once: what XLA makes of the plain expression is hard to beat, and shards stay whole."""
        return self.config(self.num_rows(inv))

    def candidate_cfgs(self, inv: Invocation) -> list[Any]:
        """All rows at once, and chunks."""
        rows = self.num_rows(inv)
        return [self.config(n) for n in (rows, *(n for n in self.chunks if n < rows))]

    def illegal(self, inv: Invocation, cfg: Any) -> str | None:
        """A missing chunk; every other one is legal, for it is cut to the rows."""
        params = getattr(cfg, self.direction)
        return None if params is not None and params.blocksize_m is not None else "blocksize_m is missing"

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """One with an odd count of rows, at most 1023."""
        rows = min(self.num_rows(inv), 1024)
        odd = max(1, rows - 1 if rows % 2 == 0 else rows - 2)
        pairs = zip(inv.arguments, inv.args)
        return [inv.like(*(self.resized(x, odd) if n in self.with_rows and x is not None else x for n, x in pairs))]


def num_rows(x: Any) -> int:
    """Rows of an array `(..., features)`, at least 1."""
    return max(1, math.prod(x.shape[:-1]))


def flat_rows(x: jax.Array) -> jax.Array:
    """An array `(..., features)` as `(rows, features)`."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def accumulated(*arrays: Any) -> Any:
    """The type of sums over some arrays: float32, float64 where one of them is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def product_type(out: Any, *operands: Any) -> Any:
    """The type in which a product is made that is then rounded to another one: that one where the operands have it.

    Sums are in float32 all the same; a GPU writes and reads half as much of 16 bits.
    """
    same = all(x.dtype == out for x in operands)
    return jnp.dtype(out) if same else jnp.promote_types(accumulated(*operands), out)


def waiting_type(dtype: Any, bias: Any, *operands: Any) -> Any:
    """The type of products that wait for a bias: that of the result, but float16 has not the range for them."""
    return accumulated(*operands) if dtype == jnp.float16 and bias is not None else dtype


def product(x: jax.Array, weight: jax.Array, weight_layout: str, dtype: Any, precision: Any) -> jax.Array:
    """`x @ weight` over the last axis of `x` in `dtype`; `weight` is `(in, out)`, or `(out, in)` with `"oi"`."""
    contract = ((x.ndim - 1,), (0 if weight_layout == "io" else 1,))
    return _dot(x, weight, contract, dtype, precision)


def weight_gradient(x: jax.Array, grad: jax.Array, weight_layout: str, dtype: Any, precision: Any) -> jax.Array:
    """The gradient of `weight` in `x @ weight` from that of the product, both `(rows, features)`."""
    left, right = (x, grad) if weight_layout == "io" else (grad, x)
    return _dot(left, right, ((0,), (0,)), dtype, precision)


def _dot(x: jax.Array, y: jax.Array, contract: Any, dtype: Any, precision: Any) -> jax.Array:
    """A product whose sums are float32 or wider: XLA makes that of a vector in the type that is asked for."""
    free = [math.prod(a.shape) // max(1, math.prod(a.shape[i] for i in axes)) for a, axes in zip((x, y), contract)]
    made = dtype if dtype is None or min(free) > 1 else jnp.promote_types(dtype, accumulated(x, y))
    dot = jax.lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=made)
    return dot if dtype is None else dot.astype(dtype)


def transposed(weight_layout: str) -> str:
    """The layout in which a weight is that of the product's transpose."""
    return "oi" if weight_layout == "io" else "io"


@jax.custom_jvp
def held_back(x: jax.Array, others: Any) -> jax.Array:
    """`x`, once some other arrays are there: what is computed of it again is not taken for what was computed before."""
    return jax.lax.optimization_barrier((x, others))[0]


@held_back.defjvp
def _held_back_jvp(primals, tangents):
    return held_back(*primals), tangents[0]  # JAX 0.12 cannot transpose a barrier of which a part is constant


def by_rows(fn: Callable[..., Any], arrays: Sequence[Any], size: int) -> Any:
    """Applies a function of arrays `(..., features)`, or `None`, that sums no rows, to chunks of `size` rows."""
    like = arrays[0]
    if size >= num_rows(like):
        return fn(*arrays)
    flat = [None if a is None else flat_rows(a) for a in arrays]
    outs, _ = over_rows(lambda *chunk: (fn(*chunk), ()), flat, size)
    return jax.tree.map(lambda a: a.reshape(*like.shape[:-1], a.shape[-1]), outs)


def over_rows(fn: Callable[..., tuple[Any, Any]], arrays: Sequence[Any], size: int) -> tuple[Any, Any]:
    """Applies a function to chunks of rows: its first results joined, its second ones summed over the chunks.

    Args:
        fn: from a chunk of each array to two trees of arrays; those of the first have the rows of the chunk.
        arrays: arrays with the same rows first, or `None`.
        size: rows of a chunk; the last one has what is left.

    Returns:
        The two trees.
    """
    rows = next(a for a in arrays if a is not None).shape[0]
    if size >= rows:
        return fn(*arrays)
    whole = rows // size * size
    chunks = [None if a is None else a[:whole].reshape(rows // size, size, *a.shape[1:]) for a in arrays]

    def step(total, chunk):
        joined, part = fn(*chunk)
        return jax.tree.map(jnp.add, total, part), joined

    start = jax.eval_shape(lambda *c: fn(*c)[1], *[None if c is None else c[0] for c in chunks])
    given = [a for a in arrays if a is not None]
    zeros = jax.tree.map(lambda t: equally_varying([jnp.zeros(t.shape, t.dtype)], *given)[0], start)
    total, joined = jax.lax.scan(step, zeros, chunks)
    joined = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), joined)
    if whole < rows:
        tail = fn(*[None if a is None else a[whole:] for a in arrays])
        joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), joined, tail[0])
        total = jax.tree.map(jnp.add, total, tail[1])
    return joined, total
