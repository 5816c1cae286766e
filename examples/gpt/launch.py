"""How a run is started: over which mesh of devices, and in how many processes. Asks JAX for nothing until it starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
AXES = ("data", "fsdp", "context", "model")  # neighbours in the last one are nearest to each other

SILENT_S = 30  # a process that is not heard of for so long is dead, and the others stop too


class Refused(Exception):
    """Something the user asked for that cannot be done: one line and exit status 2."""


def mesh_sizes(text: str | None) -> dict[str, int] | None:
    """The sizes in `data=2,model=2`; `None` of none.

    Raises:
        Refused: another text.
    """
    if text is None:
        return None
    parts, expected = text.split(","), rf"({'|'.join(AXES)})=[1-9]\d*"
    if not all(re.fullmatch(expected, part) for part in parts):
        raise Refused(f"--mesh is {text!r}; expected sizes of some of {', '.join(AXES)}, such as data=2,model=2")
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in parts)}
    if len(sizes) < len(parts):
        raise Refused(f"--mesh is {text!r}; expected each axis once")
    return sizes


@dataclasses.dataclass(frozen=True)
class Launch:
    """The flags that say where a run runs: a resumed one may have others than before."""

    mesh: dict[str, int] | None = None
    distributed: bool = False
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        missing = [f"--{name}" for name, value in given.items() if value is None]
        if not self.distributed and len(missing) < 3:
            raise Refused(f"{', '.join(f'--{n}' for n, v in given.items() if v is not None)} without --distributed")
        if self.distributed and missing and len(missing) < 3:
            raise Refused(f"{', '.join(missing)} missing: give all three of them, or none where the cluster tells them")
        if self.process is not None and not 0 <= self.process < (self.processes or 0):
            raise Refused(f"--process is {self.process}; expected 0 to {(self.processes or 0) - 1}, below --processes")

    def start(self) -> None:
        """Joins the other processes, before anything asks JAX for a device.

        Raises:
            Refused: there is nobody to join.
        """
        if not self.distributed:
            return
        import jax

        from .progress import console

        try:
            jax.distributed.initialize(
                self.coordinator, self.processes, self.process, heartbeat_timeout_seconds=SILENT_S
            )
        except (ValueError, RuntimeError) as error:
            raise Refused(f"--distributed: {error}") from None
        console.quiet = not is_first()


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    import jax

    return jax.process_index() == 0


def in_first(what: str, work: Callable[[], T]) -> T:
    """Does some work in the first process alone, which gives JSON data.

    Raises:
        Refused: it failed there; the text has its error.
    """
    import jax

    from ejkernel_ops import EjkernelError
    from ejkernel_ops.execution import hosts

    if jax.process_count() == 1:
        return work()
    try:
        return hosts.from_first(what, work)
    except EjkernelError as error:
        raise Refused(str(error)) from None


def agreed(what: str, work: Callable[[], T], tell: Callable[[T], str]) -> T:
    """Does some work in each process; where it fails in one, or what they tell of it differs, all stop.

    Raises:
        Refused: the text has the error of the other process, or what each told.
    """
    import jax

    from ejkernel_ops import EjkernelError
    from ejkernel_ops.execution import hosts

    if jax.process_count() == 1:
        return work()
    try:
        value, texts = hosts.together(what, work, tell)
        hosts.require_same(what, texts, "start all processes with the same flags, over the same files")
    except EjkernelError as error:
        raise Refused(str(error)) from None
    return value
