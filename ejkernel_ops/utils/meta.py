"""Labels of calls in programs: made, found, counted."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..environment import DEFAULT_PREFIX, label_prefix
from ..errors import LabelError
from .labelled import labelled

LABEL_PREFIXES = (DEFAULT_PREFIX,)
"""What labels begin with where `EJKERNEL_OPS_PREFIX` is not set."""

SHARED = "ejkernel_shared"  # what a call is marked with that XLA shares out over devices: a label of its whole shapes
_LABEL = r"(?P<op>[A-Za-z0-9_.-]{1,64}@v[A-Za-z0-9_.-]{1,32}):(?P<key>[0-9a-f]{16})"
_LABEL_OR_SCOPE = r"(?P<op>[A-Za-z0-9_.-]{1,64})[@~]v(?P<version>[A-Za-z0-9_.-]{1,32})[:~](?P<key>[0-9a-f]{16})"
OTHER_LABEL = re.compile(r'ejkernel_call = "([A-Za-z0-9_.-]{1,63}#[^"]*)"')
LABEL_RE = re.compile(r"ejkernel_ops#" + _LABEL)
"""A label with the prefix of `LABEL_PREFIXES`; its groups are `op`, such as `linear@v1`, and `key`, 16 hex digits."""


def label(op_id_v: str, call_hash: str | None = None, prefix: str | None = None) -> Any:
    """The label of a call; or, without `call_hash`, a decorator that labels the calls of any function.

    Such a function appears in `find_labels_in_lowered` and in profiles under a key of its argument shapes; it has
    nothing to tune, so `autotune_lowered` lists it as skipped. Its gradient has no label.

    Args:
        op_id_v: name and version, such as `"linear@v1"`; for a decorator the version may be left out.
        call_hash: the call's key, 16 hex digits.
        prefix: default `EJKERNEL_OPS_PREFIX`, else `"ejkernel_ops#"`.

    Returns:
        `<prefix><op_id_v>:<call_hash>`, or the decorator.

    Raises:
        LabelError: a part is malformed.

    Example:
        >>> label("matmul@v1", "1a2b3c4d5e6f7081")
        'ejkernel_ops#matmul@v1:1a2b3c4d5e6f7081'
        >>> import jax, jax.numpy as jnp
        >>> @label("my_norm")
        ... def my_norm(x):
        ...     return x / jnp.abs(x).max()
        >>> find_labels_in_lowered(jax.jit(my_norm).lower(jnp.ones(3)))[0].rpartition(":")[0]
        'ejkernel_ops#my_norm@v1'
    """
    if not isinstance(op_id_v, str):
        raise LabelError(f'op_id_v is {op_id_v!r}; expected a name: @label("my_op") on a function')
    if call_hash is None:
        named = op_id_v if "@" in op_id_v else f"{op_id_v}@v1"
        label(named, "0" * 16, prefix)  # what is malformed is an error here, not where the function is called
        return labelled(lambda digits: label(named, digits, prefix))
    if not re.fullmatch(_LABEL, text := f"{op_id_v}:{call_hash}"):
        raise LabelError(f"label parts are {op_id_v!r} and {call_hash!r}; expected name@vN and 16 hex digits")
    return label_prefix(prefix) + text


def split_label(text: str) -> tuple[str, str]:
    """Name with version, and call key, of a label of any prefix."""
    found = re.fullmatch(r"[A-Za-z0-9_.-]{1,63}#" + _LABEL, text)
    if found is None:
        raise LabelError(f"label is {text!r}; expected prefix#name@vN:16 hex digits")
    return found["op"], found["key"]


def extract_labels_from_hlo_text(text: str, prefix: str | None = None) -> list[str]:
    """The labels in the text of a program, each once, in order of appearance.

    Args:
        text: StableHLO or HLO text.
        prefix: as in `label`.

    Returns:
        Labels.

    Raises:
        LabelError: a malformed prefix.

    Example:
        >>> extract_labels_from_hlo_text('x = "ejkernel_ops#matmul@v1:1a2b3c4d5e6f7081"')
        ['ejkernel_ops#matmul@v1:1a2b3c4d5e6f7081']
    """
    prefix = label_prefix(prefix)
    found = re.finditer(re.escape(prefix) + _LABEL_OR_SCOPE, text)
    return list(dict.fromkeys(f"{prefix}{m['op']}@v{m['version']}:{m['key']}" for m in found))


def program_text(program: Any) -> str:
    """The text of a program: a `Lowered`, `Traced`, `Compiled` or `Exported`, or text itself."""
    if isinstance(program, str):
        return program
    if hasattr(program, "mlir_module"):
        return program.mlir_module()
    if hasattr(program, "lower") and not hasattr(program, "compile"):
        if hasattr(program, "trace"):
            raise LabelError("program is a jitted function; lower it first, for its arguments: function.lower(*args)")
        program = program.lower()
    if hasattr(program, "as_text"):
        return program.as_text()
    if hasattr(program, "lowered"):  # wrappers around a Lowered, such as Flax's
        return program_text(program.lowered)
    raise LabelError(f"program is a {type(program).__name__}; expected a Lowered, Traced, Compiled, Exported or text")


def find_labels_in_lowered(lowered: Any, prefix: str | None = None) -> list[str]:
    """The labels in a lowered program, each once, in order of appearance.

    Args:
        lowered: what `jax.jit(f).lower(...)`, `.trace(...)` or `.compile()` returns, or text.
        prefix: as in `label`.

    Returns:
        Labels.

    Raises:
        LabelError: not a program, or a malformed prefix.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel_ops import linear
        >>> lowered = jax.jit(linear).lower(jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> len(find_labels_in_lowered(lowered))
        1
    """
    return extract_labels_from_hlo_text(program_text(lowered), prefix)


@dataclasses.dataclass(frozen=True)
class CallSite:
    """One labelled op of a program, with how often it is called and run.

    Args:
        label: the label.
        calls: how often its function is called in the program text.
        executions: the same times the lengths of the loops around it, where they are known.
        config: the config that was used, as text.
        path: the module path, if it was asked for.
    """

    label: str
    calls: int
    executions: int
    config: str = ""
    path: str = ""


_FUNCTION = re.compile(r"^\s*func\.func .*?@(\"[^\"]+\"|[\w.$-]+)")
_CALL = re.compile(r"\bcall @(\"[^\"]+\"|[\w.$-]+)")
_ATTRIBUTE = re.compile(r'ejkernel_(call|cfg|path) = "((?:[^"\\]|\\.)*)"')
_CONSTANT = re.compile(r"^\s*(%\w+) = (?:stablehlo|sdy)\.constant dense<(\d{1,18})> : tensor<i(?:32|64)>")
_MOST_RUNS = 1 << 62  # of nested loops: text that is no program must not cost arithmetic with huge numbers
_COMPARE = re.compile(r"stablehlo\.compare\s+LT, (%\w+), (%\w+)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)')  # one without an end, too: else time would be quadratic


def call_sites(program: Any, prefix: str | None = None) -> list[CallSite]:
    """The labelled calls of a program (not of a compiled one, whose functions are gone), counted.

    Args:
        program: a `Lowered`, `Traced`, `Exported`, or StableHLO text.
        prefix: as in `label`.

    Returns:
        One entry for each labelled op in a function's text.
    """
    is_label = re.compile(re.escape(label_prefix(prefix)) + _LABEL).fullmatch
    functions = dict(_functions(program_text(program), is_label))
    totals = _totals({name: called for name, (_, called) in functions.items()})
    sites = []
    for name, (marks, _) in functions.items():
        calls, runs = totals[name]
        for mark, times in marks:
            if calls:
                sites.append(CallSite(mark["call"], calls, runs * times, mark.get("cfg", ""), mark.get("path", "")))
    return sites


def _totals(called: dict[str, dict[str, list[int]]]) -> dict[str, tuple[int, int]]:
    """How often `main` leads to each function: calls in the text, and the same times the loops around them."""
    totals = dict.fromkeys(called, (0, 0)) | {"main": (1, 1)}
    callers = Counter(name for names in called.values() for name in names)
    ready = [name for name in called if not callers[name]]
    while ready:  # each function after all of its callers; text with a cycle is not a program, its members stay at 0
        calls, runs = totals[caller := ready.pop()]
        for name, times in called[caller].items():
            if name in called:
                totals[name] = (totals[name][0] + calls * len(times), totals[name][1] + runs * sum(times))
                callers[name] -= 1
                if not callers[name]:
                    ready.append(name)
    return totals


def count_labels(program: Any, prefix: str | None = None) -> Counter[str]:
    """How often each labelled call occurs in a lowered program."""
    counts: Counter[str] = Counter()
    for site in call_sites(program, prefix):
        counts[site.label] += site.calls
    return counts


def _functions(text: str, is_label: Callable) -> Iterator[tuple[str, tuple[list, dict[str, list[int]]]]]:
    """Each function's labelled ops and calls, with the product of the loop lengths around them."""
    name, marks, called = "", [], {}
    depth, loops, constants, trip = 0, [], {}, 1  # loops: (depth of the loop's body, runs of the body)
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            if name:
                yield name, (marks, called)
            name, marks, called, loops, constants = found[1].strip('"'), [], {}, [], {}
        plain = _QUOTED.sub("", line) if '"' in line else line
        if found := _CONSTANT.match(line):
            constants[found[1]] = int(found[2])
        elif "stablehlo.compare" in line and (found := _COMPARE.search(line)):
            trip = constants.get(found[2], 1)
        times = loops[-1][1] if loops else 1
        if "ejkernel_call" in line:
            mark = {kind: _unescape(value) for kind, value in _ATTRIBUTE.findall(line)}
            texts = mark.get("call", "").split(" ")  # one device may run several calls of one that is shared out
            configs = mark.get("cfg", "").split("\n") if len(texts) > 1 else [mark.get("cfg", "")]
            pairs = itertools.zip_longest(texts, configs[: len(texts)], fillvalue="")
            marks += [(mark | {"call": text, "cfg": cfg}, times) for text, cfg in pairs if is_label(text)]
        if found := _CALL.search(plain if '@"' not in line else line):
            called.setdefault(found[1].strip('"'), []).append(times)
        if plain.strip() == "} do {":
            loops.append((depth, min(times * trip, _MOST_RUNS)))
            trip = 1
            continue
        depth += plain.count("{") - plain.count("}")
        if loops and depth < loops[-1][0]:
            loops.pop()
    if name:
        yield name, (marks, called)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-9A-F]{2}|.)", lambda m: chr(int(m[1], 16)) if len(m[1]) == 2 else m[1], text)


