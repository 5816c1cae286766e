"""What several processes say to each other, so that all of them compile one program or all stop.

It goes through the coordination service of `jax.distributed` and not through the devices: nothing is compiled, no
collective of the user's can be met by one of ours, and who does not come is named after a while. One process fails by
sending its error, so that no other waits for it.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ..errors import ConfigError, TuningError, UnsupportedError
from .failures import first_line

T = TypeVar("T")
SOON_S, WORK_S = 600.0, 86400.0  # one who waits for others at the same line; one who waits for minutes of tuning
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
        TuningError: `work` raised in another process.
        ConfigError: another process is elsewhere, or did not come in time.
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
    """
    with _lock:
        if text in _compared:
            return
        _, texts = together(what, lambda: text, str)
        require_same(what, texts, hint)
        _compared.add(text)


def _exchange(what: str, said: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """What every process said, in the order of their numbers."""
    client, me = _client(), jax.process_index()
    with _lock:
        turn = next(_turns)
        name, before = f"ejkernel_ops/{turn}", f"ejkernel_ops/{turn - 1}"
        client.key_value_set_bytes(f"{name}/{me:08d}", json.dumps(said | {"what": what}).encode())
        try:
            client.wait_at_barrier(name, round(timeout_s * 1e3))
        except jax.errors.JaxRuntimeError as error:
            told = " ".join(str(error).split())[:400]
            raise ConfigError(
                f"{what}: not every process came here; {timeout_s:g} s are waited at most: {told}. All must tune, "
                "and enter the same results, in the same order"
            ) from None
        client.key_value_delete(f"{before}/{me:08d}")  # all are here, so all have read it
        found = [json.loads(text) for _, text in sorted(client.key_value_dir_get_bytes(f"{name}/"))]
    require_same("what is done", [other["what"] for other in found], "all must do the same in the same order")
    return found


def _client() -> Any:
    """The client of the coordination service, which has no public name."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise UnsupportedError("there are several processes; call jax.distributed.initialize() first in each of them")
    return client
