"""The two attention kernels: what the framework sees of the back ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.dims import Dims
from ...core.invocation import Invocation
from ...core.kernel import Kernel, random_array
from ...utils.fingerprint import platform_kind
from . import cudnn, ring, tiles, xla
from .arrange import arrange, from_keys, from_queries, from_tiles, queries
from .backends import preferred, unsupported
from .config import (
    BACKWARD_S,
    FORWARD_S,
    AttentionConfig,
    backward_config,
    block_sizes,
    candidate_block_sizes,
    compute_dtype,
    forward_config,
    predicted_seconds,
)

# query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks, dropout_seed
_ROWS = (True, True, True, "broadcast", "broadcast", True, True, True, True, False, True)


def _dims(*, query: Any, key: Any, **others: Any) -> Dims:
    """Examples, heads, and queries may be split: with their keys, if there are as many of those.

    Heads are those of keys, times the query heads that share one. Features are needed whole.
    """
    q, kv = ("t", "t") if query.shape[1] == key.shape[1] else ("q", "s")
    rows, bias = f"b {q}", f"b h {q} s"
    return Dims(
        operands={
            "query": f"{rows} h d", "key": f"b {kv} k d", "value": f"b {kv} k e", "bias": bias, "mask": bias,
            "q_offset": "b", "q_segment_ids": rows, "kv_segment_ids": f"b {kv}", "kv_lengths": "b", "sinks": "h",
            "dropout_seed": "b word", "out": f"{rows} h e", "lse": f"{rows} h", "dout": f"{rows} h e",
            "dlse": f"{rows} h",
        },
        outputs=(f"{rows} h e", f"{rows} h"), split=f"b {q} k g", parts={"h": ("k", "g")},
    )  # fmt: skip


class AttentionBackward(Kernel):
    """Gradients of attention from its operands, output and log-sum-exp."""

    name = "flash_attention_bwd"
    config_cls = AttentionConfig
    fields = {
        "xla": ("bwd.q_blocksize", "bwd.kv_blocksize"),
        "triton": tuple(f"bwd.{name}" for name in tiles.BACKWARD_FIELDS),
        "cudnn": (),
    }
    lazy_cotangents = True  # a cotangent that is known to be zero comes as None

    def dims(self, **arguments: Any) -> Dims:
        """Examples, heads, and lengths."""
        return _dims(**arguments)

    def on_shards(self, run: Any, axes: dict[str, tuple[str, ...]], *operands: Any, **statics: Any) -> Any:
        """A device has its part of queries meet the keys that they use: one head of them, or those of all devices."""
        x = _numbered(axes, dict(zip((*ring.NAMES, "out", "lse", "dout", "dlse"), operands)))

        def gradients(x: dict[str, Any], statics: dict[str, Any]) -> dict[str, Any]:
            made = run(*x.values(), **statics)
            return {name: made[name] for name in ring.NAMES if made[name] is not None}

        if split := _shared_head(axes, x["key"]):
            x |= {name: split.part(x[name]) for name in ("key", "value")}
        if "t" in axes:
            found = ring.backward(gradients, ring.Ring(axes["t"], run.mesh_axes), x, statics)
        else:
            found = gradients(*_later_queries(axes, x, statics))
        if split:
            found |= {n: split.back(found[n]) for n in ("key", "value") if n in found}
        return found

    def narrow(self, cfg: AttentionConfig) -> AttentionConfig:
        """The backward part of an op's config."""
        return dataclasses.replace(cfg, fwd=None)

    def unsupported(self, inv: Invocation, backend: str) -> str | None:
        """What a back end cannot honour."""
        return unsupported(inv, backend)

    def heuristic_cfg(self, inv: Invocation) -> AttentionConfig:
        """The fastest back end that can do the call, with its own heuristic."""
        return self.variant("heuristic_cfg", preferred(inv), inv.platform)(inv)

    heuristic_cfg_gpu = heuristic_cfg  # before those of the back ends

    def heuristic_cfg_xla(self, inv: Invocation) -> AttentionConfig:
        """Square blocks of scores that fit the caches."""
        return backward_config(block_sizes(inv.arguments["query"], inv.arguments["key"], inv.platform))

    def heuristic_cfg_triton(self, inv: Invocation) -> AttentionConfig:
        """The best tiles of those that the call has room for."""
        return tiles.backward_config(*tiles.backward_tiles(inv)[0])

    def heuristic_cfg_cudnn(self, inv: Invocation) -> AttentionConfig:
        """cuDNN chooses for itself."""
        return AttentionConfig(backend="cudnn")

    def candidate_cfgs(self, inv: Invocation) -> list[AttentionConfig]:
        """On a GPU cuDNN, tiles of Triton and XLA's heuristic; elsewhere blocks around XLA's."""
        pairs = candidate_block_sizes(inv.arguments["query"], inv.arguments["key"], inv.platform)
        found = [tiles.backward_config(*pair) for pair in _eligible(inv, "triton", tiles.backward_tiles)]
        return _candidates(self, inv, found, [backward_config(pair) for pair in pairs])

    def illegal(self, inv: Invocation, cfg: AttentionConfig) -> str | None:
        """A missing tile, or one that there is no room for."""
        if cfg.backend == "triton":
            return tiles.illegal_backward(inv, cfg.bwd)
        return _without_tile(cfg.bwd) if cfg.backend == "xla" else None

    def cost(self, inv: Invocation, cfg: AttentionConfig) -> float | None:
        """Predicted seconds of the XLA back end on a GPU."""
        return _cost(inv, cfg.backend, cfg.bwd, BACKWARD_S)

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """One with odd lengths."""
        return _odd_calls(inv)

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Consistent operands: the forward's, what it makes of them, and random cotangents."""
        names = list(inv.arguments)
        start = names.index("out")
        arrays = attention_inputs(inv, rng)
        values = dict(zip(names, inv.args[:start])) | dict(inv.kwargs)
        operands = {n: next(arrays) if hasattr(v, "shape") else v for n, v in values.items()}
        reference = forward_config(block_sizes(operands["query"], operands["key"]))
        out, lse = AttentionForward.run_xla(ATTENTION, **operands, cfg=reference)
        cotangents = [random_array(rng, inv.arguments[n]) for n in ("dout", "dlse") if inv.arguments[n] is not None]
        given = [v for v in operands.values() if hasattr(v, "shape")]
        out_type = inv.arguments["out"]
        return [*given, out.astype(out_type.dtype), lse, *cotangents]

    def run_xla(
        self, query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks,
        dropout_seed, out, lse, dout, dlse, *, cfg, needs, **statics,
    ):  # fmt: skip
        """Blocks on XLA."""
        wanted = tuple(bool(needs[i]) for i in (0, 1, 2, 3, 9))
        if dout is None:
            dout = jnp.zeros_like(out)
        arrays = (
            query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks, dropout_seed
        )  # fmt: skip
        block_q, block_kv = _blocks(cfg.bwd, query, key)
        fixed = xla.Statics(**statics)
        x = arrange(arrays, fixed, block_q, block_kv)
        pad = (-query.shape[1]) % block_q
        parts = [queries(a, key.shape[2], pad) for a in (out, dout)]
        lse, dlse = (
            None if a is None else queries(a[..., None], key.shape[2], pad, fill)[..., 0]
            for a, fill in ((lse, -jnp.inf), (dlse, 0.0))
        )
        dq, dk, dv, dbias, dsinks = xla.backward(
            x,
            parts[0],
            lse,
            parts[1],
            dlse,
            fixed,
            wanted,
            query.shape[1],
            key.shape[1],
            block_q,
            block_kv,
        )
        dq = None if dq is None else from_queries(dq, query.shape)
        dk, dv = (None if g is None else from_keys(g, a.shape) for g, a in ((dk, key), (dv, value)))
        dbias = None if dbias is None else from_tiles(dbias, bias.shape)
        return dq, dk, dv, dbias, None, None, None, None, None, dsinks, None

    def run_triton(
        self, query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks,
        dropout_seed, out, lse, dout, dlse, *, cfg, needs, **statics,
    ):  # fmt: skip
        """Tiles in Triton."""
        from . import triton_launch

        arrays = (
            query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks, dropout_seed
        )  # fmt: skip
        wanted = tuple(bool(needs[i]) for i in (0, 1, 2, 3, 9))
        dout = jnp.zeros_like(out) if dout is None else dout
        dq, dk, dv, dbias, dsinks = triton_launch.backward(
            arrays, out, lse, dout, dlse, wanted, xla.Statics(**statics), cfg.bwd
        )
        return dq, dk, dv, dbias, None, None, None, None, None, dsinks, None

    def run_cudnn(
        self, query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks,
        dropout_seed, out, lse, dout, dlse, *, cfg, needs, **statics,
    ):  # fmt: skip
        """cuDNN's own backward pass."""
        dout = jnp.zeros_like(out) if dout is None else dout
        gradients = cudnn.backward(query, key, value, mask, kv_lengths, out, lse, dout, needs, xla.Statics(**statics))
        return (*gradients, *[None] * 8)


