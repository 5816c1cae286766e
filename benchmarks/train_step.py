"""A whole train step of a GPT: stock Flax layers against ejlayers, tuned, in turns in one run on one device.

    python benchmarks/train_step.py gpt2-small
    python benchmarks/train_step.py llama-1b --profile
    python benchmarks/train_step.py gpt2-small --follow 200
    python benchmarks/train_step.py gpt2-small --result benchmarks/measured/gpt2_small.json

Needs a GPU; `smoke` as the model, with `--ways stock_xla ours`, tries the script on a CPU. All models have the same
parameters, of which one set is trained: in turns for the times, once a model for `--follow`, which writes the losses.
Merges its rows into `docs/benchmarks/train_step_<card>.csv`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from attention import about, card
from flax import nnx
from rows import write_rows
from step_profile import KINDS, Profile, profiled

import ejlayers
from ejkernel_ops import (
    flash_attention,
    layer_norm,
    linear_cross_entropy,
    mlp,
    rms_norm,
    rotary_embedding,
)
from ejkernel_ops.execution.measure import spread

_PROFILED = 10  # steps, so that clocks settle as in the timed ones
_PEAK = 989e12  # dense bfloat16 operations a second of an H100 or H200, by the data sheet


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch."""

    vocab: int
    layers: int
    heads: int
    width: int
    hidden: int
    batch: int
    length: int
    llama: bool = False

    def flops(self, parameters: int) -> float:
        """Operations of a step, without those that are computed twice; a look-up of embeddings multiplies nothing."""
        tokens = self.batch * self.length
        multiplied = parameters - self.vocab * self.width
        return 6 * multiplied * tokens + 6 * self.layers * self.width * self.length * tokens


SIZES = {
    "gpt2-small": Size(50304, 12, 12, 768, 3072, 16, 1024),
    "llama-1b": Size(128256, 16, 16, 2048, 5632, 4, 4096, llama=True),
    "smoke": Size(96, 2, 2, 32, 64, 2, 16),
}


# What a model is made of besides its layers: functions of the stock layers' parameters.


def stock_attention(implementation: str) -> Callable:
    """Attention as JAX has it."""
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def stock_rotary(x):
    """Halves of each head turned by the place, as most models write it."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def stock_mlp(block, x):
    """Both kinds of models' MLP."""
    hidden = nnx.silu(block.gate(x)) * block.up(x) if block.size.llama else nnx.gelu(block.up(x))
    return block.down(hidden)


def stock_loss(model, hidden, labels):
    """Cross-entropy of all logits in float32."""
    logits = model.head(hidden).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def our_attention(q, k, v):
    """Attention as a kernel; as in stock layers, sums of gradients may be made in any order."""
    return flash_attention(q, k, v, causal=True, deterministic=False)


def our_mlp(block, x):
    """The whole MLP as one kernel, which keeps its first products alone."""

    def cast(layer, name):
        return None if layer is None or (p := getattr(layer, name)) is None else p[...].astype(x.dtype)

    up, down, gate = (cast(layer, "kernel") for layer in (block.up, block.down, block.gate))
    biases = {"up_bias": cast(block.up, "bias"), "down_bias": cast(block.down, "bias")}
    return mlp(x, up, down, gate, activation="silu" if block.size.llama else "gelu", **biases)


def stock_add_norm(norm, x, more):
    """The norm of a sum, and the sum."""
    x = x if more is None else x + more
    return norm(x), x


def our_add_norm(norm, x, more):
    """Both as one kernel."""
    if more is None:
        return norm(x), x
    op, bias = (layer_norm, [norm.bias[...]]) if isinstance(norm, nnx.LayerNorm) else (rms_norm, [])
    return op(more, norm.scale[...], *bias, residual=x, epsilon=norm.epsilon)


def our_loss(model, hidden, labels):
    """Cross-entropy of logits that are never all held, in the types of the stock head."""
    return linear_cross_entropy(hidden, model.head.kernel[...], labels, dtype=hidden.dtype)


