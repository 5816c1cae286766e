"""`autotune_lowered`: from a lowered program to its labels, from them to recorded calls, to tuned configs."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from ..config.cache import Key
from ..config.choice import parse_description
from ..config.neighbours import place_of
from ..config.selection import ConfigSelectorChain, default_selector, heuristic, require_chain
from ..core.invocation import Invocation
from ..environment import recording
from ..errors import DeviceLostError, EjkernelError, LabelError, TuningError
from ..registry import find_call, get_invocations
from ..utils.fingerprint import device_fingerprint
from ..utils.labelled import LABEL_ONLY
from ..utils.meta import OTHER_LABEL, CallSite, call_sites, extract_labels_from_hlo_text, program_text, split_label
from ..utils.values import short_hash, stable_json
from .entry import Entry
from .hosts import WORK_S, from_first, require_same, together
from .local_calls import with_local_labels
from .measure import inside_trace
from .progress import Progress
from .result import AutotuningResult


def autotune_lowered(
    selector: Any, lowered: Any = None, *, strict: bool = False, sync: bool = False, progress: bool = True
) -> AutotuningResult:
    """Tunes every labelled call of a lowered program, forward and backward, each distinct one once.

    It needs `lower()` alone: no weights, no earlier run. Winners go into the selector's caches; a call that
    they already hold is not tuned again. A call that cannot be tuned does not stop the others.

    Args:
        selector: whose tuner and caches are used. May be left out: `autotune_lowered(lowered)`.
        lowered: what `jax.jit(step).lower(...)` returned in this process, or its text.
        strict: raise where a label cannot be tuned.
        sync: where `jax.distributed` runs several processes, tune in process 0 alone and give all its result; every one
            of them must call this. Without it each process tunes by itself, and no two find quite the same.
        progress: show what is tuned where stderr is a terminal; `False`: never.

    Returns:
        The configs, to be entered around the program's calls; `result.skipped` names every label that was
        not tuned, and why.

    Raises:
        LabelError: no program, or a compiled one; with `strict`, a label of a call that was not recorded here.
        TuningError: inside a trace; with `strict`, a call whose heuristic config does not run; with `sync`, tuning
            failed in process 0.
        ConfigError: the selector is none; with `sync`, the processes lowered different programs, or not all came.
        UnsupportedError: with `sync`, several processes without `jax.distributed.initialize()`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel_ops import ConfigSelectorChain, linear
        >>> lowered = jax.jit(linear).lower(jnp.ones((8, 3)), jnp.ones((3, 4)))
        >>> len(autotune_lowered(ConfigSelectorChain(), lowered).entries)
        1
    """
    if lowered is None:
        selector, lowered = default_selector(), selector
    chain = require_chain(selector)
    if sync and jax.process_count() > 1:
        return _synced(chain, lowered, strict, progress)
    calls, skipped = _calls_of(lowered, strict)
    with Progress(chain, shown=progress):
        return _tune(chain, device_fingerprint(), calls, skipped, strict)


def _synced(selector: ConfigSelectorChain, lowered: Any, strict: bool, progress: bool) -> AutotuningResult:
    """What process 0 tunes, in every process."""
    device = device_fingerprint()

    def tuned() -> str:
        with Progress(selector, shown=progress):
            return _tune(selector, device, calls, skipped, strict).dumps()

    def summary(found: tuple[list, list]) -> str:
        labels = sorted(label for part in found for label, *_ in part)
        return f"{device}, {len(labels)} kernels, digest {short_hash(stable_json(labels))}"

    (calls, skipped), said = together("reading the program", lambda: _calls_of(lowered, strict), summary)
    require_same("the program", said, "lower the same step, on devices of one model, in each")
    text = from_first("tuning", tuned, WORK_S)
    result, said = together("taking the result", lambda: AutotuningResult.loads(text), lambda result: result.digest)
    require_same("the result", said, "run the same versions of the kernels in each")
    return result


def _calls_of(lowered: Any, strict: bool) -> tuple[list[tuple], list[tuple[str, str]]]:
    """The calls of a program that can be tuned, and the labels of those that cannot, with reasons."""
    calls, skipped, text = [], [], program_text(lowered)
    if text.startswith("HloModule"):
        raise LabelError("the program is compiled: its calls cannot be counted any more; pass the lowered one")
    text = with_local_labels(text)
    found = _by_label(text)
    if not found and (other := OTHER_LABEL.search(text)):
        raise LabelError(f"the program has labels of another prefix, such as {other[1]}; set EJKERNEL_OPS_PREFIX to it")
    device = device_fingerprint()
    for label, sites in found.items():
        key = Key(device, *split_label(label))
        inv = find_call(key)
        if reason := _why_not_tuned(sites):
            skipped.append((label, reason))
        elif reason := _why_unknown(inv, sites):
            if strict:
                raise LabelError(f"{label}: {reason}; lower the program in this process")
            skipped.append((label, reason))
        else:
            calls.append((label, key, inv, sum(s.calls for s in sites), sum(s.executions for s in sites)))
    return calls, skipped


def _why_not_tuned(sites: list[CallSite]) -> str | None:
    """Why nobody would want these calls of one label tuned; `None` where they may."""
    if any(site.config == LABEL_ONLY for site in sites):
        return LABEL_ONLY
    if sites and all(set(parse_description(site.config)[1].values()) == {"call"} for site in sites):
        return "pinned: every field comes from the config that the call or module gives"
    return None


def _why_unknown(inv: Invocation | None, sites: list[CallSite]) -> str | None:
    """Why a label does not lead to a call that can be tuned; `None` where it does."""
    if inv is None:
        off = "" if recording() else ": EJKERNEL_OPS_RECORD=0 turned recording off"
        return f"no such call was recorded in this process on this device{off}"
    return None if sites else "the program has its result, but not the call"


def _by_label(text: str) -> dict[str, list[CallSite]]:
    """The calls of a program by label; of a label that is only on results, none."""
    found: dict[str, list[CallSite]] = {label: [] for label in extract_labels_from_hlo_text(text)}
    for site in call_sites(text):
        found[site.label].append(site)
    return found


def autotune_recorded(selector: Any = None, *, progress: bool = True) -> AutotuningResult:
    """Tunes every call that was recorded for the current device.

    Args:
        selector: whose tuner and caches are used, or what `get_invocations()` returned; default the default
            selector and all recorded calls.
        progress: as `autotune_lowered`.

    Returns:
        As `autotune_lowered`.

    Raises:
        ConfigError: neither a selector nor recorded calls.
        TuningError: inside a trace, where nothing can be timed.

    Example:
        >>> autotune_recorded({}).entries
        ()
    """
    recorded = isinstance(selector, dict)
    chain = require_chain(default_selector() if selector is None or recorded else selector)
    invocations = selector if recorded else get_invocations()
    device, calls = device_fingerprint(), []
    for op_id_v, by_key in invocations.items():
        for call_key, (kernel, args, kwargs) in by_key.items():
            key = Key(device, op_id_v, call_key)
            inv = find_call(key) or Invocation(kernel, args, kwargs)
            calls.append((f"{op_id_v}:{call_key}", key, inv, 1, 1))
    with Progress(chain, shown=progress):
        return _tune(chain, device, calls, [], False)


def _tune(
    selector: ConfigSelectorChain, device: str, calls: list, skipped: list[tuple[str, str]], strict: bool
) -> AutotuningResult:
    if calls and inside_trace():
        raise TuningError("tuning inside a trace would time nothing; tune outside jit, grad and vmap")
    entries, notes, fruitless = [], [], []
    selector.emit("tuning_start", total=len(calls))
    for index, (label, key, inv, count, executions) in enumerate(calls):
        numbers: dict[str, Any] = {"count": count, "executions": executions, "shapes": operand_shapes(inv)}
        selector.emit("op_start", op_id_v=inv.op_id_v, shapes=numbers["shapes"], index=index, total=len(calls))
        try:
            entry = _stored(selector, key, inv, numbers)
            if entry is None:
                entry, found = _tuned(selector, key, inv, numbers)
                notes += [f"{inv.op_id_v} {numbers['shapes']}: {note}" for note in found]
        except DeviceLostError:  # whatever comes next would fail, too
            raise
        except EjkernelError as error:
            if strict:
                raise
            skipped.append((label, str(error)))
            fruitless.append(inv.op_id_v)
            selector.emit("op_skipped", op_id_v=inv.op_id_v, reason=str(error), index=index, total=len(calls))
            continue
        entries.append(entry)
        if entry.source == "heuristic":
            fruitless.append(inv.op_id_v)
        selector.emit("op_done", op_id_v=inv.op_id_v, entry=entry, index=index, total=len(calls))
    if fruitless:
        warnings.warn(
            f"{len(fruitless)} of {len(calls)} calls keep their heuristic config, for nothing else could be timed: "
            f"{', '.join(sorted(set(fruitless)))}; print the result for the reasons",
            stacklevel=3,
        )
    return AutotuningResult(device, tuple(entries), skipped=tuple(skipped), notes=tuple(notes))


def _stored(selector: ConfigSelectorChain, key: Key, inv: Invocation, numbers: dict[str, Any]) -> Entry | None:
    for tier, cfg in selector.stored(inv, key):
        if cfg is not None:
            return Entry(
                key.op_id_v, key.call_key, cfg, source=tier, heuristic=heuristic(inv), place=place_of(inv), **numbers
            )
    return None


def _tuned(
    selector: ConfigSelectorChain, key: Key, inv: Invocation, numbers: dict[str, Any]
) -> tuple[Entry, tuple[str, ...]]:
    """What tuning a call gives, and what its reader should know."""
    tuned = selector.tune(inv, key)
    entry = Entry(
        key.op_id_v,
        key.call_key,
        tuned.cfg,
        heuristic=tuned.heuristic,
        heuristic_ms=tuned.heuristic_ms,
        ms=tuned.ms,
        source="tuned" if getattr(tuned, "compared", True) else "heuristic",
        trials=tuned.trials,
        place=place_of(inv),
        **numbers,
    )
    return entry, getattr(tuned, "notes", ())


def operand_shapes(inv: Invocation) -> str:
    """The first two operands of a call, such as `float32[8,128] float32[128,64] ...`."""
    shapes = [f"{x.dtype.name}{list(x.shape)}".replace(" ", "") for x in inv.operands]
    return " ".join(shapes[:2]) + (" ..." if len(shapes) > 2 else "")
