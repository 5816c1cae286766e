"""What the Triton kernels of attention are told of masks and segment ids, against the whole matrix of what is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.kernels.attention.triton_seen import keys_seen, packed, queries_seen

pytestmark = pytest.mark.once

HEADS, KV_HEADS, Q_LEN, KV_LEN = 4, 2, 75, 110
Q, K = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None, :]
MATRICES = {
    "causal": K <= Q + 20, "window": (K <= Q + 20) & (K >= Q), "padded right": K < 70 + 0 * Q,
    "padded left": K >= 41 + 0 * Q, "a gap": (K < 30) | (K >= 100) & (Q >= 0), "all": K >= 0 * Q,
    "none": K < 0 * Q, "corner": (K >= 96) & (Q < 16), "all but a key": (K != 18) & (Q >= 0),
    "all but a query": (Q != 70) & (K >= 0),
}  # fmt: skip
SHAPES = [(2, HEADS, Q_LEN, KV_LEN), (1, 1, Q_LEN, KV_LEN), (2, 1, 1, KV_LEN), (1, HEADS, Q_LEN, 1), (1, 1, 1, 1)]


def masks():
    for name, matrix in MATRICES.items():
        yield name, matrix[None, None]
    for shape in SHAPES:
        for share in (0.03, 0.97):
            yield f"{share} of {shape}", np.random.default_rng(len(shape)).random(shape) < share


MASKS = dict(masks())


def arrays_of(mask=None, ids=(None, None)):
    query, key = np.zeros((2, Q_LEN, HEADS, 8), np.float32), np.zeros((2, KV_LEN, KV_HEADS, 8), np.float32)
    return (query, key, key, None, mask, None, *ids, None, None, None)


def whole(seen):
    """`(batch, head, query, key)`."""
    return np.broadcast_to(seen, (2, HEADS, Q_LEN, KV_LEN))


def tiled(x, blocks, fill):
    """`(batch, head, row blocks, column blocks, ...)`."""
    pads = [(0, -n % block) for n, block in zip(x.shape[2:], blocks)]
    x = np.pad(x, ((0, 0), (0, 0), *pads), constant_values=fill)
    return x.reshape(*x.shape[:2], -1, blocks[0], x.shape[3] // blocks[1], blocks[1]).swapaxes(3, 4)


def assert_nothing_is_lost(ranges, some, clean):
    """Every tile in which something is seen is met, and what is called whole is `clean`; returns the four limits."""
    ranges = np.broadcast_to(ranges, (*some.shape[:3], ranges.shape[3]))
    places = np.arange(some.shape[3])
    first, last, inner, outer = (ranges[..., n, None] for n in range(4))
    assert not np.any(some & ((places < first) | (places >= last)))
    assert np.all(clean | (places < inner) | (places >= outer))
    return first, last, inner, outer


def assert_ranges(ranges, seen, clean, blocks):
    """Nothing is lost, and the ranges of a mask are as close as they can be, by row heads."""
    some = tiled(seen, blocks, False).any((4, 5))
    clean = tiled(clean, blocks, True).all((4, 5))
    first, last, inner, outer = assert_nothing_is_lost(ranges, some, clean)
    found, places = some.any(-1), np.arange(some.shape[-1])
    spanned = (clean & (places >= first) & (places < last)).reshape(-1, len(places))
    runs = np.array([_first_or_last_run(row) for row in spanned])
    np.testing.assert_array_equal(np.maximum(outer - inner, 0).reshape(-1), runs)
    np.testing.assert_array_equal(first[..., 0][found], some.argmax(-1)[found])
    np.testing.assert_array_equal(last[..., 0][found], (len(places) - some[..., ::-1].argmax(-1))[found])


def _first_or_last_run(row):
    """The length of the longer of the two."""
    runs = [len(run) for run in "".join("x" if x else " " for x in row).split()]
    return max(runs[0], runs[-1]) if runs else 0


@pytest.mark.parametrize("blocks", [(16, 16), (32, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_told_by_bits_hidden_keys_and_ranges(name, blocks):
    mask = MASKS[name]
    matrix = whole(mask)
    by_group = matrix.reshape(2, KV_HEADS, HEADS // KV_HEADS, Q_LEN, KV_LEN)
    hidden = ~by_group.any((2, 3))
    lse = np.where(matrix.any(3), 0.0, -np.inf).astype(np.float32).swapaxes(1, 2)

    @jax.jit
    def told(mask):
        both = keys_seen(arrays_of(mask), blocks), queries_seen(arrays_of(mask), lse, blocks)
        return [(seen.hidden, seen.ranges) for seen in both]

    (hides, for_queries), (also, for_keys) = told(mask)
    np.testing.assert_array_equal(np.broadcast_to(hides, hidden.shape), hidden)
    np.testing.assert_array_equal(also, hides)

    clean = np.broadcast_to(~np.repeat(hidden, HEADS // KV_HEADS, 1)[:, :, None], matrix.shape)
    assert_ranges(np.asarray(for_queries), matrix, clean, blocks)
    by_keys = by_group.any(2).swapaxes(2, 3)
    alive = by_group.any(4).all(2)  # (batch, key head, query)
    assert_ranges(np.asarray(for_keys), by_keys, np.broadcast_to(alive[:, :, None], by_keys.shape), blocks[::-1])

    every = tiled(matrix, blocks, True).all((4, 5))
    assert_bits(for_queries, every, matrix.shape[3] // blocks[1])
    every = tiled(by_group.all(2).swapaxes(2, 3), blocks[::-1], True).all((4, 5))
    assert_bits(for_keys, every, matrix.shape[2] // blocks[0])


def assert_bits(ranges, every, full_blocks):
    """The bits after the ranges are those of full blocks of columns."""
    words = np.asarray(ranges)[..., 4:, None].astype(np.uint32)
    bits = (words >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
    bits = np.broadcast_to(bits.reshape(*bits.shape[:3], -1), (*every.shape[:3], bits.shape[3] * 32))
    np.testing.assert_array_equal(bits[..., :full_blocks], every[..., :full_blocks])


@pytest.mark.parametrize("axis", [2, 3])
def test_bits_of_words_are_those_of_the_mask(axis):
    for mask in MASKS.values():
        words = np.asarray(packed(jnp.asarray(mask), axis))
        bits = (np.moveaxis(words, axis, -1)[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
        bits = np.moveaxis(bits.reshape(*bits.shape[:3], -1), -1, axis)
        size = mask.shape[axis]
        assert np.all(bits == mask) if size == 1 else np.array_equal(np.take(bits, range(size), axis), mask)
        assert size == 1 or not np.take(bits, range(size, bits.shape[axis]), axis).any()


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32)], ids=str)
def test_segments_are_told_by_ranges(blocks):
    rng = np.random.default_rng(0)
    ids = [np.sort(rng.integers(-1, 1, (2, n)).astype(np.int32), 1) for n in (Q_LEN, KV_LEN)]
    matrix = whole(((ids[0][:, :, None] == ids[1][:, None]) & (ids[0] >= 0)[:, :, None])[:, None])
    ranges = np.asarray(keys_seen(arrays_of(ids=ids), blocks).ranges)
    some = tiled(matrix, blocks, False).any((4, 5))
    every = tiled(matrix, blocks, False).all((4, 5))
    *_, inner, outer = assert_nothing_is_lost(ranges, some, every)
    assert (outer - np.minimum(inner, outer)).sum() > 0
