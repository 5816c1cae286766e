"""Dropout of attention in Equinox: a module says how much, a call with which key."""

from __future__ import annotations

from typing import Any

import equinox as eqx


def dropout_key(dropout: eqx.nn.Dropout, key: Any, inference: bool | None) -> Any:
    """The key with which probabilities are dropped; `None` where none are.

    Raises:
        ValueError: dropout is on, and there is no key.
    """
    inference = dropout.inference if inference is None else inference
    if inference or (isinstance(dropout.p, (int, float)) and dropout.p == 0):
        return None
    if key is None:
        raise ValueError(f"key is None and dropout is on, with p={dropout.p}; pass a PRNG key, or inference=True")
    return key