@dataclasses.dataclass(frozen=True)
class Ways:
    """One way to compute a model."""

    attention: Callable
    rotary: Callable = stock_rotary
    mlp: Callable = stock_mlp
    loss: Callable = stock_loss
    add_norm: Callable = stock_add_norm
    swapped: bool = False
    dtype: Any = jnp.bfloat16  # that is computed in; parameters are float32


def our_rotary(x):
    """The same as a kernel."""
    return rotary_embedding(x, jnp.arange(x.shape[1]))


OURS = Ways(our_attention, our_rotary, our_mlp, our_loss, our_add_norm, swapped=True)
WAYS = {
    "stock_float32": Ways(stock_attention("xla"), dtype=jnp.float32),
    "stock_xla": Ways(stock_attention("xla")),
    "stock_cudnn": Ways(stock_attention("cudnn")),
    "swapped": Ways(our_attention, loss=our_loss, swapped=True),
    "ours": OURS,
}


class Block(nnx.Module):
    """A layer of either kind of model."""

    def __init__(self, size: Size, ways: Ways, rngs: nnx.Rngs):
        self.size, self.ways = size, ways
        norm = nnx.RMSNorm if size.llama else nnx.LayerNorm
        self.norm1, self.norm2 = (norm(size.width, dtype=ways.dtype, rngs=rngs) for _ in range(2))

        def dense(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=not size.llama, dtype=ways.dtype, rngs=rngs)

        self.qkv, self.out = dense(size.width, 3 * size.width), dense(size.width, size.width)
        self.up, self.down = dense(size.width, size.hidden), dense(size.hidden, size.width)
        self.gate = dense(size.width, size.hidden) if size.llama else None

    def __call__(self, x, more):
        """Of what a layer gets and what has to be added to that yet, the same for the next layer."""
        h, x = self.ways.add_norm(self.norm1, x, more)
        q, k, v = jnp.split(self.qkv(h).reshape(*h.shape[:2], 3 * self.size.heads, -1), 3, 2)
        if self.size.llama:
            q, k = self.ways.rotary(q), self.ways.rotary(k)
        h, x = self.ways.add_norm(self.norm2, x, self.out(self.ways.attention(q, k, v).reshape(h.shape)))
        return x, self.ways.mlp(self, h)


class Gpt(nnx.Module):
    """The model, up to its loss."""

    def __init__(self, size: Size, ways: Ways, rngs: nnx.Rngs):
        self.ways = ways
        self.embed = nnx.Embed(size.vocab, size.width, dtype=ways.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(size, ways, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=ways.dtype, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocab, use_bias=False, dtype=ways.dtype, rngs=rngs)

    def loss(self, tokens):
        """Mean loss of the tokens that follow."""
        x, more = self.embed(tokens[:, :-1]), None
        for block in self.blocks:
            x, more = block(x, more)
        return self.ways.loss(self, self.ways.add_norm(self.norm, x, more)[0], tokens[:, 1:])


def start_and_step(size: Size, ways: Ways) -> tuple[list[jax.Array], Callable]:
    """Parameters with their optimizer's state, and the jitted step from them to the next ones.

    They are lists of arrays, in the same order for all ways, so that a step may go on from another way's.
    """
    model = Gpt(size, ways, nnx.Rngs(0))
    model = ejlayers.swap(model) if ways.swapped else model
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)))
    leaves, tree = jax.tree.flatten(state)

    def step(leaves, tokens):
        model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
        loss, grads = nnx.value_and_grad(lambda model: model.loss(tokens))(model)
        optimizer.update(model, grads)
        return jax.tree.leaves(nnx.state((model, optimizer))), loss

    return leaves, jax.jit(step, donate_argnums=0)