class AttentionForward(Kernel):
    """Scaled dot-product attention: output and log-sum-exp."""

    name = "flash_attention"
    config_cls = AttentionConfig
    fields = {
        "xla": ("fwd.q_blocksize", "fwd.kv_blocksize"),
        "triton": tuple(f"fwd.{name}" for name in tiles.FORWARD_FIELDS),
        "cudnn": (),
    }
    rows, out_rows = _ROWS, (True, True)
    backward = AttentionBackward()

    def dims(self, **arguments: Any) -> Dims:
        """Examples, heads, and lengths."""
        return _dims(**arguments)

    def on_shards(self, run: Any, axes: dict[str, tuple[str, ...]], *operands: Any, **statics: Any) -> Any:
        """A device has its part of queries meet the keys that they use: one head of them, or those of all devices."""
        x = _numbered(axes, dict(zip(ring.NAMES, operands)))
        if split := _shared_head(axes, x["key"]):
            x |= {name: split.part(x[name]) for name in ("key", "value")}

        def attend(x: dict[str, Any], statics: dict[str, Any]) -> Any:
            return run(*x.values(), **statics)

        if "t" in axes:
            return ring.forward(attend, ring.Ring(axes["t"], run.mesh_axes), x, statics)
        return attend(*_later_queries(axes, x, statics))

    def narrow(self, cfg: AttentionConfig) -> AttentionConfig:
        """The forward part of an op's config."""
        return dataclasses.replace(cfg, bwd=None)

    def unsupported(self, inv: Invocation, backend: str) -> str | None:
        """What a back end cannot honour."""
        return unsupported(inv, backend)

    def heuristic_cfg(self, inv: Invocation) -> AttentionConfig:
        """The fastest back end that can do the call, with its own heuristic."""
        return self.variant("heuristic_cfg", preferred(inv), inv.platform)(inv)

    heuristic_cfg_gpu = heuristic_cfg  # before those of the back ends

    def heuristic_cfg_xla(self, inv: Invocation) -> AttentionConfig:
        """Square blocks of scores that fit the caches."""
        return forward_config(block_sizes(inv.arguments["query"], inv.arguments["key"], inv.platform))

    def heuristic_cfg_triton(self, inv: Invocation) -> AttentionConfig:
        """The best tile of those that the call has room for."""
        return tiles.forward_config(tiles.forward_tiles(inv)[0])

    def heuristic_cfg_cudnn(self, inv: Invocation) -> AttentionConfig:
        """cuDNN chooses for itself."""
        return AttentionConfig(backend="cudnn")

    def candidate_cfgs(self, inv: Invocation) -> list[AttentionConfig]:
        """On a GPU cuDNN, tiles of Triton and XLA's heuristic; elsewhere blocks around XLA's."""
        pairs = candidate_block_sizes(inv.arguments["query"], inv.arguments["key"], inv.platform)
        found = [tiles.forward_config(tile) for tile in _eligible(inv, "triton", tiles.forward_tiles)]
        return _candidates(self, inv, found, [forward_config(pair) for pair in pairs])

    def illegal(self, inv: Invocation, cfg: AttentionConfig) -> str | None:
        """A missing tile, or one that there is no room for."""
        if cfg.backend == "triton":
            return tiles.illegal_forward(inv, cfg.fwd)
        return _without_tile(cfg.fwd) if cfg.backend == "xla" else None

    def cost(self, inv: Invocation, cfg: AttentionConfig) -> float | None:
        """Predicted seconds of the XLA back end on a GPU."""
        return _cost(inv, cfg.backend, cfg.fwd, FORWARD_S)

    def odd_calls(self, inv: Invocation) -> list[Invocation]:
        """One with odd lengths."""
        return _odd_calls(inv)

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Random arrays with valid masks, lengths and segment ids."""
        return list(attention_inputs(inv, rng))

    def out_like(self, query, key, value, *rest, **statics):
        """Types of output and log-sum-exp."""
        out = jnp.broadcast_to(query[..., :1], (*query.shape[:-1], value.shape[-1]))
        return out, query[..., 0].astype(compute_dtype(query.dtype))

    def run_xla(
        self, query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks,
        dropout_seed, *, cfg, **statics,
    ):  # fmt: skip
        """Blocks on XLA."""
        arrays = (
            query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks, dropout_seed
        )  # fmt: skip
        block_q, block_kv = _blocks(cfg.fwd, query, key)
        fixed = xla.Statics(**statics)
        x = arrange(arrays, fixed, block_q, block_kv)
        out, lse = xla.forward(x, fixed, query.shape[1], key.shape[1], block_q, block_kv)
        shape = (*query.shape[:3], value.shape[-1])
        return (
            from_queries(out, shape).astype(query.dtype),
            from_queries(lse[..., None], (*query.shape[:3], 1))[..., 0],
        )

    def run_triton(
        self, query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks,
        dropout_seed, *, cfg, **statics,
    ):  # fmt: skip
        """Tiles in Triton."""
        from . import triton_launch

        arrays = (
            query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks, dropout_seed
        )  # fmt: skip
        return triton_launch.forward(arrays, xla.Statics(**statics), cfg.fwd)

    def run_cudnn(
        self, query, key, value, bias, mask, q_offset, q_segment_ids, kv_segment_ids, kv_lengths, sinks,
        dropout_seed, *, cfg, **statics,
    ):  # fmt: skip
        """cuDNN, with the statistics that a gradient needs."""
        return cudnn.forward(query, key, value, mask, kv_lengths, xla.Statics(**statics))


@dataclasses.dataclass(frozen=True)
class _SharedHead:
    """The key head that the query heads of a device use, of `count`, all of which it has."""

    index: jax.Array
    count: int

    def part(self, x: jax.Array) -> jax.Array:
        """That head of keys or values."""
        return jax.lax.dynamic_slice_in_dim(x, self.index, 1, 2)

    def back(self, gradient: jax.Array) -> jax.Array:
        """Its gradient, with zeros for the other heads."""
        zeros = jnp.zeros((*gradient.shape[:2], self.count, *gradient.shape[3:]), gradient.dtype)
        return jax.lax.dynamic_update_slice_in_dim(zeros, gradient, self.index, 2)


def _shared_head(axes: dict[str, tuple[str, ...]], key: jax.Array) -> _SharedHead | None:
    """The one key head of a device where query heads are split over more devices than there are key heads."""
    count = key.shape[2]
    if "g" not in axes or count == 1:
        return None
    return _SharedHead(jax.lax.axis_index(axes["g"]) // (jax.lax.axis_size(axes["g"]) // count), count)


def _numbered(axes: dict[str, tuple[str, ...]], x: dict[str, Any]) -> dict[str, Any]:
    """The operands, with the numbers of this device's first head and query for dropout."""
    if (seed := x["dropout_seed"]) is None:
        return x
    q_len, heads = x["query"].shape[1:3]
    splits = {2: (axes.get("k", ()) + axes.get("g", ()), heads), 3: (axes.get("t", ()) + axes.get("q", ()), q_len)}
    for word, (over, count) in splits.items():
        if over:
            seed = seed.at[:, word].add((jax.lax.axis_index(over) * count).astype(seed.dtype))
    return x | {"dropout_seed": seed}


