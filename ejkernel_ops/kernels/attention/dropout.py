"""The keep bits of dropout: Philox4x32-10 of (seed, head, query, key), equal on every back end.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WORDS = 5  # of a seed: two of the key, and the numbers of the first head, query and four keys that a device has
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

    The four words of a Philox call go to keys `4 i` to `4 i + 3`. Each key makes all four here and takes its own: XLA
    makes vector code of that, where four arrays of words that are put side by side take ten times as long.

    Args:
        seed: `(batch, WORDS)` uint32, of each example.
        heads: `(kv_heads, group)` head numbers.
        rows: `(q_block,)` query numbers.
        start: number of the first key, a scalar.
        count: number of keys.
        rate: probability of being dropped.

    Returns:
        `(batch, kv_heads, group, q_block, count)` bool.
    """
    u32 = jnp.uint32
    keys = jnp.asarray(start).astype(u32) + jnp.arange(count, dtype=u32)
    shape = (seed.shape[0], *heads.shape, rows.shape[0], count)

    def spread(x, *axes):
        return jnp.broadcast_to(jnp.expand_dims(x.astype(u32), axes), shape)

    k0, k1, first_head, first_row, first_quad = (spread(seed[:, i], 1, 2, 3, 4) for i in range(WORDS))
    rows, heads = spread(rows, 0, 1, 2, 4) + first_row, spread(heads, 0, 3, 4) + first_head
    counter = (spread(keys // u32(4), 0, 1, 2, 3) + first_quad, rows, heads, jnp.zeros(shape, u32))
    first, second, third, fourth = philox(counter, (k0, k1))
    place = spread(keys % u32(4), 0, 1, 2, 3)
    word = jnp.where(place < 2, jnp.where(place == 0, first, second), jnp.where(place == 2, third, fourth))
    return word >= u32(min(int(rate * 2**32), 2**32 - 1))
