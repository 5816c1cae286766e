"""`AutotunePolicy`: which tiers a choice may use; `policy_override` changes it for a while."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from typing import Any

from ..core.snapshot import Reentrant, Snapshot, entered, uid_of
from ..errors import ConfigError

MODES = ("auto", "cached", "pinned", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutotunePolicy:
    """Which tiers a choice may use.

    Args:
        mode: `"auto"`: explicit, overlays, memory, disk, packaged table, tuning if `tune_on_call`, the nearest tuned
            shape, heuristic. `"cached"`: the same, never tuning. `"pinned"`: explicit, overlays, packaged table, else
            an error. `"off"`: explicit, else heuristic.
        tune_on_call: tune on the first call of a shape, outside traces, in a single process.

    Raises:
        ConfigError: an unknown mode, or a `tune_on_call` that is no bool.

    Example:
        >>> AutotunePolicy().mode
        'auto'
    """

    mode: str = "auto"
    tune_on_call: bool = False

    def __post_init__(self):
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; expected one of {', '.join(MODES)}")
        if not isinstance(self.tune_on_call, bool):
            raise ConfigError(f"tune_on_call is {self.tune_on_call!r}; expected True or False")


class policy_override(Reentrant):  # documented as a function
    """Context in which fields of the policy are different, for one selector or for all.

    Args:
        selector: whose policy; `None` is that of every selector used inside.
        **fields: fields of `AutotunePolicy`; `autotune=` is another spelling of `tune_on_call=`.

    Raises:
        ConfigError: an unknown field or value.

    Example:
        >>> with policy_override(mode="off"):
        ...     pass
    """

    def __init__(self, selector: Any = None, **fields: Any):
        if selector is not None and not hasattr(selector, "choose"):
            raise ConfigError(f"selector is {selector!r}; expected a ConfigSelectorChain, or None for every selector")
        if {"autotune", "tune_on_call"} <= fields.keys():
            raise ConfigError("autotune= and tune_on_call= are two spellings of one field; expected one")
        if "autotune" in fields:
            fields["tune_on_call"] = fields.pop("autotune")
        known = [f.name for f in dataclasses.fields(AutotunePolicy)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"unknown policy field {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {known}")
                )
        AutotunePolicy(**fields)  # refuses bad values before anything changes
        uid = None if selector is None else uid_of(selector)
        self.changes = tuple((uid, name, value) for name, value in sorted(fields.items()))

    def _open(self) -> contextlib.AbstractContextManager:
        def change(snapshot: Snapshot) -> Snapshot:
            kept = [p for p in snapshot.policies if p[:2] not in {c[:2] for c in self.changes}]
            return dataclasses.replace(snapshot, policies=(*kept, *self.changes))

        return entered(change)


def effective(policy: AutotunePolicy, uid: int, snapshot: Snapshot) -> AutotunePolicy:
    """A selector's policy under the overrides of a snapshot."""
    fields = {name: value for who, name, value in snapshot.policies if who in (None, uid)}
    return dataclasses.replace(policy, **fields) if fields else policy
