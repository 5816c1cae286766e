"""What `attention.py` times: this library's attention with each config, and what one would use instead of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
from attention_points import WITH_XLA, Arrays, Point, arrays_of

from ejkernel_ops import (
    Autotuner,
    AutotuningResult,
    ConfigSelectorChain,
    Entry,
    Invocation,
    Key,
    TuningError,
    autotune_lowered,
    device_fingerprint,
    find_labels_in_lowered,
    flash_attention,
)
from ejkernel_ops.config.choice import parse_description
from ejkernel_ops.config.schema import leaf_fields
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.meta import call_sites, split_label

Attend = Callable[[Arrays], jax.Array]
FORWARD, BACKWARD = "flash_attention", "flash_attention_bwd"
_SCORES_BYTES = 40 << 30


def ours(point: Point, deterministic: bool = True) -> Attend:
    """This library's."""

    def attend(x: Arrays) -> jax.Array:
        return flash_attention(
            x["query"], x["key"], x["value"], bias=x.get("bias"), mask=None if "ids" in x else x.get("mask"),
            q_segment_ids=x.get("ids"), causal=point.causal, logits_soft_cap=point.cap, deterministic=deterministic,
            sliding_window=None if point.window is None else (point.window - 1, 0),
        )  # fmt: skip

    return attend


def stock(point: Point, implementation: str) -> Attend:
    """JAX's own, which has no soft cap."""
    window = None if point.window is None else (point.window - 1, 0)
    return lambda x: jax.nn.dot_product_attention(
        x["query"], x["key"], x["value"], x.get("bias"), x.get("mask"), is_causal=point.causal,
        local_window_size=window, implementation=implementation,
    )  # fmt: skip


def tokamax(point: Point, implementation: str | tuple[str, ...]) -> Attend:
    """tokamax's, with the config that it takes without tuning: its own table's, or its heuristic."""
    library = tokamax_module()
    window = None if point.window is None else (point.window - 1, 0)
    return lambda x: library.dot_product_attention(
        x["query"], x["key"], x["value"], x.get("bias"), x.get("mask"), is_causal=point.causal,
        local_window_size=window, logits_soft_cap=point.cap, implementation=implementation,
    )  # fmt: skip


def cudnn(point: Point) -> Attend:
    """JAX's own on cuDNN; where there is no GPU, on XLA in its place."""
    return stock(point, "cudnn" if jax.default_backend() == "gpu" else "xla")


