"""The ops besides attention on a GPU: each back end and what tuning chooses, against the plain expression, in one run.

    python benchmarks/ops.py norm linear gated_linear mlp rotary cross_entropy
    python benchmarks/ops.py cross_entropy --no-tune
    python benchmarks/ops.py --results benchmarks/measured

Outputs and gradients in bfloat16, by the device's record. Merges its rows into `docs/benchmarks/ops_<card>.csv`;
`--smoke` tries the script on a CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from against_plain import program
from attention import about, card
from rows import write_rows

import ejkernel_ops as ops
from ejkernel_ops.execution.failures import first_line
from ejkernel_ops.execution.measure import NoDeviceTime, device_times, interleaved, spread

BF16 = jnp.bfloat16
_COPIED = 1 << 28  # bytes of the array whose copy tells the bandwidth


@dataclasses.dataclass(frozen=True)
class Point:
    """One call: ours, which takes `backend`, the plain expression, and what both are given.

    `bytes` is what has to be read and written at least, forward and backward; 0 where products are most of the time.
    """

    op: str
    name: str
    ours: Callable
    plain: Callable
    shapes: tuple[tuple[int, ...], ...]
    bytes: int = 0
    is_loss: bool = False


# Plain expressions, as a model would have them


def plain_norm(x, scale, bias=None, residual=None, *, centred):
    x = x if residual is None else x + residual
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True) if centred else wide
    out = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale.astype(jnp.float32)
    out = (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)
    return out if residual is None else (out, x)


def plain_loss(hidden, weight, labels):
    logits = (hidden @ weight).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()


def plain_rotary(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


# Points


def norm_points(rows: int, widths: Sequence[int]) -> list[Point]:
    """RMS and layer norm; forward reads and writes a row, backward reads two and writes one."""
    found = []
    for width in widths:
        size = rows * width * 2
        for name, op, centred, more in (("rms_norm", ops.rms_norm, False, 0), ("layer_norm", ops.layer_norm, True, 1)):
            shapes = ((rows, width), (width,), *[(width,)] * more)
            plain = functools.partial(plain_norm, centred=centred)
            found.append(Point("norm", f"{name} {rows}x{width}", op, plain, shapes, 5 * size))
        shapes = ((rows, width), (width,), (width,), (rows, width))

        def with_residual(x, scale, bias, residual, **kwargs):
            return ops.layer_norm(x, scale, bias, residual=residual, **kwargs)

        plain = functools.partial(plain_norm, centred=True)
        found.append(Point("norm", f"layer_norm+residual {rows}x{width}", with_residual, plain, shapes, 8 * size))
    return found


def linear_points(sizes: Sequence[tuple[int, int, int]]) -> list[Point]:
    """Linear map with bias and GELU."""

    def ours(x, weight, bias, **kwargs):
        return ops.linear(x, weight, bias, activation="gelu", **kwargs)

    def plain(x, weight, bias):
        return jax.nn.gelu(x @ weight + bias)

    return [
        Point("linear", f"{m}x{k}x{n}", ours, plain, ((m, k), (k, n), (n,))) for m, k, n in sizes
    ]  # fmt: skip


def gated_points(sizes: Sequence[tuple[int, int, int]]) -> list[Point]:
    """Gated linear map with SiLU, of two weights."""

    def ours(x, gate, up, **kwargs):
        return ops.gated_linear(x, gate, up, activation="silu", **kwargs)

    def plain(x, gate, up):
        return jax.nn.silu(x @ gate) * (x @ up)

    return [Point("gated_linear", f"{m}x{k}x{n}", ours, plain, ((m, k), (k, n), (k, n))) for m, k, n in sizes]


def mlp_points(sizes: Sequence[tuple[int, int, int]], gated: bool) -> list[Point]:
    """A whole MLP with biases and GELU, or without and with a gate and SiLU."""

    def ours(x, up, down, more, down_bias=None, **kwargs):
        if gated:
            return ops.mlp(x, up, down, more, activation="silu", **kwargs)
        return ops.mlp(x, up, down, up_bias=more, down_bias=down_bias, activation="gelu", **kwargs)

    def plain(x, up, down, more, down_bias=None):
        if gated:
            return (jax.nn.silu(x @ more) * (x @ up)) @ down
        return jax.nn.gelu(x @ up + more) @ down + down_bias

    name = "gated " if gated else ""
    return [
        Point(
            "mlp", f"{name}{m}x{k}x{n}", ours, plain,
            ((m, k), (k, n), (n, k), *([(k, n)] if gated else [(n,), (k,)])),
        ) for m, k, n in sizes
    ]  # fmt: skip


def rotary_points(shapes: Sequence[tuple[int, int, int, int]]) -> list[Point]:
    """Rotary embedding of all features; either direction reads and writes each number."""

    def ours(x, **kwargs):
        return ops.rotary_embedding(x, jnp.arange(x.shape[1]), **kwargs)

    return [
        Point("rotary", "x".join(map(str, shape)), ours, plain_rotary, (shape,), 4 * 2 * math.prod(shape))
        for shape in shapes
    ]


def loss_points(sizes: Sequence[tuple[int, int, int]]) -> list[Point]:
    """Mean cross-entropy through the head."""
    return [
        Point("cross_entropy", f"{m}x{k}x{n}", ops.linear_cross_entropy, plain_loss, ((m, k), (k, n), (m,)), 0, True)
        for m, k, n in sizes
    ]


def points(smoke: bool) -> list[Point]:
    """All points: the shapes of GPT-2 small and large, Llama 1B and 8B, at 16384 tokens."""
    if smoke:
        return [
            *norm_points(64, [24]), *linear_points([(32, 8, 16)]), *gated_points([(32, 8, 16)]),
            *mlp_points([(32, 8, 16)], gated=False), *mlp_points([(32, 8, 16)], gated=True),
            *rotary_points([(2, 8, 2, 16)]), *loss_points([(32, 8, 96)]),
        ]  # fmt: skip
    rows = 16384
    return [
        *norm_points(rows, [768, 2048, 4096, 8192]),
        *linear_points([(rows, 768, 3072), (rows, 1280, 5120), (rows, 2048, 8192), (rows, 4096, 14336)]),
        *gated_points([(rows, 768, 3072), (rows, 1280, 5120), (rows, 2048, 5632), (rows, 4096, 14336)]),
        *mlp_points([(rows, 768, 3072), (rows, 1280, 5120)], gated=False),
        *mlp_points([(rows, 2048, 5632), (rows, 4096, 14336)], gated=True),
        *rotary_points([(4, 4096, 16, 128), (16, 1024, 12, 64), (4, 4096, 32, 128)]),
        *loss_points([(rows, 768, 50304), (rows, 2048, 128256), (rows, 4096, 128256)]),
    ]


# Measuring


def arrays_of(point: Point) -> list[jax.Array]:
    """Random arrays; weights such that products keep their size, and labels of a loss."""
    found = []
    for i, shape in enumerate(point.shapes):
        if point.is_loss and i == 2:
            found.append(jax.random.randint(jax.random.key(i), shape, 0, point.shapes[1][1]))
            continue
        is_weight = len(shape) == 2 and i > 0 and shape != point.shapes[0]
        scale = shape[0] ** -0.5 if is_weight else 1.0
        found.append((scale * jax.random.normal(jax.random.key(i), shape)).astype(BF16))
    return found


def lowered(point: Point, fn: Callable, arrays: Sequence[jax.Array]) -> tuple[Callable, list[jax.Array]]:
    """The jitted function of output and gradients, and its arguments."""
    if point.is_loss:  # in training the cotangent is 1, and XLA sees it
        return jax.jit(jax.value_and_grad(fn, (0, 1))), list(arrays)
    like = jax.eval_shape(fn, *arrays)
    dout = jax.tree.map(lambda x: jax.random.normal(jax.random.key(99), x.shape).astype(x.dtype), like)
    return program(fn, arrays, gradients=True), [dout, *arrays]


def programs(
    point: Point, arrays: Sequence[jax.Array], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Each contender compiled with its arguments bound, the programs alone, and the seconds of tuning."""
    runs, compiled, seconds = {}, {}, 0.0
    ours = {b: functools.partial(point.ours, backend=b) for b in ("xla", "triton")}
    for name, fn in {"plain": point.plain, **ours, "untuned": point.ours, "tuned": point.ours}.items():
        try:
            step, given = lowered(point, fn, arrays)
            if name == "tuned":
                if options.no_tune:
                    continue
                begun = time.monotonic()
                result = ops.autotune_lowered(ops.ConfigSelectorChain(), step.lower(*given))
                seconds = time.monotonic() - begun
                if options.results:
                    result.save(options.results / f"{point.op}_{'_'.join(point.name.split())}.json")
                made = result.compile(step, *given)
            else:
                made = step.lower(*given).compile()
            jax.block_until_ready(made(*given))
        except Exception as error:
            print(f"  {point.op} {point.name} {name}: {first_line(error)}", flush=True)
            continue
        runs[name], compiled[name] = (lambda made=made, given=given: made(*given)), made
    return runs, compiled, seconds


