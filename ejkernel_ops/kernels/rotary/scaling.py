"""`RotaryScaling`: frequencies for lengths beyond those of the training, and the formulas of all frequencies."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..config import static_number

_FIELDS: dict[str, dict[str, Any]] = {  # those that each kind has: the default; `...`: it must be given
    "linear": {"factor": ...},
    "ntk": {"factor": ...},
    "yarn": {"factor": ..., "original_length": ..., "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    "llama3": {"factor": ..., "original_length": ..., "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are made slower, so that a model takes longer sequences than it was trained with.

    Args:
        kind: `"linear"` divides all frequencies by `factor`; `"ntk"` raises `theta` so that the slowest one is
            divided by it; `"yarn"` and `"llama3"` divide the slow ones, leave the fast ones, and blend between.
        factor: by what frequencies are divided, at least 1.
        original_length: tokens that the model was trained with (`original_max_position_embeddings`); `"yarn"` and
            `"llama3"` need it.
        beta_fast: `"yarn"` leaves what turns more often than this over `original_length`; default 32.
        beta_slow: `"yarn"` divides what turns less often than this; default 1.
        attention_factor: with `"yarn"` both cos and sin are multiplied by it; default `0.1 * ln(factor) + 1`.
        low_freq_factor: `"llama3"` divides what turns less often than this over `original_length`; default 1.
        high_freq_factor: `"llama3"` leaves what turns more often than this; default 4.

    Raises:
        ValueError: an unknown kind, a number out of its range, a field that the kind needs or does not have.
        TypeError: a field of the wrong type.

    Example:
        >>> RotaryScaling(kind="llama3", factor=8, original_length=8192).high_freq_factor
        4.0

    Source: linear: Chen et al. 2023, arXiv:2306.15595; ntk and yarn: Peng et al. 2023, arXiv:2309.00071; llama3: Llama
    team 2024, arXiv:2407.21783.
    """

    kind: str
    factor: float
    original_length: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self):
        if self.kind not in list(_FIELDS):
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(_FIELDS)}")
        own = _FIELDS[self.kind]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in own and value is not None:
                raise ValueError(f"{field.name} is {value!r}, which {self.kind!r} scaling does not have; leave it out")
            value = own.get(field.name) if value is None else value
            if value is ...:
                raise ValueError(f"{field.name} is None; {self.kind!r} scaling needs it")
            object.__setattr__(self, field.name, None if value is None else _positive(field.name, value))
        if self.factor < 1:
            raise ValueError(f"factor is {self.factor}; expected at least 1: it divides frequencies")
        for less, more in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if less in own and not getattr(self, less) < getattr(self, more):
                raise ValueError(f"{less} is {getattr(self, less)}; expected less than {more}, {getattr(self, more)}")


def _positive(name: str, value: Any) -> int | float:
    if name == "original_length":
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} is {value!r}; expected an int, a number of tokens")
        number: int | float = int(value)
    else:
        number = static_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {number}; expected a positive, finite number")
    return number


def frequencies(theta: float, features: int, scaling: RotaryScaling | None) -> tuple[np.ndarray, float]:
    """The angle of each pair of features for one step of position, in float64, and the factor of cos and sin."""
    exponents = np.arange(0, features, 2) / features
    if scaling is None:
        return theta**-exponents, 1.0
    factor = scaling.factor
    if scaling.kind == "ntk":
        return (theta * factor ** (features / (features - 2))) ** -exponents, 1.0
    plain = theta**-exponents
    kept = {"linear": _none_kept, "yarn": _yarn_kept, "llama3": _llama3_kept}[scaling.kind](theta, plain, scaling)
    attention = 1.0
    if scaling.kind == "yarn":
        given = scaling.attention_factor
        attention = 0.1 * math.log(factor) + 1 if given is None else given
    return plain * (kept + (1 - kept) / factor), attention


# How much of each frequency is kept: 1 where it stays, 0 where it is divided by the factor


def _none_kept(theta: float, plain: np.ndarray, scaling: Any) -> np.ndarray:
    return np.zeros_like(plain)


def _yarn_kept(theta: float, plain: np.ndarray, scaling: Any) -> np.ndarray:
    def pair(turns: float) -> float:
        """The index of the pair that turns so often over the original length."""
        return len(plain) * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), 2 * len(plain) - 1)
    width = high - low or 0.001  # as in the published code, a step
    return 1 - np.clip((np.arange(len(plain)) - low) / width, 0, 1)


def _llama3_kept(theta: float, plain: np.ndarray, scaling: Any) -> np.ndarray:
    turns = scaling.original_length * plain / (2 * math.pi)
    return np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