def _later_queries(axes: dict[str, tuple[str, ...]], x: dict[str, Any], statics: dict[str, Any]) -> tuple[dict, dict]:
    """The operands and statics of a device that has a part of the queries, which starts later, and all keys."""
    if "q" not in axes or (not statics["causal"] and statics["sliding_window"] is None):
        return x, statics
    offset = statics["static_offset"] if x["q_offset"] is None else x["q_offset"]
    first = jnp.asarray(offset + jax.lax.axis_index(axes["q"]) * x["query"].shape[1], jnp.int32)
    return x | {"q_offset": jnp.broadcast_to(first, x["query"].shape[:1])}, statics | {"static_offset": None}


def _blocks(params: Any, query: jax.Array, key: jax.Array) -> tuple[int, int]:
    return max(1, min(params.q_blocksize, query.shape[1])), max(1, min(params.kv_blocksize, key.shape[1]))


def _eligible(inv: Invocation, backend: str, found: Any) -> list[Any]:
    """What a function finds for a call, if it is on a GPU and a back end can do it."""
    on_gpu = platform_kind(inv.platform) == "gpu"
    return found(inv) if on_gpu and unsupported(inv, backend) is None else []


def _candidates(kernel: Any, inv: Invocation, triton: list[Any], blocks: list[Any]) -> list[Any]:
    """What is tried: where another back end can do a call, of XLA only the heuristic, which compiles for long."""
    cudnn_too = _eligible(inv, "cudnn", lambda inv: [kernel.heuristic_cfg_cudnn(inv)])
    if not triton and not cudnn_too:
        return blocks
    others = [*cudnn_too, kernel.heuristic_cfg_xla(inv)]
    return [*others, *tiles.most(triton, len(others))]


