"""Tuned configs of neighbouring shapes: what a call starts from that was not tuned itself."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from ..core.call import call_like
from ..core.snapshot import Overlay
from ..errors import CacheFormatError, ConfigError
from ..utils.fingerprint import is_array
from ..utils.values import short_hash, stable_json
from .schema import from_json, from_plain, to_json

if TYPE_CHECKING:
    from .persistent import PersistentCache  # which checks the hints that it reads

_FAR = 6.0  # doublings: four times the rows and twice the head_dim is near enough, and little more
_LAST_AXIS = 3.0  # a width decides more than a count of rows
_KEPT = 64  # of one kind on disk

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Lengths = list[list[Count]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a call lies among the calls of its kernel.

    Args:
        kind: 16 hex digits of all but the lengths: kernel, dtypes, ranks, static arguments.
        lengths: of each operand, in order.

    Example:
        >>> Place("0123456789abcdef", ((8, 128), (128, 64))).distance(Place("0123456789abcdef", ((16, 128), (128, 64))))
        0.5
    """

    kind: str
    lengths: tuple[tuple[int, ...], ...]

    def distance(self, other: Place) -> float:
        """Doublings from one to the other, the mean over operands; infinite where the kinds differ."""
        if self.kind != other.kind or [len(x) for x in self.lengths] != [len(x) for x in other.lengths]:
            return math.inf
        each = [_doublings(a, b) for a, b in zip(self.lengths, other.lengths) if a]
        return sum(each) / max(1, len(each))


def _doublings(a: Sequence[int], b: Sequence[int]) -> float:
    steps = [abs(math.log2(max(x, 1) / max(y, 1))) for x, y in zip(a, b)]
    return sum(steps[:-1]) + _LAST_AXIS * steps[-1]


def place_of(inv: Any) -> Place:
    """The place of a call."""
    call, _ = call_like(inv)
    statics = [[x.dtype.name, len(x.shape), bool(x.weak_type)] if is_array(x) else None for x in inv.operands]
    forms = [inv.op_id_v, inv.kernel.state(), call.text, statics, inv.needs, inv.residuals, inv.batch_axes]
    return Place(short_hash(stable_json(forms)), tuple(tuple(map(int, x.shape)) for x in inv.operands))


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A tuned call: where it lies, and its config; `None` where its heuristic won, which has nothing to pass on."""

    place: Place
    cfg: Any


def nearest(place: Place, known: Iterable[Neighbour]) -> list[Neighbour]:
    """The neighbours that are near enough, the nearest first; of equally near ones the smaller."""
    near = [(place.distance(neighbour.place), neighbour.place.lengths, neighbour) for neighbour in known]
    return [neighbour for distance, _, neighbour in sorted(near, key=lambda found: found[:2]) if distance <= _FAR]


class HintsKey(NamedTuple):
    """What the tuned calls of one kind are stored under."""

    device: str
    op_id_v: str
    kind: str


def read_hints(text: Any, kind: str, config_cls: Any) -> list[Neighbour]:
    """The tuned calls of one kind that a text holds.

    Args:
        text: what `dump_hints` returned.
        kind: that of their places.
        config_cls: the type of their configs; `Any` leaves them as JSON data.

    Raises:
        CacheFormatError: the text holds something else.
    """
    stored: list = from_json(from_plain(text, str), list[tuple[Lengths, Any]])
    return [
        Neighbour(Place(kind, tuple(map(tuple, lengths))), None if cfg is None else from_plain(cfg, config_cls))
        for lengths, cfg in stored
    ]


def dump_hints(known: Iterable[Neighbour]) -> str:
    """The text that `read_hints` reads.

    Raises:
        ConfigError: a config without a JSON form.
    """
    return json.dumps([[n.place.lengths, None if n.cfg is None else json.loads(to_json(n.cfg))] for n in known])


def merge_hints(first: Iterable[Neighbour], others: Iterable[Neighbour]) -> list[Neighbour]:
    """The first and the others in this order, as many as are kept; of a call that is in both, the first's."""
    known: dict[Place, Neighbour] = {}
    for neighbour in (*first, *others):
        known.setdefault(neighbour.place, neighbour)
    return list(known.values())[:_KEPT]


class Neighbours:
    """The tuned calls that a selector knows of, by kind, in memory and on its disk.

    On disk each kind is one entry, read again before it is replaced: of two processes that write at the same moment one
    may win, which costs a hint and no config.

    Args:
        persistent: where they are kept between processes; `None`: nowhere.
    """

    def __init__(self, persistent: PersistentCache | None = None):
        self._persistent = persistent
        self._known: dict[tuple[str, str], list[Neighbour]] = {}
        self._lock = threading.Lock()

    def add(self, device: str, inv: Any, place: Place, cfg: Any) -> None:
        """Adds a tuned call; `cfg` is `None` where its heuristic won."""
        with self._lock:
            known = merge_hints([Neighbour(place, cfg)], self._merged(device, place.kind, inv))
            self._known[device, place.kind] = known
        self._write(HintsKey(device, inv.op_id_v, place.kind), known)

    def discard(self, device: str, inv: Any) -> None:
        """Forgets a tuned call."""
        place = place_of(inv)
        with self._lock:
            before = self._merged(device, place.kind, inv)
            known = [n for n in before if n.place != place]
            self._known[device, place.kind] = known
        if len(known) != len(before):
            self._write(HintsKey(device, inv.op_id_v, place.kind), known)

    def of(self, device: str, inv: Any, place: Place) -> list[Neighbour]:
        """The tuned calls near one, the nearest first, itself left out."""
        with self._lock:
            known = self._of(device, place.kind, inv)
        return nearest(place, [n for n in known if n.place != place])

    def _of(self, device: str, kind: str, inv: Any) -> list[Neighbour]:
        if (device, kind) not in self._known:
            self._known[device, kind] = self._read(HintsKey(device, inv.op_id_v, kind), inv.kernel.config_cls)
        return self._known[device, kind]

    def _merged(self, device: str, kind: str, inv: Any) -> list[Neighbour]:
        """What this process knows, and what others have written since it looked."""
        key = HintsKey(device, inv.op_id_v, kind)
        return merge_hints(self._of(device, kind, inv), self._read(key, inv.kernel.config_cls))

    def _read(self, key: HintsKey, config_cls: Any) -> list[Neighbour]:
        if self._persistent is None or config_cls is None:
            return []
        stored = self._persistent.get(key)
        try:
            return [] if stored is None else read_hints(stored, key.kind, config_cls)
        except CacheFormatError:  # of a cache of the user's, which checks nothing
            return []

    def _write(self, key: HintsKey, known: list[Neighbour]) -> None:
        if self._persistent is None:
            return
        try:
            self._persistent.put(key, dump_hints(known))
        except ConfigError:  # a config without a JSON form; who stores it says so
            return


def neighbours_in(overlay: Overlay, device: str, op_id_v: str, place: Place) -> list[Neighbour]:
    """The calls of an overlay near one, the nearest first."""
    found = []
    for key, (there, heuristic) in overlay.places.items():
        if key.device == device and key.op_id_v == op_id_v:
            cfg = overlay.configs[key]
            found.append(Neighbour(there, None if cfg == heuristic else cfg))
    return nearest(place, found)
