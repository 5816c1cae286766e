"""Multi-head attention for Equinox."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ejkernel_ops import AttentionConfig
from ejkernel_ops.kernels import ATTENTION

from ..fallback import no_kernel, no_type
from ..functional import at_path, attend
from .dropout import dropout_key
from .pinned import Pinned


class MultiheadAttention(Pinned, eqx.nn.MultiheadAttention):
    """`eqx.nn.MultiheadAttention` whose attention is a tunable kernel; same parameters, same leaves, same results.

    Takes all of the stock constructor's arguments; the projections are stock layers until `swap` replaces them. Under
    `jax.vmap`, nested or not, a batch is one kernel call. Queries that may see no key give 0, where Equinox gives the
    mean of the values. Dropout draws other bits than Equinox's, as many and for each head its own; one with a
    probability that is an array runs as Equinox's own.

    Args:
        *args: as `eqx.nn.MultiheadAttention`.
        config: back end and tile sizes of the attention; what it leaves open is chosen.
        backend: back end, or `None` for the best one.
        reproducible: whether gradients of attention are the same bits in each run; `False` allows sums in any order.
        **kwargs: as `eqx.nn.MultiheadAttention`.

    Raises:
        ConfigError: a config of another type or for another back end.
        TypeError: a `reproducible` that is no bool.

    Example:
        >>> import jax
        >>> layer = MultiheadAttention(2, 8, key=jax.random.key(0))
        >>> x = jax.random.normal(jax.random.key(1), (4, 3, 8))
        >>> jax.vmap(layer)(x, x, x).shape
        (4, 3, 8)
    """

    reproducible: bool = eqx.field(default=True, static=True, kw_only=True)

    config_type, kernel_of_layer = AttentionConfig, ATTENTION

    def __init__(
        self,
        *args: Any,
        config: AttentionConfig | None = None,
        backend: str | None = None,
        reproducible: bool = True,
        **kwargs: Any,
    ):
        self.reproducible = reproducible
        super().__init__(*args, config=config, backend=backend, **kwargs)

    def __call__(
        self,
        query: Float[Array, "q_seq query_size"],
        key_: Float[Array, "kv_seq key_size"],
        value: Float[Array, "kv_seq value_size"],
        mask: Shaped[Array, "q_seq kv_seq"] | Shaped[Array, "num_heads q_seq kv_seq"] | None = None,
        *,
        key: Any = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable | None = None,
    ) -> Float[Array, "q_seq output_size"]:
        """Attention of queries to keys.

        Args:
            query: `(q_seq, query_size)`.
            key_: `(kv_seq, key_size)`.
            value: `(kv_seq, value_size)`.
            mask: `(q_seq, kv_seq)` or `(num_heads, q_seq, kv_seq)`; what is not 0 or False may be seen.
            key: for dropout.
            inference: whether dropout is off; default what the module says.
            deterministic: the same, deprecated by Equinox.
            process_heads: makes of queries, keys and values `(seq, num_heads, size)` others of the same shapes.

        Returns:
            `(q_seq, output_size)`.

        Raises:
            ValueError: shapes that do not fit, or dropout without a key.
        """
        if deterministic is not None:
            warnings.warn("deterministic= is deprecated by Equinox: pass inference=", stacklevel=2)
            inference = deterministic
        _check_inputs(query=query, key_=key_, value=value)
        key, stock = dropout_key(self.dropout, key, inference), super().__call__

        def run_stock(reason):
            options = {"key": key, "inference": key is None, "process_heads": process_heads}
            return self._stock(reason, stock, query, key_, value, mask, **options)

        if key is not None and (reason := _no_dropout(self.dropout)):
            return run_stock(reason)
        inputs = ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        heads = tuple(jax.vmap(layer)(x).reshape(len(x), self.num_heads, -1) for layer, x in inputs)
        heads = heads if process_heads is None else _processed(process_heads, heads)
        dtype = jnp.result_type(*heads)
        if reason := no_type(dtype):
            return run_stock(reason)
        with at_path(self.kernel_path):
            out = attend(
                *(x.astype(dtype) for x in heads), mask=_checked_mask(mask, self.num_heads, len(query), len(key_)),
                dropout_rate=0.0 if key is None else self.dropout.p, dropout_rng=key, config=self.config,
                backend=self.backend, deterministic=self.reproducible,
            )  # fmt: skip
        return jax.vmap(self.output_proj)(out.reshape(len(query), math.prod(out.shape[1:])))

    @classmethod
    def why_not(cls, module: eqx.nn.MultiheadAttention) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        weights = {f"{n}.weight": getattr(getattr(module, n), "weight", None) for n in ("query_proj", "key_proj")}
        return no_kernel(**{name: weight for name, weight in weights.items() if eqx.is_array_like(weight)})

    @classmethod
    def when_not(cls, module: eqx.nn.MultiheadAttention) -> str | None:
        """When a module of ours computes as the stock one, as far as its fields say; `None` if never."""
        return cls.why_not(module) or _no_dropout(module.dropout)


def _no_dropout(dropout: eqx.nn.Dropout) -> str | None:
    """Why no kernel drops probabilities as a module of Equinox does; `None` where one does."""
    return None if isinstance(dropout.p, (int, float)) else "dropout with a p that is an array"


def _check_inputs(**inputs: Any) -> None:
    """Refuses inputs with other axes, and values of another length than the keys."""
    for name, x in inputs.items():
        if jnp.ndim(x) != 2:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; expected (length, size): for a batch use jax.vmap")
    if len(inputs["key_"]) != len(inputs["value"]):
        raise ValueError(f"key_ has {len(inputs['key_'])} tokens and value {len(inputs['value'])}; expected as many")


def _processed(process_heads: Callable, heads: tuple) -> tuple:
    """What a user's function makes of the heads."""
    made = tuple(process_heads(*heads))
    for name, old, new in zip(("queries", "keys", "values"), heads, made, strict=True):
        if new.shape != old.shape:
            raise ValueError(f"process_heads made {name} of shape {new.shape}; expected that of before, {old.shape}")
    return made


def _checked_mask(mask: Any, num_heads: int, q_seq: int, kv_seq: int) -> Any:
    """A mask of one of the two shapes that Equinox takes: no axis broadcasts."""
    if mask is None:
        return None
    mask, shape = jnp.asarray(mask), (q_seq, kv_seq)
    if mask.shape not in (shape, (num_heads, *shape)):
        raise ValueError(f"mask has shape {mask.shape}; expected {shape}, or by head {(num_heads, *shape)}")
    return mask