def _without_tile(params: Any) -> str | None:
    """Why a config cannot be used; any tile can, for it is cut to the lengths."""
    whole = params is not None and params.q_blocksize is not None and params.kv_blocksize is not None
    return None if whole else f"q_blocksize or kv_blocksize is missing in {params}"


def _cost(inv: Invocation, backend: str | None, params: Any, each: tuple[float, ...]) -> float | None:
    """Predicted seconds; `None` where there is no prediction."""
    if platform_kind(inv.platform) != "gpu" or backend != "xla" or _without_tile(params):
        return None
    blocks = params.q_blocksize, params.kv_blocksize
    return predicted_seconds(inv.arguments["query"], inv.arguments["key"], blocks, bool(inv.kwargs["causal"]), each)


# The axes of each operand: q and k are the lengths.
_AXES = {
    "query": "bqhd", "key": "bkhd", "value": "bkhd", "bias": "bhqk", "mask": "bhqk", "q_segment_ids": "bq",
    "kv_segment_ids": "bk", "out": "bqhd", "lse": "bqh", "dout": "bqhd", "dlse": "bqh",
}  # fmt: skip


def _odd_calls(inv: Invocation) -> list[Invocation]:
    """The call with odd lengths of queries and keys, at most 1023 of each."""
    lengths = {"q": _odd(inv.arguments["query"].shape[1]), "k": _odd(inv.arguments["key"].shape[1])}

    def resized(name: str, x: Any) -> Any:
        if not hasattr(x, "shape") or name not in _AXES:
            return x
        shape = [lengths.get(axis, n) if n > 1 else n for axis, n in zip(_AXES[name], x.shape)]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return [inv.like(*map(resized, inv.arguments, inv.args))]