def num_parameters(size: Size) -> int:
    """How many parameters a model has."""
    model = nnx.eval_shape(lambda: Gpt(size, WAYS["stock_xla"], nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def tokens_of(size: Size, seed: int) -> jax.Array:
    """A batch that can be learned: each token follows from the one before, but for one in eight."""
    first, noise, where = jax.random.split(jax.random.key(seed), 3)
    start = jax.random.randint(first, (size.batch, 1), 0, size.vocab)
    walk = (start + 7 * jnp.arange(size.length + 1)) % size.vocab
    other = jax.random.randint(noise, walk.shape, 0, size.vocab)
    return jnp.where(jax.random.bernoulli(where, 1 / 8, walk.shape), other, walk)


@dataclasses.dataclass
class Contender:
    """A compiled step and what is known of it."""

    name: str
    compiled: Any
    seconds: float = 0.0  # of tuning
    times: list[float] = dataclasses.field(default_factory=list)
    profile: Profile | None = None

    def run(self, state: Any, tokens: Any, steps: int) -> tuple[Any, jax.Array]:
        """Some steps, their losses."""
        losses = []
        for _ in range(steps):
            state, loss = self.compiled(state, tokens)
            losses.append(loss)
        return state, jax.block_until_ready(jnp.stack(losses))


def contenders(size: Size, options: argparse.Namespace) -> tuple[list[Contender], list[jax.Array]]:
    """Each way compiled, ours as it is and tuned; also what to start from."""
    found, start = [], []
    tokens = tokens_of(size, 0)
    for name in options.ways:
        start, step = start_and_step(size, WAYS[name])
        found.append(Contender(name, step.lower(start, tokens).compile()))
        if WAYS[name].swapped and not options.no_tune:
            begun = time.monotonic()
            result = ejlayers.tune(step, start, tokens, whole_step=False, progress=False)
            seconds = time.monotonic() - begun
            print(result, flush=True)
            if options.result:
                result.save(options.result)
            found.append(Contender(f"{name}_tuned", result.compile(step, start, tokens), seconds))
    return found, start


def timed(found: list[Contender], state: Any, tokens: Any, rounds: int, steps: int) -> Any:
    """Times all in turns, some steps each, the parameters of one being those of the next."""
    for contender in found:
        state, _ = contender.run(state, tokens, 2)
    for turn in range(rounds):
        for contender in found if turn % 2 == 0 else reversed(found):
            begun = time.perf_counter()
            state, _ = contender.run(state, tokens, steps)
            contender.times.append((time.perf_counter() - begun) / steps * 1e3)
    return state


def memory_gib(compiled: Any) -> tuple[float, float]:
    """What a compiled step has beside its arguments, and with them."""
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes / 2**30, (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30


def row(name: str, size: Size, contender: Contender, base: Contender, parameters: int) -> dict[str, Any]:
    """A row of the table."""
    (temporary, peak), ms = memory_gib(contender.compiled), statistics.median(contender.times)
    ratio = statistics.median(a / b for a, b in zip(base.times, contender.times))
    profile = contender.profile
    return {
        "model": name,
        "way": contender.name,
        "ms": round(ms, 3),
        "spread": round(spread(contender.times), 4),
        "against": base.name,
        "speedup": round(ratio, 3),
        "tokens_per_s": round(size.batch * size.length / ms * 1e3),
        "mfu": round(size.flops(parameters) / ms * 1e3 / _PEAK, 4),
        "temporary_gib": round(temporary, 2),
        "peak_gib": round(peak, 2),
        "tuning_s": round(contender.seconds, 1),
        "kernel_ms": "" if profile is None else round(profile.kernel_ms, 2),
        "idle_ms": "" if profile is None else round(profile.idle_ms, 2),
        "span_ms": "" if profile is None else round(profile.span_ms, 2),
        "kernels": "" if profile is None else round(sum(k.count for k in profile.kernels)),
    }


def follow(model: str, size: Size, found: list[Contender], steps: int, path: Path) -> None:
    """Trains each from the same start on the same batches and writes the losses side by side.

    The first one also from weights that are off by a rounding to bfloat16: how far apart that alone leads.
    """
    losses = {}
    for name, contender in [*((c.name, c) for c in found), (f"{found[0].name}_rounded", found[0])]:
        state, _ = start_and_step(size, WAYS[contender.name.removesuffix("_tuned")])
        if name != contender.name:
            state = [x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x for x in state]
        losses[name] = each = []
        for number in range(steps):
            state, loss = contender.compiled(state, tokens_of(size, number))
            each.append(loss)
    table = [{"step": i} | {n: float(each[i]) for n, each in losses.items()} | about() for i in range(steps)]
    write_rows(path, table)
    base, *others = losses
    for other in others:
        most = max(abs(row[other] - row[base]) for row in table)
        print(f"{model} {other}: from {table[0][other]:.4f} to {table[-1][other]:.4f}, at most {most:.4f} from {base}")


def profile_all(found: list[Contender], state: list[jax.Array], tokens: jax.Array) -> None:
    """Records each one's kernels, and prints them."""
    for contender in found:
        kept = [state]

        def run(contender=contender, kept=kept):
            kept[0], losses = contender.run(kept[0], tokens, _PROFILED)
            return losses

        contender.profile = profile = profiled(run, _PROFILED)
        [state] = kept
        print(contender.name, {kind: round(ms, 2) for kind, ms in profile.by_kind.items()})
        for kernel in profile.kernels[:40]:
            print(f"  {kernel.ms:8.3f} ms {kernel.count:6.1f} x {kernel.kind:12} {kernel.name}")
        print(
            f"  kernels {profile.kernel_ms:.2f}, idle {profile.idle_ms:.2f}, span {profile.span_ms:.2f} ms", flush=True
        )
        for gap in profile.gaps[:12]:
            print(f"  {gap.ms:8.3f} ms {gap.count:6.1f} x idle before   {gap.name}", flush=True)


def kinds(name: str, contender: Contender) -> dict[str, Any]:
    """A row of the table of kernels: milliseconds of a step by kind."""
    assert contender.profile is not None
    by_kind = contender.profile.by_kind
    return {"model": name, "way": contender.name} | {kind: round(by_kind.get(kind, 0.0), 2) for kind in KINDS}


def kept_rows(path: Path, name: str) -> list[dict]:
    """The rows of other models that a table has."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["model"] != name]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(SIZES), nargs="?", default="gpt2-small")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=["stock_cudnn", "ours"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="steps of a round, after which the host waits: as often as logs are written",
    )
    parser.add_argument("--no-tune", action="store_true", help="ours as it is, without tuning")
    parser.add_argument("--profile", action="store_true", help="also kernels: printed, and by kind in a table beside")
    parser.add_argument("--follow", type=int, default=0, help="instead of times, losses of so many steps")
    parser.add_argument("--result", type=Path, help="a file for what tuning found")
    parser.add_argument("--out", type=Path, help="default docs/benchmarks/train_step_<card>.csv")
    options = parser.parse_args(arguments)
    size = SIZES[options.model]
    out = options.out or Path(f"docs/benchmarks/train_step_{card()}.csv")
    found, state = contenders(size, options)
    if options.follow:
        return follow(options.model, size, found, options.follow, out.with_stem(f"{out.stem}_losses"))
    tokens, parameters = tokens_of(size, 0), num_parameters(size)
    state = timed(found, state, tokens, options.rounds, options.steps)
    if options.profile:
        profile_all(found, state, tokens)
        path = out.with_stem(f"{out.stem}_kernels")
        rows = [kinds(options.model, contender) | about() for contender in found]
        write_rows(path, kept_rows(path, options.model) + rows)
    rows = [row(options.model, size, contender, found[0], parameters) | about() for contender in found]
    for each in rows:
        print(*(f"{key}={value}" for key, value in each.items() if key not in about()), flush=True)
    write_rows(out, kept_rows(out, options.model) + rows)


if __name__ == "__main__":
    main()
