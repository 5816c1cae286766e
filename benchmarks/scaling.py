"""A train step over several GPUs: how well it scales, against stock Flax layers, and attention over a split length.

    python benchmarks/scaling.py llama-1b --meshes data=1 data=4 fsdp=4 model=4
    python benchmarks/scaling.py --ring 65536

Over `data` and `fsdp` each device has a batch of its own, and the efficiency is the time on one device over that on
all. Over `model` the devices share one batch, and ours is timed against stock. All steps of one mesh run in turns. With
`--ring` one call of attention, forward and backward, takes a length over all devices, against one device's time for as
much work divided by their number. `smoke` as the model tries the script on a CPU, whose devices come from
XLA_FLAGS=--xla_force_host_platform_device_count=4. Merges its rows into `docs/benchmarks/scaling_<card>.csv`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from attention import about, card
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rows import read_rows, write_rows
from train_step import SIZES, WAYS, Block, Gpt, Size, Ways, tokens_of

import ejlayers
from ejkernel_ops import flash_attention
from ejkernel_ops.execution.measure import spread

AXES = ("data", "fsdp", "model")
ROWS = ("data", "fsdp")  # the mesh axes that split a batch
# Weights by what `model` splits of them.
BY_COLUMNS, BY_ROWS = ("query", "key", "value", "up", "gate", "head"), ("out", "down")
COLUMNS = (
    "model", "mesh", "devices", "way", "batch", "length", "ms", "spread", "against", "speedup", "tokens_per_s",
    "efficiency", "gib_a_device",
)  # fmt: skip


class TensorBlock(Block):
    """A layer whose queries, keys and values are products of their own, so that each may be split by heads."""

    def __init__(self, size: Size, ways: Ways, rngs: nnx.Rngs):
        super().__init__(size, ways, rngs)
        del self.qkv
        for name in ("query", "key", "value"):
            bias = not size.llama
            layer = nnx.Linear(size.width, size.width, use_bias=bias, dtype=jnp.bfloat16, rngs=rngs)
            setattr(self, name, layer)

    def __call__(self, x, more):
        """Of what a layer gets and what has to be added to that yet, the same for the next layer."""
        h, x = self.ways.add_norm(self.norm1, x, more)
        heads = (*h.shape[:2], self.size.heads, -1)
        q, k, v = (layer(h).reshape(heads) for layer in (self.query, self.key, self.value))
        if self.size.llama:
            q, k = self.ways.rotary(q), self.ways.rotary(k)
        h, x = self.ways.add_norm(self.norm2, x, self.out(self.ways.attention(q, k, v).reshape(h.shape)))
        return x, self.ways.mlp(self, h)


class ShardedGpt(Gpt):
    """The model with its activations split by rows, as whoever splits parameters says to the compiler."""

    def __init__(self, size: Size, ways: Ways, rows: NamedSharding, rngs: nnx.Rngs):
        super().__init__(size, ways, rngs)
        self.rows = rows
        self.blocks = nnx.List([TensorBlock(size, ways, rngs) for _ in range(size.layers)])

    def loss(self, tokens):
        """Mean loss of the tokens that follow."""
        x, more = jax.lax.with_sharding_constraint(self.embed(tokens[:, :-1]), self.rows), None
        for block in self.blocks:
            x, more = jax.lax.with_sharding_constraint(block(x, more), self.rows)
        return self.ways.loss(self, self.ways.add_norm(self.norm, x, more)[0], tokens[:, 1:])


def mesh_of(text: str, devices: list[Any]) -> Mesh:
    """The mesh of a text such as `fsdp=2,model=2`, of the first devices."""
    sizes = {name: int(count) for name, _, count in (part.partition("=") for part in text.split(","))}
    shape = [sizes.pop(axis, 1) for axis in AXES]
    if sizes:
        raise ValueError(f"meshes has {text!r}; expected sizes of {', '.join(AXES)}, such as fsdp=2,model=2")
    found = np.array(devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(found, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec_of(path: Any, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How a parameter, or what an optimizer keeps of it, is split: by its layer over `model`, then over `fsdp`."""
    keys = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
    spec: list[Any] = [None] * len(shape)
    if len(shape) == 2 and (keys & {*BY_COLUMNS, *BY_ROWS, "embed"}):
        spec[0 if keys & {*BY_ROWS, "embed"} else 1] = "model"
    elif len(shape) == 1 and keys & set(BY_COLUMNS):
        spec[0] = "model"
    free = [i for i, axis in enumerate(spec) if axis is None and shape[i] % mesh.shape["fsdp"] == 0]
    if len(shape) == 2 and free:
        spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return P(*spec)