def _odd(length: int) -> int:
    """The largest odd number below a length, and below 1024."""
    length = min(length, 1024)
    return max(1, length - 1 if length % 2 == 0 else length - 2)


def attention_inputs(inv: Invocation, rng: np.random.Generator):
    """Arrays to tune with: all keys visible, a few segments, full lengths, the end's offset."""
    kv_len, q_len = inv.arguments["key"].shape[1], inv.arguments["query"].shape[1]
    for name, like in list(inv.arguments.items())[:11]:
        if like is None:
            continue
        if name == "mask":
            yield jnp.ones(like.shape, bool)
        elif name in ("q_segment_ids", "kv_segment_ids"):
            yield jnp.broadcast_to(jnp.arange(like.shape[1]) * 4 // max(like.shape[1], 1), like.shape).astype(
                like.dtype
            )
        elif name == "kv_lengths":
            yield jnp.full(like.shape, kv_len, like.dtype)
        elif name == "q_offset":
            yield jnp.full(like.shape, max(kv_len - q_len, 0), like.dtype)
        elif name == "dropout_seed":
            yield jnp.asarray(rng.integers(0, 2**32, like.shape, dtype=np.uint32))
        else:
            yield random_array(rng, like)


ATTENTION = AttentionForward()
ATTENTION_BWD = AttentionForward.backward
