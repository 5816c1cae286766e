"""Type variables of a kernel: its config and its output."""

from typing import TypeVar

Cfg = TypeVar("Cfg")
"""The type of a kernel's configs, as in `Kernel[Cfg, Out]`."""

Out = TypeVar("Out")
"""The type of what a kernel computes."""