def sharded_step(size: Size, ways: Ways, mesh: Mesh) -> tuple[Callable[[], Any], Callable, list[Any]]:
    """What makes the parameters with their optimizer's state in parts, the jitted step, and the types of its inputs.

    They are made layer by layer on one device: as one program, XLA computes its random numbers for minutes in advance.
    """
    rows = NamedSharding(mesh, P(ROWS))

    def built() -> Any:
        model = ShardedGpt(size, ways, rows, nnx.Rngs(0))
        model = ejlayers.swap(model) if ways.swapped else model
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)))

    graphdef, state = nnx.eval_shape(built)
    paths, tree = jax.tree.flatten_with_path(state)
    shardings = [NamedSharding(mesh, spec_of(path, x.shape, mesh)) for path, x in paths]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for (_, x), s in zip(paths, shardings)]
    tokens = jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32, sharding=rows)

    def step(leaves, tokens):
        model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
        loss, grads = nnx.value_and_grad(lambda model: model.loss(tokens))(model)
        optimizer.update(model, grads)
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        return [jax.lax.with_sharding_constraint(x, s) for x, s in zip(leaves, shardings)], loss

    def start() -> Any:
        return [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(built()[1]), shardings)]

    return start, jax.jit(step, donate_argnums=0), [types, tokens]


@dataclasses.dataclass
class Contender:
    """A compiled step, and its times."""

    name: str
    compiled: Any
    times: list[float] = dataclasses.field(default_factory=list)


def timed(found: list[Contender], state: Any, tokens: Any, rounds: int, steps: int) -> None:
    """Times all in turns, the parameters of one being those of the next."""
    for turn in range(-1, rounds):
        for contender in found if turn % 2 else reversed(found):
            begun = time.perf_counter()
            for _ in range(steps):
                state, loss = contender.compiled(state, tokens)
            jax.block_until_ready(loss)
            if turn >= 0:
                contender.times.append((time.perf_counter() - begun) / steps * 1e3)