def labels_to_configs(lowered: Any, selector: Any = None, prefix: str | None = None) -> list[tuple[str, Any]]:
    """The stored config of each label of a program: memory first, then disk.

    Args:
        lowered: a program (see `find_labels_in_lowered`) or a list of labels.
        selector: whose caches; default the default selector's.
        prefix: as in `label`.

    Returns:
        `(label, config)` pairs, `None` where nothing is stored.

    Raises:
        ConfigError: the selector is none.
        LabelError: not a program, or a malformed label in a list.

    Example:
        >>> labels_to_configs(["ejkernel_ops#linear@v1:0123456789abcdef"])
        [('ejkernel_ops#linear@v1:0123456789abcdef', None)]
    """
    from ..config.cache import Key
    from ..config.selection import default_selector, require_chain
    from ..execution.local_calls import with_local_labels
    from .fingerprint import device_fingerprint

    selector = require_chain(default_selector() if selector is None else selector)
    is_list = isinstance(lowered, Iterable) and not isinstance(lowered, str)
    if is_list:
        labels = list(lowered)
    else:  # a config is of what one device runs
        labels = extract_labels_from_hlo_text(with_local_labels(program_text(lowered)), prefix)
    pairs = []
    for text in labels:
        key = Key(device_fingerprint(), *split_label(text))
        cfg = selector.cache.get(key)
        if cfg is None and selector.persistent is not None:
            cfg = selector.persistent.get(key)
        pairs.append((text, cfg))
    return pairs