def timed(runs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Samples of all in milliseconds, in turns."""
    try:
        return dict(zip(runs, device_times(list(runs.values()), rounds)))
    except NoDeviceTime as error:
        print(f"  wall clock: {error}", flush=True)
        return dict(zip(runs, interleaved(list(runs.values()), rounds)))


def measure(point: Point, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a point."""
    arrays = arrays_of(point)
    runs, compiled, seconds = programs(point, arrays, options)
    copied = jnp.ones(_COPIED // 2 if not options.smoke else 64, BF16)
    copy = jax.jit(jnp.negative)
    runs["copy"] = lambda: copy(copied)
    times = timed(runs, options.rounds)
    per_byte = statistics.median(times.pop("copy")) / (2 * copied.nbytes)
    floor = point.bytes * per_byte
    outputs = compiled["plain"].memory_analysis().output_size_in_bytes
    rows = []
    for name, samples in times.items():
        ms, memory = statistics.median(samples), compiled[name].memory_analysis()
        ratio = statistics.median(a / b for a, b in zip(times["plain"], samples))
        more = memory.output_size_in_bytes + memory.temp_size_in_bytes - outputs
        rows.append(
            {
                "op": point.op,
                "point": point.name,
                "contender": name,
                "ms": round(ms, 4),
                "spread": round(spread(samples), 4),
                "speedup": round(ratio, 3),
                "over_copy": round(ms / floor, 3) if floor else "",
                "extra_gib": round(more / 2**30, 3),
                "tuning_s": round(seconds, 1) if name == "tuned" else "",
                "rounds": len(samples),
            }
        )
        print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="norm, linear, gated_linear, mlp, rotary, cross_entropy; default all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-tune", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--results", type=Path, help="a folder for what tuning found of each point")
    parser.add_argument("--out", type=Path, default=None, help="default docs/benchmarks/ops_<card>.csv")
    options = parser.parse_args(arguments)
    known = points(options.smoke)
    if unknown := set(options.ops) - {point.op for point in known}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join({p.op: 0 for p in known})}")
    if jax.default_backend() != "gpu" and not options.smoke:
        raise SystemExit("no GPU here; --smoke tries the script on a CPU")
    folder = Path(tempfile.gettempdir() if options.smoke else "docs/benchmarks")
    out = options.out or folder / f"ops_{'smoke' if options.smoke else card()}.csv"
    for point in (p for p in known if not options.ops or p.op in options.ops):
        rows = [row | about() for row in measure(point, options)]
        kept = []
        if out.exists():
            with open(out, newline="") as file:
                kept = [r for r in csv.DictReader(file) if (r["op"], r["point"]) != (point.op, point.name)]
        write_rows(out, kept + rows)  # after each point: device time may end


if __name__ == "__main__":
    main()