def of_mesh(model: str, text: str, ways: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one mesh: each way's time, memory of a device, and speed against the first."""
    mesh = mesh_of(text, jax.devices())
    shared = mesh.shape["data"] * mesh.shape["fsdp"]
    size = dataclasses.replace(SIZES[model], batch=SIZES[model].batch * shared)
    found, state = [], None
    for name in ways:
        start, step, types = sharded_step(size, WAYS[name], mesh)
        if WAYS[name].swapped and options.tune:
            result = ejlayers.tune(step, *types, whole_step=False, progress=False)
            print(result, flush=True)
            found.append(Contender(f"{name}_tuned", result.compile(step, *types)))
        else:
            found.append(Contender(name, step.lower(*types).compile()))
        state = start() if state is None else state
    tokens = jax.device_put(tokens_of(size, 0), types[1].sharding)
    timed(found, state, tokens, options.rounds, options.steps)
    rows = []
    for contender in found:
        memory, ms = contender.compiled.memory_analysis(), statistics.median(contender.times)
        ratios = [a / b for a, b in zip(found[0].times, contender.times)]
        rows.append({
            "model": model, "mesh": text, "devices": mesh.size, "way": contender.name, "batch": size.batch,
            "length": size.length, "ms": round(ms, 3), "spread": round(spread(contender.times), 4),
            "against": found[0].name, "speedup": round(statistics.median(ratios), 3),
            "tokens_per_s": round(size.batch * size.length / ms * 1e3), "efficiency": "",
            "gib_a_device": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30, 2),
        })  # fmt: skip
    return rows


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with tokens per second and device over those of the same way on one device."""
    alone = {row["way"]: row["tokens_per_s"] for row in rows if row["devices"] == 1 and row.get("tokens_per_s")}
    for row in rows:
        if row["devices"] > 1 and row.get("tokens_per_s") and row["way"] in alone:
            row["efficiency"] = round(row["tokens_per_s"] / row["devices"] / alone[row["way"]], 3)
    return rows


# Attention over a split length


def ring_rows(length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One call of causal attention, forward and backward, on all devices and on one."""
    mesh = Mesh(np.array(jax.devices()), ("ring",), axis_types=(AxisType.Auto,))

    def loss(*x):
        return (flash_attention(*x, causal=True).astype(jnp.float32) ** 2).sum()

    step, runs = jax.jit(jax.grad(loss, (0, 1, 2))), {}
    for name, sharding in (
        ("ring", NamedSharding(mesh, P(None, "ring"))), ("alone", jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    ):  # fmt: skip
        make = jax.jit(functools.partial(jax.random.normal, shape=(1, length, 16, 128), dtype=jnp.bfloat16))
        arrays = [jax.device_put(make(jax.random.key(i)), sharding) for i in range(3)]
        runs[name] = functools.partial(step.lower(*arrays).compile(), *arrays)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, options.rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            jax.block_until_ready(run())
            if turn >= 0:
                times[name].append((time.perf_counter() - begun) * 1e3)
    ring, alone = (statistics.median(times[name]) for name in ("ring", "alone"))
    shared = {"model": "attention 16 x 128", "batch": 1, "length": length, "against": "alone"}
    return [
        shared | {"mesh": f"ring={mesh.size}", "devices": mesh.size, "way": "ours", "ms": round(ring, 3),
                  "spread": round(spread(times["ring"]), 4), "speedup": round(alone / ring, 3),
                  "efficiency": round(alone / ring / mesh.size, 3)},
        shared | {"mesh": "ring=1", "devices": 1, "way": "ours", "ms": round(alone, 3),
                  "spread": round(spread(times["alone"]), 4), "speedup": 1.0, "efficiency": ""},
    ]  # fmt: skip


def merge(out: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows in place of those of the same model and mesh."""
    new = {(row["model"], row["mesh"]) for row in rows}
    kept = [row for row in read_rows(out) if (row["model"], row["mesh"]) not in new]
    write_rows(out, kept + [{key: row.get(key, "") for key in COLUMNS} | about() for row in rows])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(SIZES), nargs="?", default="llama-1b")
    parser.add_argument("--meshes", nargs="*", default=[])
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=["stock_cudnn", "ours"])
    parser.add_argument("--ring", type=int, default=0, help="also attention over a length of so many tokens")
    parser.add_argument("--tune", action="store_true", help="ours tuned")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--out", type=Path, help="default docs/benchmarks/scaling_<card>.csv")
    options = parser.parse_args(arguments)
    out = options.out or Path(f"docs/benchmarks/scaling_{card()}.csv")
    measured = [functools.partial(of_mesh, options.model, text, options.ways, options) for text in options.meshes]
    measured += [functools.partial(ring_rows, options.ring, options)] if options.ring else []
    rows: list[dict[str, Any]] = []
    for measure in measured:  # written after each: a machine's time may end
        before, rows = len(rows), with_efficiency(rows + measure())
        for row in rows[before:]:
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        merge(out, rows)


if __name__ == "__main__":
    main()
