"""What the tests of attention share: how a call is run and judged, and calls in which a mask hides something."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import AttentionConfig, BwdParams, FwdParams, flash_attention

from .reference import assert_as_good_as_plain, attention, is_low


@functools.partial(jax.jit, static_argnames="statics")
def run(floats, others, cotangents, statics):
    """Output, log-sum-exp and the gradient of each array of `floats`."""

    def attend(floats):
        return flash_attention(**floats, **others, **dict(statics), return_lse=True)

    (out, lse), pull = jax.vjp(attend, floats)
    return {"out": out, "lse": lse, **pull(cotangents)[0]}


def blocks(fwd_q, fwd_kv, bwd_q, bwd_kv):
    fwd, bwd = FwdParams(q_blocksize=fwd_q, kv_blocksize=fwd_kv), BwdParams(q_blocksize=bwd_q, kv_blocksize=bwd_kv)
    return AttentionConfig(backend="xla", fwd=fwd, bwd=bwd)


ODD = blocks(4, 5, 5, 4)


def static(config=ODD, **options):
    """Static arguments of `run`, equal ones in equal order."""
    return (("config", config), *sorted(options.items()))


def inputs(lengths, heads=(4, 2), dims=(8, 8), dtype=np.float32, batch=2, seed=0):
    """Random query, key and value, and a random generator for the rest."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (batch, lengths[0], heads[0], dims[0]),
        "key": (batch, lengths[1], heads[1], dims[0]),
        "value": (batch, lengths[1], heads[1], dims[1]),
    }
    return {n: rng.normal(size=s).astype(jnp.dtype(dtype)) for n, s in shapes.items()}, rng


def cotangents_of(floats, rng):
    """Random cotangents of output and log-sum-exp."""
    query, value = floats["query"], floats["value"]
    dout = rng.normal(size=(*query.shape[:3], value.shape[3])).astype(query.dtype)
    return dout, rng.normal(size=query.shape[:3]).astype(np.promote_types(np.float32, query.dtype))


QKV = ("query", "key", "value")


def judge(floats, rng, others=None, config=ODD, constants=(), repeats=None, **options):
    """Checks attention and its gradients against the reference; returns the results for the arrays that were given.

    The same program first runs for a few more queries, keys and values: errors of a few numbers compare badly.
    """
    others, results, dtype = others or {}, [], floats["query"].dtype
    known = {n: v for n, v in options.items() if n != "precision"}
    more = (repeats or (8 if is_low(dtype) else 2)) - 1
    drawn = [{n: rng.normal(size=floats[n].shape).astype(dtype) for n in QKV} for _ in range(more)]
    for arrays in [*(floats | d for d in drawn), floats]:
        dout, dlse = cotangents_of(arrays, rng)
        wanted = {n: x for n, x in arrays.items() if n not in constants}
        fixed = others | {n: arrays[n] for n in constants}
        got = run(wanted, fixed, (dout, dlse), static(config, **options))
        exact, plain = (attention(arrays, dout=dout, dlse=dlse, **known, **others, plain=p) for p in (False, True))
        results.append((got, exact, plain))
    stacked = [{n: np.stack([r[n] for r in column]) for n in got} for column in zip(*results)]
    assert_as_good_as_plain(*stacked, dtype)
    return got


# Calls in which a mask hides something


def at(shape, index, value, rest, dtype):
    """An array that has one value at an index and another elsewhere."""
    array = np.full(shape, rest, dtype)
    array[index] = value
    return array


ALL_MASKS = dict(causal=True, config=ODD)  # of the one program that many tests share


def neutral(**given):
    """Arguments that use every mask there is, in which only those given hide something."""
    others = {
        "mask": np.ones((2, 4, 6, 9), bool),
        "q_segment_ids": np.zeros((2, 6), np.int32),
        "kv_segment_ids": np.zeros((2, 9), np.int32),
        "kv_lengths": np.full(2, 9, np.int32),
        "q_offset": np.full(2, 9, np.int32),
    }
    floats, rng = inputs((6, 9))
    floats["bias"] = rng.normal(size=(2, 4, 6, 9)).astype(np.float32)
    for name, value in given.items():
        (floats if name in floats else others)[name] = value
    return floats, rng, others


NO_IDS = dict(q_segment_ids=np.full((2, 6), -1, np.int32), kv_segment_ids=np.full((2, 9), -1, np.int32))
EMPTY = {  # what leaves nothing to see, and to which rows
    "mask of all": (dict(mask=np.zeros((2, 4, 6, 9), bool)), np.s_[:]),
    "mask of a row": (dict(mask=at((2, 4, 6, 9), np.s_[:, :, 3], False, True, bool)), np.s_[:, 3]),
    "mask of a head": (dict(mask=at((2, 4, 6, 9), np.s_[:, 1], False, True, bool)), np.s_[:, :, 1]),
    "kv_lengths of 0": (dict(kv_lengths=np.array([0, 9], np.int32)), np.s_[:1]),
    "q_segment_ids": (dict(q_segment_ids=at((2, 6), np.s_[:, 4:], -1, 0, np.int32)), np.s_[:, 4:]),
    "kv_segment_ids": (dict(kv_segment_ids=at((2, 9), np.s_[1], -2, 0, np.int32)), np.s_[1:]),
    "equal negative ids": (NO_IDS, np.s_[:]),
    "q_offset": (dict(q_offset=np.array([-3, 9], np.int32)), np.s_[:1, :3]),
    "bias of -inf": (dict(bias=at((2, 4, 6, 9), np.s_[:, :, 2], -np.inf, 0, np.float32)), np.s_[:, 2]),
}


HIDDEN = {  # which keys, and what hides them
    "kv_lengths": (np.s_[:, 7:], dict(kv_lengths=np.array([7, 7], np.int32))),
    "kv_segment_ids": (np.s_[0, 2:5], dict(kv_segment_ids=at((2, 9), np.s_[0, 2:5], -1, 0, np.int32))),
    "mask": (np.s_[:, 3], dict(mask=at((2, 4, 6, 9), np.s_[..., 3], False, True, bool))),
    "mask of a key head": (np.s_[:, 3, 1], dict(mask=at((2, 4, 6, 9), np.s_[:, 2:, :, 3], False, True, bool))),
    "causal": (np.s_[0, 6:], dict(q_offset=np.array([0, 9], np.int32))),
}
