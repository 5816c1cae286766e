"""Activations by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}


def check_activation(name: str | None) -> str | None:
    """Refuses names that are not known."""
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; expected None or one of {', '.join(ACTIVATIONS)}")
    return name


def derivative(name: str, x: jax.Array) -> jax.Array:
    """The derivative of an activation at `x`."""
    return jax.jvp(ACTIVATIONS[name], (x,), (jnp.ones_like(x),))[1]
