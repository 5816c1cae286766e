"""Arguments of layers that are refused where a layer is made, in all frameworks."""

from __future__ import annotations

from typing import Any

from ejkernel_ops.kernels.activations import ACTIVATIONS

from .rotary import Rotary


def check_rotary(rotary: Any) -> None:
    """Refuses what is no rotary embedding, such as `True`.

    Raises:
        TypeError: another type.
    """
    if rotary is not None and not isinstance(rotary, Rotary):
        raise TypeError(f"rotary is {rotary!r}; expected an ejlayers.Rotary, such as ejlayers.Rotary(), or None")


def check_rate(name: str, rate: Any) -> None:
    """Refuses a number that is no rate of dropout; an array of Equinox may be anything.

    Raises:
        ValueError: a rate below 0 or above 1.
    """
    if isinstance(rate, (int, float)) and not 0 <= rate <= 1:
        raise ValueError(f"{name} is {rate}; expected between 0 and 1, the part that is dropped")


def check_gate(activation: Any) -> None:
    """Refuses what is no name of an activation.

    Raises:
        ValueError: another value.
    """
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}")
