"""Text that is damaged at random, from a seed; and how often: few times among the tests, many times in `make fuzz`."""

import random

import pytest


def counts(few, many):
    """Runs a test with `few`, and in the fuzz lane with `many`."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.fuzz)])


def _cut(rng, raw):
    return raw[: rng.randrange(len(raw))]


def _cut_out(rng, raw):
    start = rng.randrange(len(raw))
    return raw[:start] + raw[start + rng.randrange(1, 40) :]


def _flip(rng, raw):
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng, raw):
    start = rng.randrange(len(raw))
    noise = rng.randbytes(rng.randrange(1, 40))
    return raw[:start] + noise + raw[start + len(noise) :]


def _insert(rng, raw):
    start = rng.randrange(len(raw))
    return raw[:start] + rng.choice([b"[", b"\0", b"1e999", b"NaN", b'"', b"{}", b"\xff", b"9" * 5000]) + raw[start:]


MUTATORS = (_cut, _cut_out, _flip, _overwrite, _insert)


def damaged(raw, count, seed=0):
    """`count` damaged versions of some bytes."""
    rng = random.Random(seed)
    for number in range(count):
        yield MUTATORS[number % len(MUTATORS)](rng, raw)


ODD = (
    None,
    True,
    False,
    0,
    -1,
    3,
    1 << 70,
    1.5,
    "",
    "2",
    "../../x",
    [],
    [1],
    {},
    {"x": 1},
    {"backend": "xla"},
    "(,f8",
    "(2,3)f4",
    {"dtype": "(2,3)f4"},
    {"array": ["(,f8", [2], False]},
    {"scalar": ["(2,)f4", "1"]},
)


def altered(data, count, seed=0):
    """`count` versions of JSON data in which one value, at any depth, is another or missing."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _altered(rng, data)


def _altered(rng, data):
    names = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    if not names or rng.random() < 0.2:
        return rng.choice(ODD)
    changed, name = data.copy(), rng.choice(names)
    if rng.random() < 0.1:
        del changed[name]
    else:
        changed[name] = _altered(rng, changed[name])
    return changed
