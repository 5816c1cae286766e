"""Tuned configs that come with the package, a file for each device model: below what a user's own disk has."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import EjkernelError
from .cache import Key
from .neighbours import Neighbour, Place, nearest


@dataclasses.dataclass(frozen=True)
class Table:
    """What was measured for one device model.

    Args:
        configs: by call.
        known: the calls whose place is known, by the kind of it.
    """

    configs: Mapping[Key, Any] = dataclasses.field(default_factory=dict)
    known: Mapping[str, list[Neighbour]] = dataclasses.field(default_factory=dict)

    def near(self, place: Place) -> list[Neighbour]:
        """The calls near one, the nearest first."""
        return nearest(place, self.known.get(place.kind, ()))


def table_name(device: str) -> str:
    """The file of a device model: `nvidia_h200.json` for `gpu|NVIDIA H200|9.0`."""
    _, _, rest = device.partition("|")
    model = rest.partition("|")[0].lower()
    return f"{re.sub('[^a-z0-9]+', '_', model).strip('_')}.json"


@functools.lru_cache(maxsize=64)
def table_of(device: str) -> Table:
    """The table of a device model, an empty one where none comes with the package; read once in a process.

    The file is an `AutotuningResult`, which `benchmarks/make_table.py` makes of measured ones.
    """
    from ..execution.result import AutotuningResult
    from ..execution.result_json import read  # results know of this module

    file = importlib.resources.files("ejkernel_ops") / "tables" / table_name(device)
    try:
        result = read(AutotuningResult, file.read_bytes(), allow_unknown_ops=True)
    except (FileNotFoundError, NotADirectoryError):
        return Table()
    except (OSError, EjkernelError) as error:
        warnings.warn(f"the packaged table of tuned configs {file} cannot be used: {error}", stacklevel=2)
        return Table()
    if result.device != device:  # a model of the same name with another capability, say
        return Table()
    known: dict[str, list[Neighbour]] = {}
    for entry in result.entries:
        if entry.place is not None:
            cfg = None if entry.cfg == entry.heuristic else entry.cfg
            known.setdefault(entry.place.kind, []).append(Neighbour(entry.place, cfg))
    return Table(result.as_overlay(), known)
