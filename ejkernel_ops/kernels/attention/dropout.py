"""The keep bits of dropout: Philox4x32-10 of (seed, head, query, key), equal on every back end.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _mul_hi_lo(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of a product of 32-bit numbers, in 32-bit arithmetic."""
    u32, low = jnp.uint32, jnp.uint32(0xFFFF)
    a_lo, a_hi, b_lo, b_hi = u32(a & 0xFFFF), u32(a >> 16), b & low, b >> 16
    first = a_lo * b_lo
    middle = a_hi * b_lo + (first >> 16)
    other = a_lo * b_hi + (middle & low)
    return a_hi * b_hi + (middle >> 16) + (other >> 16), u32(a) * b


def philox(counter: tuple[jax.Array, ...], key: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """Philox4x32 with 10 rounds: four words of counter and two of key to four random words, all uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        hi1, lo1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return c0, c1, c2, c3


def keep_bits(
    seed: jax.Array, heads: jax.Array, rows: jax.Array, start: jax.Array, count: int, rate: float
) -> jax.Array:
    """Which probabilities of a block are kept.

    Four keys share one Philox call: its words go to keys `4 i` to `4 i + 3`.

    Args:
        seed: `(batch, 3)` uint32, of each example two random words, and the number of its first head.
        heads: `(kv_heads, group)` head numbers, from that one on.
        rows: `(q_block,)` query numbers.
        start: number of the first key, a scalar.
        count: number of keys.
        rate: probability of being dropped.

    Returns:
        `(batch, kv_heads, group, q_block, count)` bool.
    """
    u32 = jnp.uint32
    start = jnp.asarray(start).astype(u32)
    quads = start // u32(4) + jnp.arange(count // 4 + 2, dtype=u32)
    shape = (seed.shape[0], *heads.shape, rows.shape[0], quads.shape[0])

    def spread(x, *axes):
        return jnp.broadcast_to(jnp.expand_dims(x.astype(u32), axes), shape)

    counter = (
        spread(quads, 0, 1, 2, 3),
        spread(rows, 0, 1, 2, 4),
        spread(heads, 0, 3, 4) + spread(seed[:, 2], 1, 2, 3, 4),
        jnp.zeros(shape, u32),
    )
    key = (spread(seed[:, 0], 1, 2, 3, 4), spread(seed[:, 1], 1, 2, 3, 4))
    words = jnp.stack(philox(counter, key), axis=-1).reshape(*shape[:-1], -1)
    words = jax.lax.dynamic_slice_in_dim(words, (start % u32(4)).astype(jnp.int32), count, axis=-1)
    return words >= u32(min(int(rate * 2**32), 2**32 - 1))