@functools.cache
def tokamax_module() -> Any:
    """tokamax, without the profiler that it imports at its start and does not use here."""
    if importlib.util.find_spec("xprof") is None:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool"):
            module = sys.modules[name] = types.ModuleType(name)
            module.__path__ = []
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
    return importlib.import_module("tokamax")


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time: `make(point)` attends, `choice` are the configs of our two kernels."""

    name: str
    make: Callable[[Point], Attend]
    choice: tuple[tuple[str, Any], ...] = ()  # pairs of kernel and config
    deterministic: bool | None = None

    @property
    def is_ours(self) -> bool:
        return self.deterministic is not None

    def forward_only(self) -> Contender:
        """The same for the forward direction, where no order of sums is open."""
        if not self.is_ours:
            return self
        choice = tuple(pair for pair in self.choice if pair[0] == FORWARD)
        return dataclasses.replace(self, make=ours, choice=choice, deterministic=True)

    def alike(self) -> Any:
        """Contenders for which this is equal run the same program."""
        return (self.choice, self.deterministic) if self.is_ours else self.name

    def lower(self, point: Point, direction: str) -> Any:
        """Lowers its program.

        Raises:
            TuningError: our kernels did not take the configs.
        """
        step = jax.jit(program(self.make(point), point, direction))
        if not self.is_ours:
            return step.lower(shapes_of(point))
        calls = calls_of(point, bool(self.deterministic))
        entries = [Entry(calls[op].op_id_v, calls[op].call_key, cfg) for op, cfg in self.choice]
        with AutotuningResult(device_fingerprint(), tuple(entries)):
            lowered = step.lower(shapes_of(point))
        taken = {split_label(site.label)[1]: parse_description(site.config)[0] for site in call_sites(lowered)}
        for entry in entries:
            if taken.get(entry.call_key) != (asked := {n: str(v) for n, v in leaf_fields(entry.cfg) if v is not None}):
                raise TuningError(f"{entry.op_id_v} took {taken.get(entry.call_key)}, not {asked}")
        return lowered


def program(attend: Attend, point: Point, direction: str) -> Callable[[Arrays], Any]:
    """Output, and with a backward the gradients for a given cotangent by name."""
    if direction == "forward":
        return lambda x: attend(x)
    wanted = ("query", "key", "value", *(["bias"] if point.kind == "bias gradient" else []))

    def run(x: Arrays) -> Any:
        out, pull = jax.vjp(lambda part: attend(x | part), {name: x[name] for name in wanted})
        return out, pull(x["dout"])[0]

    return run


@functools.cache
def shapes_of(point: Point) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: arrays_of(point))


@functools.cache
def calls_of(point: Point, deterministic: bool) -> dict[str, Invocation]:
    """Our forward and backward call at a point, by name."""
    step = jax.jit(program(ours(point, deterministic), point, "forward+backward"))
    labels = find_labels_in_lowered(step.lower(shapes_of(point)))
    calls = [find_call(Key(device_fingerprint(), *split_label(label))) for label in labels]
    return {call.kernel.name: call for call in calls if call is not None}


def peers(names: list[str], point: Point) -> list[Contender]:
    """The others that are asked for and may do a point."""
    makers = {
        "cudnn": cudnn,
        "tokamax": functools.partial(tokamax, implementation=("mosaic", "triton")),  # as by default, but for XLA
        "tokamax_triton": functools.partial(tokamax, implementation="triton"),
        "xla": functools.partial(stock, implementation="xla"),
    }
    scores = 4 * point.batch * point.heads * point.length**2  # logits in float32, and as much for each step with them
    skipped = {"xla"} if point.name not in WITH_XLA or 3 * scores > _SCORES_BYTES else set()
    if point.cap is not None:
        skipped |= {"cudnn", "xla"}
    return [Contender(name, make) for name, make in makers.items() if name in names and name not in skipped]


def eligible(point: Point) -> list[Contender]:
    """Ours with heuristic configs: each pair of back ends that can do a point; those with a fixed order first."""
    found: dict[str, Contender] = {}
    for deterministic in (True, False):
        calls = calls_of(point, deterministic)
        configs = {op: _heuristics(calls[op]) for op in (FORWARD, BACKWARD)}
        for first, forward in configs[FORWARD].items():
            for second, backward in configs[BACKWARD].items():
                name = "_".join(("ours", *dict.fromkeys((first, second))))
                make = functools.partial(ours, deterministic=deterministic)
                choice = (FORWARD, forward), (BACKWARD, backward)
                found.setdefault(name, Contender(name, make, choice, deterministic))
    return list(found.values())


def _heuristics(call: Invocation) -> dict[str, Any]:
    """The heuristic config of each back end worth timing."""
    backends = ("cudnn", "triton") if jax.default_backend() == "gpu" else ()
    backends = [name for name in backends if call.kernel.why_not(call, name) is None] or ["xla"]
    return {name: call.kernel.variant("heuristic_cfg", name, call.platform)(call) for name in backends}


def tuned(point: Point) -> tuple[list[Contender], float]:
    """What tuning chooses with gradients in a fixed order and in any order, and the seconds of the first."""
    start = time.perf_counter()
    lowered = jax.jit(program(ours(point), point, "forward+backward")).lower(shapes_of(point))
    result = autotune_lowered(ConfigSelectorChain(), lowered, strict=True, progress=False)
    seconds = time.perf_counter() - start
    choice = {entry.op_id_v.split("@")[0]: entry.cfg for entry in result.entries}
    fixed, loose = (calls_of(point, deterministic)[BACKWARD] for deterministic in (True, False))
    known = set(fixed.kernel.all_candidates(fixed))
    more = [cfg for cfg in loose.kernel.all_candidates(loose) if cfg not in known]
    any_order = Autotuner().tune(loose, [choice[BACKWARD], *more]).cfg
    pairs = (FORWARD, choice[FORWARD]), (BACKWARD, choice[BACKWARD])
    loose_pairs = pairs[0], (BACKWARD, any_order)
    return [
        Contender("chosen", ours, pairs, True),
        Contender("chosen_any_order", functools.partial(ours, deterministic=False), loose_pairs, False),
    ], seconds
