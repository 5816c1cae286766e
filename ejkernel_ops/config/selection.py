"""`ConfigSelectorChain`: chooses a config for a call from explicit values, overlays, caches and heuristics."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from ..core.snapshot import Snapshot, current, next_uid
from ..core.spread import is_spread
from ..errors import ConfigError
from ..execution.measure import inside_trace
from ..utils.values import stable_json
from .cache import ConfigCache, Key, count_write, generation
from .choice import Choice, combine, other_type, unread
from .neighbours import Neighbours, neighbours_in, place_of
from .persistent import PersistentCache
from .policy import AutotunePolicy, effective, policy_override
from .table import table_of

__all__ = [
    "AutotunePolicy", "ConfigChooser", "ConfigSelectorChain", "default_selector", "policy_override",
    "set_default_selector",
]  # fmt: skip

_REMEMBERED = 8192


class ConfigChooser(Protocol):
    """Anything that chooses configs: an `Executor` takes one.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops import Executor
        >>> from ejkernel_ops.kernels import LINEAR
        >>> class Heuristic:
        ...     def choose(self, inv, kernel):
        ...         return kernel.heuristic_cfg(inv)
        >>> Executor(Heuristic()).choose_config(LINEAR, jnp.ones((2, 3)), jnp.ones((3, 4))).backend
        'xla'
    """

    def choose(self, inv: Any, kernel: Any) -> Any:
        """The config for an invocation."""
        ...


class ConfigSelectorChain:
    """Chooses a config by tiers: explicit, overlays, memory, disk, packaged table, tuning, neighbour, heuristic.

    An explicit config is never stored, and neither a heuristic nor a neighbour's config counts as tuned.

    Args:
        cache: configs of this process; default a new `ConfigCache`.
        persistent: configs on disk; default none.
        tuner: what tunes; default an `Autotuner` made when first needed.
        policy: which tiers may be used.
        persist_autotune: whether tuned configs are written to `persistent`.
        on_event: called as `on_event(name, **data)` at each step of a tuning run and each choice.
        autotune: another spelling of the policy's `tune_on_call`.

    Raises:
        ConfigError: bad policy values.

    Example:
        >>> selector = ConfigSelectorChain(cache=ConfigCache())
        >>> selector.policy.mode
        'auto'
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        persistent: PersistentCache | None = None,
        tuner: Any = None,
        policy: AutotunePolicy | None = None,
        persist_autotune: bool = True,
        on_event: Callable[..., None] | None = None,
        *,
        autotune: bool | None = None,
    ):
        _check_parts(cache, persistent, tuner, policy)
        if policy is not None and policy.tune_on_call and autotune is False:
            raise ConfigError("autotune is False and policy.tune_on_call is True: two spellings of one; expected one")
        self.cache = ConfigCache() if cache is None else cache
        self.persistent, self._tuner, self.persist_autotune = persistent, tuner, persist_autotune
        self.policy = policy or AutotunePolicy()
        if autotune is not None:
            self.policy = AutotunePolicy(mode=self.policy.mode, tune_on_call=autotune)
        self.on_event = on_event
        self.uid = next_uid()
        self.stats: Counter[str] = Counter()
        self._answers: OrderedDict[tuple, Choice] = OrderedDict()
        self._neighbours = Neighbours(persistent if persist_autotune else None)
        self._lock = threading.Lock()

    @property
    def tuner(self) -> Any:
        """What tunes."""
        if self._tuner is None:
            from ..execution.tuning import Autotuner

            self._tuner = Autotuner()
        return self._tuner

    def choose(self, inv: Any, kernel: Any = None) -> Any:
        """The config for a call, under the policy and the overlays of this moment.

        Args:
            inv: the abstract call; its `override_cfg` counts as explicit.
            kernel: not needed: the invocation knows its kernel.

        Returns:
            A complete config.

        Raises:
            ConfigError: no tier that the policy allows gives one.
        """
        return self.choose_for(inv, current(), generation()).cfg

    def choose_for(self, inv: Any, snapshot: Snapshot, at: int) -> Choice:
        """As `choose`, under a given snapshot; the first answer for the same arguments sticks."""
        explicit = None if inv.override_cfg is None else stable_json(inv.override_cfg, where="config")
        tunes = self.policy_under(snapshot).tune_on_call and not inside_trace()
        question = (inv.kernel, inv.call_key, inv.platform, explicit, snapshot, at, self.policy, tunes, is_spread())
        with self._lock:
            if question in self._answers:
                self._answers.move_to_end(question)
                return self._answers[question]
        answer = combine(inv, self._tiers(inv, snapshot))
        with self._lock:
            answer = self._answers.setdefault(question, answer)  # that of the thread which was first
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        self.stats[answer.source] += 1
        self.emit("choice", op_id_v=inv.op_id_v, call_key=inv.call_key, cfg=answer.cfg, source=answer.source)
        return answer

    def policy_under(self, snapshot: Snapshot) -> AutotunePolicy:
        """The policy with the overrides of a snapshot."""
        return effective(self.policy, self.uid, snapshot)

    def _tiers(self, inv: Any, snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
        policy = self.policy_under(snapshot)
        key = Key(inv.device_fingerprint, inv.op_id_v, inv.call_key)
        yield "call", inv.override_cfg
        if policy.mode != "off":
            yield "overlay", snapshot.overlay.configs.get(key)
        if policy.mode in ("auto", "cached"):
            yield from self._on_call(inv, key)
        if policy.mode != "off":
            yield "table", self._from_table(inv, key)
        if policy.mode in ("auto", "cached"):
            if policy.mode == "auto" and policy.tune_on_call:
                yield "tuned", self._tune_now(inv, key)
            yield "neighbour", self._from_neighbour(inv, snapshot)
        yield "heuristic", functools.partial(_refuse if policy.mode == "pinned" else heuristic, inv)

    def _on_call(self, inv: Any, key: Key) -> Iterator[tuple[str, Any]]:
        """What is stored for a call that is about to run."""
        if jax.process_count() == 1:
            yield from self.stored(inv, key)
        else:  # disks of several hosts differ, and so would their programs
            yield "memory", self.cache.get(key)

    def stored(self, inv: Any, key: Key) -> Iterator[tuple[str, Any]]:
        """What memory and disk hold for a call, as `(tier, config or None)`."""
        yield "memory", self.cache.get(key)
        yield "disk", self._from_disk(inv, key)

    def _from_disk(self, inv: Any, key: Key) -> Any:
        if self.persistent is None:
            return None
        cfg = self.persistent.get(key)
        if cfg is not None and _if_legal(inv, cfg) is None:  # it was legal where and when it was tuned
            self.stats["disk illegal"] += 1
            return None
        return cfg

    def _from_table(self, inv: Any, key: Key) -> Any:
        return _if_legal(inv, table_of(key.device).configs.get(key))

    def _tune_now(self, inv: Any, key: Key) -> Any:
        if inside_trace() or jax.process_count() > 1:
            self.emit(
                "untuned", op_id_v=inv.op_id_v, call_key=inv.call_key, reason="inside a trace or several processes"
            )
            return None
        return self.tune(inv, key).cfg

    def tune(self, inv: Any, key: Key) -> Any:
        """Tunes a call, with what won at neighbouring shapes as a start, and keeps the winner.

        Raises:
            TuningError: as `Autotuner.tune`.
        """
        parameters = inspect.signature(self.tuner.tune).parameters
        hints = (
            {"hints": [cfg for cfg in self._near(inv, current()) if cfg is not None]} if "hints" in parameters else {}
        )
        tuned = self.tuner.tune(inv, on_event=self.emit, **hints)
        self.stats["tunings"] += 1
        self.stats.update(f"trial {trial.status}" for trial in getattr(tuned, "trials", ()))
        if getattr(tuned, "compared", True):
            self.store(key, tuned.cfg, inv, getattr(tuned, "heuristic", None))
        return tuned

    def _from_neighbour(self, inv: Any, snapshot: Snapshot) -> Any:
        """The config of the nearest tuned shape for which it is legal; `None` where its heuristic won there."""
        if not inv.kernel.has_rule:  # nobody could say that it is legal
            return None
        return next((cfg for cfg in self._near(inv, snapshot) if cfg is None or why_illegal(inv, cfg) is None), None)

    def _near(self, inv: Any, snapshot: Snapshot) -> list[Any]:
        """Configs of neighbouring shapes, the nearest first: of the overlays, of memory and disk, of the table."""
        try:
            place = place_of(inv)
        except (ConfigError, jax.errors.InconclusiveDimensionOperation):  # no key, or symbols for lengths
            return []
        found = neighbours_in(snapshot.overlay, inv.device_fingerprint, inv.op_id_v, place)
        if jax.process_count() == 1:  # memories and disks of several hosts differ
            found += self._neighbours.of(inv.device_fingerprint, inv, place)
        return [neighbour.cfg for neighbour in found + table_of(inv.device_fingerprint).near(place)]

    def store(self, key: Key, cfg: Any, inv: Any = None, heuristic: Any = None) -> None:
        """Keeps a measured winner, in memory and on disk.

        With several processes on disk only: no other one has it, and calls of this one would use what is in memory.

        Args:
            key: of the call.
            cfg: the winner.
            inv: the call, so that its neighbours know of it.
            heuristic: its config without tuning, which neighbours have of their own.
        """
        if inv is not None:
            self._neighbours.add(key.device, inv, place_of(inv), None if cfg == heuristic else cfg)
        if jax.process_count() == 1:
            self.cache.put(*key, cfg)
        if self.persistent is not None and self.persist_autotune:
            try:
                self.persistent.put(*key, cfg)
            except ConfigError as error:  # what was measured is not lost to a config that disks cannot keep
                warnings.warn(f"{key.op_id_v} is tuned in this process only: {error}", stacklevel=3)

    def forget(self, key: Key) -> None:
        """Takes a config back out of memory and disk."""
        from ..registry import find_call  # which imports this module

        if (inv := find_call(key)) is not None:
            self._neighbours.discard(key.device, inv)
        self.cache.discard(key)
        if self.persistent is not None and self.persist_autotune:
            self.persistent.discard(key)

    def emit(self, event: str, **data: Any) -> None:
        """Calls `on_event`, if there is one."""
        if self.on_event is not None:
            self.on_event(event, **data)


def _check_parts(cache: Any, persistent: Any, tuner: Any, policy: Any) -> None:
    """Refuses parts of a selector that cannot be used, where it is made and not where it first chooses."""
    for name, part, methods, expected in (
        ("cache", cache, ("get", "put", "discard"), "a ConfigCache"),
        ("persistent", persistent, ("get", "put", "discard"), "a PersistentCache"),
        ("tuner", tuner, ("tune",), "an Autotuner"),
    ):
        if part is not None and not all(hasattr(part, method) for method in methods):
            raise ConfigError(f"{name} is {part!r}; expected {expected}, or something with {', '.join(methods)}")
    if policy is not None and not isinstance(policy, AutotunePolicy):
        raise ConfigError(f"policy is {policy!r}; expected an AutotunePolicy")


def require_chain(selector: Any) -> ConfigSelectorChain:
    """The selector, if it is one that keeps what is tuned.

    Raises:
        ConfigError: something else, such as an executor.
    """
    if not isinstance(selector, ConfigSelectorChain):
        hint = "; pass executor.chooser" if hasattr(selector, "chooser") else ""
        raise ConfigError(f"selector is {selector!r}; expected a ConfigSelectorChain{hint}")
    return selector


def _refuse(inv: Any, backend: str | None) -> Any:
    raise ConfigError(
        f"policy is pinned, and {inv!r} has no config (key {inv.call_key}): enter a result that has it, or pass a "
        "config to the call"
    )


def choose(inv: Any, snapshot: Snapshot, generation: int) -> Choice:
    """Chooses for one abstract call: a pure function of its arguments and of the caches at that generation.

    Raises:
        ConfigError: no tier gives a config, or an explicit one names a field that its back end lacks.
        UnsupportedError: an explicit back end cannot do the call.
    """
    selector, is_chain = _selector(snapshot)
    if is_chain:
        return selector.choose_for(inv, snapshot, generation)
    return Choice(selector.choose(inv, inv.kernel), (("", "chooser"),))


def tunes_on_call(snapshot: Snapshot) -> bool:
    """Whether calls under a snapshot are tuned when they are first made."""
    selector, is_chain = _selector(snapshot)
    return is_chain and selector.policy_under(snapshot).tune_on_call


def _selector(snapshot: Snapshot) -> tuple[Any, bool]:
    """Who chooses, and whether it knows of snapshots."""
    selector = snapshot.selector if snapshot.selector is not None else default_selector()
    return selector, isinstance(selector, ConfigSelectorChain)


def heuristic(inv: Any, backend: str | None = None) -> Any:
    """The heuristic config of a call, for a back end if one is fixed."""
    return inv.kernel.variant("heuristic_cfg", backend, inv.platform, inv)(inv)


def why_illegal(inv: Any, cfg: Any) -> str | None:
    """Why a stored or proposed config may not be used for a call; `None` where it may."""
    kernel = inv.kernel
    if (kind := other_type(inv, cfg)) is not None:
        return f"a {type(cfg).__name__}, expected a {kind.__name__}"
    backend = getattr(cfg, "backend", None)
    if backend is not None and (reason := kernel.why_not(inv, backend)) is not None:
        return reason
    if (reason := unread(kernel, cfg)) is not None:
        return reason
    try:
        return kernel.illegal(inv, cfg)
    except Exception as error:  # configs come from disks too
        return f"{kernel.op_id_v}.illegal raised {type(error).__name__}: {error}"


def _if_legal(inv: Any, cfg: Any) -> Any:
    return cfg if cfg is not None and why_illegal(inv, cfg) is None else None


_default: list[ConfigSelectorChain] = []


def default_selector() -> ConfigSelectorChain:
    """The selector of calls that name no executor: memory, the user's cache folder, the packaged table, heuristics.

    Returns:
        The same object in each call, until `set_default_selector`.

    Example:
        >>> default_selector() is default_selector()
        True
    """
    if not _default:
        _default.append(ConfigSelectorChain(persistent=PersistentCache()))
    return _default[0]


def set_default_selector(selector: ConfigSelectorChain) -> ConfigSelectorChain:
    """Makes a selector the default of calls that are traced from now on.

    Args:
        selector: the new default.

    Returns:
        The one before, so that it can be put back.

    Raises:
        ConfigError: not a selector.

    Example:
        >>> before = set_default_selector(ConfigSelectorChain())
        >>> _ = set_default_selector(before)
    """
    if not hasattr(selector, "choose"):
        raise ConfigError(f"selector is {selector!r}; expected something with a method choose(inv, kernel)")
    before = default_selector()
    _default[0] = selector
    count_write()
    return before
