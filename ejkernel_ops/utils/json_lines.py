"""The line of a value in JSON text, for errors about what the value means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

_DECODER, _SPACE = json.JSONDecoder(), re.compile(r"[ \t\n\r]*")


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The line on which a value starts, from 1; of a value that is not there, that of what should hold it.

    Args:
        text: valid JSON.
        path: names and indices that lead to the value.
    """
    at = _past_space(text, 0)
    for step in path:
        found = next((start for name, start in _members(text, at) if name == step), None)
        if found is None:
            break
        at = found
    return text.count("\n", 0, at) + 1


def _members(text: str, at: int) -> Iterator[tuple[str | int, int]]:
    """The names or indices of the object or array at a position, and where the value of each starts."""
    if text[at] not in "{[":
        return
    named, index, at = text[at] == "{", 0, _past_space(text, at + 1)
    while text[at] not in "}]":
        name = index
        if named:
            name, at = _DECODER.raw_decode(text, at)
            at = _past_space(text, _past_space(text, at) + 1)  # a colon
        yield name, at
        _, at = _DECODER.raw_decode(text, at)
        at = _past_space(text, at)
        if text[at] == ",":
            at = _past_space(text, at + 1)
        index += 1


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
