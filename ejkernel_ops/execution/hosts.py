"""What several processes say to each other, so that all of them compile one program or all stop.

It goes through the coordination service of `jax.distributed` and not through the devices: nothing is compiled, no
collective of the user's can be met by one of ours, and who does not come is named after a while. One process fails by
sending its error, so that no other waits for it. Nobody waits at a barrier of the service: one that a process left
cannot be waited for again, so a wait could not be cut into pieces, between which Ctrl-C is heard.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ..errors import ConfigError, TuningError, UnsupportedError
from .failures import first_line

T = TypeVar("T")
SOON_S, WORK_S = 600.0, 86400.0  # one who waits for others at the same line; one who waits for minutes of tuning
_SLICE_S = 2.0  # so long a Ctrl-C, and what another process decided, may stay unheard
_turns, _lock = itertools.count(), threading.RLock()  # the processes meet in the same order, or are told
_compared: set[str] = set()


def together(
    what: str, work: Callable[[], T], tell: Callable[[T], str], timeout_s: float = SOON_S
) -> tuple[T, list[str]]:
    """Does some work in each process; where it raises in one of them, all raise.

    Args:
        what: names the work, in errors too.
        work: is called here, and in each other process by itself.
        tell: the text that the others get of it.
        timeout_s: how long the others may take, in seconds.

    Returns:
        What `work` gave here, and the texts of all processes in order.

    Raises:
        TuningError: `work` raised in another process, or that was interrupted while it waited.
        ConfigError: another process is elsewhere, did not come in time, or cannot be reached.
        UnsupportedError: several processes without `jax.distributed.initialize()`.
    """
    value, text, error = None, "", None
    try:
        value = work()
        text = tell(value)
    except BaseException as raised:
        error = raised
    said = _exchange(what, {"text": text, "error": error and first_line(error)}, timeout_s)
    if error is not None:
        raise error
    failed = [f"process {index}: {other['error']}" for index, other in enumerate(said) if other["error"]]
    if failed:
        raise TuningError(f"{what} failed in {'; '.join(failed)}")
    return value, [other["text"] for other in said]  # type: ignore[return-value]


def from_first(what: str, work: Callable[[], T], timeout_s: float = SOON_S) -> T:
    """What `work` gives in process 0, as JSON data, in every process; only there is it called."""
    first = jax.process_index() == 0
    _, texts = together(what, lambda: work() if first else None, json.dumps, timeout_s)
    return json.loads(texts[0])


def require_same(what: str, texts: Sequence[str], hint: str) -> None:
    """Refuses texts that differ among processes.

    Raises:
        ConfigError: they do; the text has those of the processes that are not as process 0.
    """
    if others := [f"process {i}: {text}" for i, text in enumerate(texts) if text != texts[0]]:
        raise ConfigError(f"{what} in process 0: {texts[0]}, but in {', '.join(others[:8])}; {hint}")


def compare_once(what: str, text: str, hint: str) -> None:
    """Compares a text among all processes, the first time that this process has it.

    Raises:
        ConfigError: another process has another one, or none in time.
        TuningError: another process was interrupted while it waited.
    """
    if text in _compared:  # before the lock, which another thread may hold while it waits for tuning
        return
    with _lock:
        if text in _compared:  # another thread was first, and the other processes meet us but once
            return
        _, texts = together(what, lambda: text, str)
        require_same(what, texts, hint)
        _compared.add(text)


def _exchange(what: str, said: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """What every process said, in the order of their numbers; nobody is waited for by one that failed."""
    client = _client()
    with _lock:
        turn = _Turn(next(_turns), client)
        try:
            turn.say(said | {"what": what})
            found = [] if said["error"] else turn.hear(what, timeout_s)
        except jax.errors.JaxRuntimeError as error:
            told = " ".join(str(error).split())[:400]
            raise ConfigError(f"{what}: the other processes cannot be reached: {told}") from None
    require_same("what is done", [other["what"] for other in found], "all must do the same in the same order")
    return found


class _Turn:
    """One meeting of all processes: each leaves a text, and the first verdict on whether all came counts for all."""

    def __init__(self, number: int, client: Any):
        self.number, self.client, self.folder = number, client, f"ejkernel_ops/{number}/"

    def say(self, said: dict[str, Any]) -> None:
        self._put(f"{jax.process_index():08d}", said)

    def hear(self, what: str, timeout_s: float) -> list[dict[str, Any]]:
        """What every process said.

        Raises:
            ConfigError: a process did not come in time.
            TuningError: one left before all had come.
        """
        try:
            missing = self._wait(timeout_s)
        except BaseException as error:  # Ctrl-C, above all
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._decide("left", f"{what} failed in process {jax.process_index()}: {first_line(error)}")
            raise
        late = (
            f"{what}: not every process came here; {timeout_s:g} s are waited at most, and process "
            f"{', '.join(map(str, missing[:8]))} was missing. All must tune, and enter the same results, in the same "
            "order"
        )
        kind, text = self._decide(*(("late", late) if missing else ("all came", "")))
        if kind != "all came":
            raise {"late": ConfigError, "left": TuningError}[kind](text)
        if jax.process_index() == 0:  # all are here, so none reads what was said before
            self.client.key_value_delete(f"ejkernel_ops/{self.number - 1}/")
        return [json.loads(text) for name, text in sorted(self._here().items()) if name.isdigit()]

    def _wait(self, timeout_s: float) -> list[int]:
        """Waits until all have come, a verdict is there or the time is over; who is missing then."""
        deadline = time.monotonic() + timeout_s
        while True:
            here = self._here()
            missing = [index for index in range(jax.process_count()) if f"{index:08d}" not in here]
            left = deadline - time.monotonic()
            if not missing or "verdict" in here or left <= 0:
                return missing
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # not yet; what is worse the next look meets
                name = f"{self.folder}{missing[0]:08d}"
                self.client.blocking_key_value_get_bytes(name, round(min(left, _SLICE_S) * 1e3) + 1)

    def _decide(self, *verdict: str) -> tuple[str, str]:
        """The verdict that was given first, by whomever: one that comes too late meets that of those who left."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is one
            self._put("verdict", verdict)
        kind, text = json.loads(self.client.key_value_try_get_bytes(f"{self.folder}verdict"))
        return kind, text

    def _here(self) -> dict[str, bytes]:
        return {name.rpartition("/")[2]: text for name, text in self.client.key_value_dir_get_bytes(self.folder)}

    def _put(self, name: str, data: Any) -> None:
        self.client.key_value_set_bytes(f"{self.folder}{name}", json.dumps(data).encode())


def _client() -> Any:
    """The client of the coordination service, which has no public name."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise UnsupportedError("there are several processes; call jax.distributed.initialize() first in each of them")
    return client
