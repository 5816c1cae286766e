"""`rotary_embedding`: checks its arguments, puts them in canonical form, calls the kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...execution.executor import default_executor
from ..config import as_array, canonical_precision, explicit_config, static_number
from .kernels import ROTARY, RotaryConfig
from .scaling import RotaryScaling


def rotary_embedding(
    x: Float[Array, "*batch length heads head_dim"],
    positions: Int[Array, "*#batch length"],
    *,
    theta: float = 10000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
    precision: Any = None,
    config: RotaryConfig | None = None,
    backend: str | None = None,
    cfg: RotaryConfig | None = None,
) -> Float[Array, "*batch length heads head_dim"]:
    """Turns pairs of features of queries or keys by angles that grow with the position of the token.

    Pair `i` of `d` turned features turns by `position * theta ** (-2 * i / d)` radians, so that the product of a query
    and a key depends on the difference of their positions alone. Frequencies are rounded once to float32 (float64 for
    float64 inputs); angles and the rotation are computed in that type, and the result is rounded once to that of `x`.
    An angle is off by at most `2 ** -23` of itself: 0.001 radians at 10 thousand, 0.1 at a million. Positions are exact
    up to `2 ** 24`. Differentiable in `x`: the gradient is turned back.

    Args:
        x: `(batch, length, heads, head_dim)`, or with any number of axes before `length`.
        positions: of each token, in tokens: `(length,)`, or `(batch, length)`, where a 1 stands for any batch. They may
            start anywhere, start again (packed sequences), and be negative.
        theta: the base of the frequencies, above 1.
        fraction: the part of `head_dim` that is turned, its first features; an even number of them. The others stay.
        interleaved: pairs are features `(2 * i, 2 * i + 1)`, as in RoFormer and GPT-J; otherwise `(i, i + d / 2)`, as
            in GPT-NeoX and Llama.
        scaling: of the frequencies, for sequences longer than those of the training.
        precision: taken as all ops take it; there is no product that it could change.
        config: back end and tile sizes; what it leaves open is chosen.
        backend: `"triton"`, `"xla"`, or `None` for the best one.
        cfg: another spelling of `config`.

    Returns:
        Shape and type of `x`.

    Raises:
        ValueError: shapes that do not fit, a number out of its range, a fraction that is no even number of features.
        TypeError: `x` is no float array, `positions` no int array, or an option is of the wrong type.
        ConfigError: a config of another type, or with a field that its back end lacks; both `config` and `cfg`.
        UnsupportedError: a back end that cannot do the call.

    Example:
        >>> import jax.numpy as jnp
        >>> query = jnp.ones((1, 3, 2, 4))
        >>> rotary_embedding(query, jnp.arange(3))[0, 0, 0].tolist()
        [1.0, 1.0, 1.0, 1.0]

    Source: RoFormer, Su et al. 2021, arXiv:2104.09864; scaling: see `RotaryScaling`.
    """
    x = as_array("x", x)
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; expected (batch, length, heads, head_dim)")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}; expected a float type")
    theta = static_number("theta", theta)
    if not 1 < theta < math.inf:
        raise ValueError(f"theta is {theta}; expected a finite number above 1")
    if not isinstance(interleaved, (bool, np.bool_)):
        raise TypeError(f"interleaved is {interleaved!r}; expected True (pairs are neighbours) or False (halves)")
    features = _turned_features(static_number("fraction", fraction), x.shape[-1])
    _check_scaling(scaling, features)
    canonical_precision(precision)
    canonical = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    out = default_executor()(
        ROTARY, canonical, _token_positions(positions, x.shape[:-2]), theta=theta, features=features,
        interleaved=bool(interleaved), scaling=scaling, cfg=explicit_config(RotaryConfig, config, cfg, backend),
    )  # fmt: skip
    return out.reshape(x.shape)


def _turned_features(fraction: float, head_dim: int) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; expected a part of the features, above 0 and at most 1")
    features = round(fraction * head_dim)
    if features < 2 or features % 2 or not math.isclose(features, fraction * head_dim):
        if fraction == 1:
            raise ValueError(f"x has a head_dim of {head_dim}; expected an even one, or a fraction of it that is even")
        raise ValueError(
            f"fraction is {fraction}, which makes {fraction * head_dim:g} of {head_dim} features; expected an even "
            "number: they turn in pairs"
        )
    return features


def _check_scaling(scaling: Any, features: int) -> None:
    if scaling is not None and not isinstance(scaling, RotaryScaling):
        raise TypeError(f"scaling is {scaling!r}; expected a RotaryScaling or None")
    if scaling is not None and scaling.kind == "ntk" and features == 2:
        raise ValueError("scaling is 'ntk' for 2 turned features, whose one frequency it leaves; use 'linear'")


def _token_positions(positions: Any, tokens: tuple[int, ...]) -> jax.Array:
    """Positions as `(batch, length)`, or `(1, length)` where all examples share them."""
    positions = as_array("positions", positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions is {positions.dtype}; expected an int type: positions are numbers of tokens")
    shape = positions.shape
    full = (1,) * (len(tokens) - len(shape)) + shape
    fits = len(full) == len(tokens) and all(n in (1, want) for n, want in zip(full, tokens))
    if not shape or not fits or shape[-1] != tokens[-1]:
        hint = "; for one position of each example pass positions[:, None]" if shape == tokens[:-1] else ""
        raise ValueError(f"positions has shape {shape}; expected {tokens[-1:]} or what broadcasts to {tokens}{hint}")
    if math.prod(full[:-1]) == 1:
        return positions.reshape(1, tokens[-1])
    return jnp.broadcast_to(positions, tokens).reshape(math.prod(tokens[:-1]), tokens[-1])
