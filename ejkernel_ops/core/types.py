"""Type variables of a kernel: its config and its output."""

from typing import TypeVar

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")
