"""The calls that `attention.py` times: their operands, their work, and what they are in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, jax.Array]
DIRECTIONS = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A call of attention; `kind` says what is special about it."""

    name: str
    batch: int
    length: int
    heads: int
    head_dim: int
    kv_heads: int = 0  # 0: as many as heads
    causal: bool = True
    kind: str = "grid"
    window: int | None = None
    cap: float | None = None

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    def flops(self, direction: str) -> float:
        """Half the work when causal, only the visible part of a window or of documents; 3.5 forwards for both."""
        half = 0.5 if self.causal else 1.0
        pairs = half * self.length**2
        if self.kind == "packed":
            pairs = half * float(np.square(self.documents()).sum())
        if self.window is not None:
            pairs = self.length * self.window - 0.5 * self.window**2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs * (1.0 if direction == "forward" else 3.5)

    def documents(self) -> np.ndarray:
        """Log-normal lengths that fill an example."""
        draws = np.random.default_rng(0).lognormal(size=min(16, self.length // 8))
        lengths = np.maximum(1, (draws / draws.sum() * self.length).astype(np.int64))
        lengths[lengths.argmax()] += self.length - lengths.sum()
        return lengths

    def small(self) -> Point:
        """The call of the same kind whose error is looked at."""
        heads = min(4, self.heads)
        kv_heads = self.kv_heads and max(1, heads * self.kv_heads // self.heads)
        window = self.window and min(self.window, 256)
        length = min(1024, self.length)
        return dataclasses.replace(self, name="", batch=1, length=length, heads=heads, kv_heads=kv_heads, window=window)


def _grid(head_dim: int, causal: bool) -> list[Point]:
    """16384 tokens, 2048 wide."""
    return [
        Point(
            name=f"d{head_dim}_{'causal' if causal else 'full'}_{kilo}k", batch=16 // kilo, length=1024 * kilo,
            heads=2048 // head_dim, head_dim=head_dim, causal=causal,
        )
        for kilo in (4, 8, 16, 2, 1)
    ]  # fmt: skip


def points() -> list[Point]:
    """All points, the most telling first."""
    grid = [point for head_dim in (128, 64, 256) for causal in (True, False) for point in _grid(head_dim, causal)]
    small = {"batch": 4, "length": 2048, "heads": 16, "head_dim": 64, "causal": False}
    return [
        grid[0],
        Point(name="gpt2_1k", kind="gpt2", batch=16, length=1024, heads=12, head_dim=64),
        Point(name="gqa_8k", kind="heads 4:1", batch=2, length=8192, heads=32, kv_heads=8, head_dim=128),
        Point(name="packed_16k", kind="packed", batch=1, length=16384, heads=16, head_dim=128),
        Point(name="bias_2k", kind="bias", **small),
        Point(name="bias_grad_2k", kind="bias gradient", **small),
        Point(name="mask_2k", kind="mask", **small),
        Point(name="window_16k", kind="window", batch=1, length=16384, heads=16, head_dim=128, window=1024),
        grid[2],  # the window is compared with it
        Point(name="softcap_4k", kind="soft cap", batch=4, length=4096, heads=16, head_dim=128, cap=50.0),
        *(grid[1:2] + grid[3:]),
    ]


def smoke_points() -> list[Point]:
    """Tiny calls."""
    tiny = {"batch": 1, "length": 64, "heads": 2, "head_dim": 16}
    return [
        Point(name="d16_causal_64", **tiny),
        Point(name="packed_64", kind="packed", kv_heads=1, **tiny),
        Point(name="bias_grad_64", kind="bias gradient", cap=5.0, **tiny),
    ]


TUNED = (
    "d128_causal_4k", "gpt2_1k", "gqa_8k", "packed_16k", "bias_2k", "mask_2k", "window_16k", "softcap_4k",
    "d64_causal_4k", "d256_causal_4k", "d16_causal_64",
)  # fmt: skip
WITH_XLA = ("d128_causal_4k", "gpt2_1k", "bias_2k", "mask_2k", "d64_causal_4k")  # it compiles for long


def arrays_of(point: Point) -> Arrays:
    """Random operands and a cotangent; what hides keys, if anything does."""
    keys = jax.random.split(jax.random.key(0), 6)
    full = point.batch, point.length, point.heads, point.head_dim
    few = point.batch, point.length, point.key_heads, point.head_dim
    shapes = {"query": full, "key": few, "value": few, "dout": full}
    if point.kind.startswith("bias"):
        shapes["bias"] = (1, point.heads, point.length, point.length)
    x = {name: jax.random.normal(rng, shape, jnp.bfloat16) for rng, (name, shape) in zip(keys, shapes.items())}
    if point.kind == "mask":
        x["mask"] = jax.random.bernoulli(keys[5], 0.9, (point.batch, 1, point.length, point.length))
    if point.kind == "packed":
        lengths = point.documents()
        ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        x["ids"] = jnp.broadcast_to(ids, (point.batch, point.length))
        x["mask"] = x["ids"][:, None, :, None] == x["ids"][:, None, None, :]  # for those without segment ids
    return x


def reference(point: Point, x: Arrays) -> dict[str, np.ndarray]:
    """Output and gradients in float64, head by head."""
    query, key, value, dout, bias = (
        np.asarray(x[n]).astype(np.float64) if n in x else None for n in ("query", "key", "value", "dout", "bias")
    )
    assert point.batch == 1
    group, scale = point.heads // point.key_heads, point.head_dim**-0.5
    places = np.arange(point.length)
    seen = np.asarray(x["mask"])[0, 0] if "mask" in x else np.ones((point.length, point.length), bool)
    if point.causal:
        seen = seen & (places[:, None] >= places)
    if point.window is not None:
        seen = seen & (places[:, None] - places < point.window)
    found = {"out": np.zeros_like(dout)} | {
        name: np.zeros_like(like) for name, like in (("query", query), ("key", key), ("value", value))
    }
    if bias is not None:
        found["bias"] = np.zeros_like(bias)
    for head in range(point.heads):
        q, k, v, do = query[0, :, head], key[0, :, head // group], value[0, :, head // group], dout[0, :, head]
        logits, slope = scale * q @ k.T, 1.0
        if point.cap is not None:
            capped = np.tanh(logits / point.cap)
            logits, slope = point.cap * capped, 1.0 - capped**2
        if bias is not None:
            logits = logits + bias[0, head]
        logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out = weights @ v
        dlogits = weights * (do @ v.T - (do * out).sum(1, keepdims=True))
        if bias is not None:
            found["bias"][0, head] = dlogits
        dproducts = scale * slope * dlogits
        found["out"][0, :, head], found["query"][0, :, head] = out, dproducts @ k
        found["key"][0, :, head // group] += dproducts.T @ q
        found["value"][0, :, head // group] += weights.T @ do
    return found
