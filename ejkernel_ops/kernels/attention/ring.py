"""Attention over a length that devices split: keys and values go around a ring, each device meets them part by part.

Parts of keys give parts of the output, which their log-sum-exps join. The gradient takes the joined ones: with them
each part of keys gives its part of the gradients, and those of keys and values go around with them. While a device
works on one part the next is on its way.

Causal calls share the work: of `2 n` chunks of the length a device takes one from the front and one from the back, so
that every part of keys costs each device the same two chunks of four, none of them masked but for its own. Other calls
take the length as it comes, and skip the parts of which a device sees nothing.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023, arXiv:2310.01889; the two chunks: Zhu,
"Ring attention", github.com/zhuzilin/ring-flash-attention, 2024, and Brandon et al., "Striped Attention", 2023,
arXiv:2311.09431.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from .config import compute_dtype

NAMES = (
    "query", "key", "value", "bias", "mask", "q_offset", "q_segment_ids", "kv_segment_ids", "kv_lengths", "sinks",
    "dropout_seed",
)  # fmt: skip
_OF_QUERIES = ("query", "q_segment_ids", "out", "lse", "dout", "dlse")  # whose second axis is that of queries
_OF_KEYS = ("key", "value", "kv_segment_ids")
Run = Callable[..., Any]  # the kernel on one device: operands by name, and statics


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices that split a length, and this one among them.

    Args:
        axes: the mesh axes that split it, the slowest first.
        mesh_axes: all of the mesh, in its order, in which JAX counts those who send and receive.
    """

    axes: tuple[str, ...]
    mesh_axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many they are."""
        return jax.lax.axis_size(self.axes)

    @property
    def index(self) -> jax.Array:
        """Which one this is."""
        return jax.lax.axis_index(self.axes)

    def passed_on(self, tree: Any) -> Any:
        """What the device before this one has."""
        return self.sent(tree, [(i, (i + 1) % self.count) for i in range(self.count)])

    def sent(self, tree: Any, pairs: list[tuple[int, int]]) -> Any:
        """What the device has that sends to this one, of pairs `(sender, receiver)`."""
        ordered = sorted(self.axes, key=self.mesh_axes.index)
        numbers = np.arange(self.count).reshape([jax.lax.axis_size(axis) for axis in self.axes])
        places = np.argsort(numbers.transpose([self.axes.index(axis) for axis in ordered]), axis=None)
        moves = [(int(places[a]), int(places[b])) for a, b in pairs]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, tuple(ordered), moves), tree)


# The order of chunks


def _places(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where the first and the second half of each device's part go."""

    def place(chunk: int) -> int:
        return chunk if chunk < count else 2 * count - 1 - chunk

    return [(i, place(2 * i)) for i in range(count)], [(i, place(2 * i + 1)) for i in range(count)]


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.split(x, 2, 1)  # type: ignore[return-value]


def to_both_ends(x: jax.Array, ring: Ring) -> jax.Array:
    """Of an array `(batch, length, ...)` the chunks `i` and `2 n - 1 - i` for device `i` of `n`, one after another."""
    first, second = _places(ring.count)
    even, odd = (ring.sent(half, p) for half, p in zip(_halves(x), (first, second)))
    is_even = ring.index % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], 1)


def from_both_ends(x: jax.Array, ring: Ring) -> jax.Array:
    """The length as it comes, of what `to_both_ends` gives."""
    low, high = _halves(x)
    is_even = ring.index % 2 == 0
    first, second = ([(b, a) for a, b in pairs] for pairs in _places(ring.count))
    even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
    return jnp.concatenate([ring.sent(even, first), ring.sent(odd, second)], 1)


# Parts of keys


def _positions_matter(statics: dict[str, Any]) -> bool:
    return statics["causal"] or statics["sliding_window"] is not None


def shares_work(x: dict[str, Any], statics: dict[str, Any]) -> bool:
    """Whether devices take chunks from both ends: of causal calls where nothing else depends on positions."""
    plain = statics["causal"] and statics["sliding_window"] is None and statics["static_offset"] == 0
    return plain and x["query"].shape[1] % 2 == 0 and all(x[n] is None for n in ("bias", "mask", "dropout_seed"))


def num_steps(x: dict[str, Any], statics: dict[str, Any], ring: Ring) -> int:
    """How many parts of keys a device meets: with a causal window only those before it that the window reaches."""
    window = statics["sliding_window"]
    if window is None or not statics["causal"] or statics["static_offset"] != 0:
        return ring.count
    length = x["key"].shape[1]
    return min(ring.count, 1 + -(-window[0] // length))


def _part(x: dict[str, Any], kv: dict[str, Any], statics: dict[str, Any], ring: Ring, source: Any) -> tuple[dict, dict]:
    """The operands of this device's queries and of the keys of device `source`, and the statics of that call."""
    q_len, kv_len = x["query"].shape[1], kv["key"].shape[1]
    found = {**x, **kv}
    for name in ("bias", "mask"):
        if x[name] is not None and x[name].shape[3] > 1:
            found[name] = jax.lax.dynamic_slice_in_dim(x[name], source * kv_len, kv_len, 3)
    if x["kv_lengths"] is not None:
        found["kv_lengths"] = jnp.clip(x["kv_lengths"] - source * kv_len, 0, kv_len)
    if (seed := x["dropout_seed"]) is not None:
        if kv_len % 4:
            raise UnsupportedError(
                f"dropout_rate is {statics['dropout_rate']}, and of the keys each device has {kv_len}; with dropout a "
                "length that devices split takes parts that are multiples of 4: pad the length"
            )
        found["dropout_seed"] = seed.at[:, 4].add((source * (kv_len // 4)).astype(seed.dtype))
    if _positions_matter(statics):
        offset = statics["static_offset"] if x["q_offset"] is None else x["q_offset"]
        first = offset + ring.index * q_len - source * kv_len
        batch = x["query"].shape[0]
        found["q_offset"] = jnp.broadcast_to(jnp.asarray(first, jnp.int32), (batch,))
        statics = statics | {"static_offset": None}
    return found, statics


def _sees_any(x: dict[str, Any], statics: dict[str, Any]) -> jax.Array:
    """Whether any query of a part may see any key, as far as positions, lengths and ids tell."""
    q_len, kv_len = x["query"].shape[1], x["key"].shape[1]
    seen = jnp.ones(x["query"].shape[0], bool)
    if _positions_matter(statics):
        left, right = statics["sliding_window"] or (None, None)
        right = 0 if statics["causal"] else right
        if right is not None:
            seen &= x["q_offset"] + q_len - 1 + right >= 0
        if left is not None:
            seen &= x["q_offset"] - left <= kv_len - 1
    if x["kv_lengths"] is not None:
        seen &= x["kv_lengths"] > 0
    if x["kv_segment_ids"] is not None:
        q_ids, kv_ids = x["q_segment_ids"], x["kv_segment_ids"]
        least = [jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids).min(1) for ids in (q_ids, kv_ids)]
        seen &= (least[0] <= kv_ids.max(1)) & (least[1] <= q_ids.max(1))
    return seen.any()


# Forward


@dataclasses.dataclass(frozen=True)
class Joined:
    """Output and log-sum-exp over the parts of keys so far, in the type of sums."""

    out: jax.Array
    lse: jax.Array

    @classmethod
    def start(cls, out: jax.Array, lse: jax.Array) -> Joined:
        """Of the first part."""
        return cls(out.astype(lse.dtype), lse)

    def plus(self, out: jax.Array, lse: jax.Array) -> Joined:
        """With a part more."""
        total = jnp.logaddexp(self.lse, lse)
        finite = jnp.where(total == -jnp.inf, 0.0, total)
        weights = [jnp.exp(part - finite)[..., None] for part in (self.lse, lse)]
        return Joined(self.out * weights[0] + out.astype(self.out.dtype) * weights[1], total)


jax.tree_util.register_dataclass(Joined, ["out", "lse"], [])


def forward(run: Run, ring: Ring, x: dict[str, Any], statics: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of this device's queries over the keys of all.

    Args:
        run: attention on one device, from operands by name and statics to output and log-sum-exp.
        ring: the devices that split the length.
        x: this device's parts of the operands, by name.
        statics: the static arguments.
    """
    sinks = x["sinks"]
    x = x | {"sinks": None}  # they count once, in the end
    given = x["query"]
    if balanced := shares_work(x, statics):
        x = {n: to_both_ends(a, ring) if n in (*_OF_QUERIES, *_OF_KEYS) and a is not None else a for n, a in x.items()}
    attend = _attend_balanced if balanced else _attend_in_order
    joined = attend(run, ring, x, statics)
    if sinks is not None:
        joined = joined.plus(
            jnp.zeros_like(joined.out), jnp.broadcast_to(sinks.astype(joined.lse.dtype), joined.lse.shape)
        )
    out, lse = joined.out.astype(given.dtype), joined.lse
    return (from_both_ends(out, ring), from_both_ends(lse, ring)) if balanced else (out, lse)


def _keys_of(x: dict[str, Any]) -> dict[str, Any]:
    return {name: x[name] for name in _OF_KEYS if x[name] is not None}


def _attend_in_order(run: Run, ring: Ring, x: dict[str, Any], statics: dict[str, Any]) -> Joined:
    def part(joined: Joined, kv: dict[str, Any], step: Any) -> Joined:
        found, options = _part(x, kv, statics, ring, (ring.index - step) % ring.count)
        return jax.lax.cond(_sees_any(found, options), lambda: joined.plus(*run(found, options)), lambda: joined)

    own = run(*_part(x, _keys_of(x), statics, ring, ring.index))
    return _around(ring, num_steps(x, statics, ring), Joined.start(*own), _keys_of(x), part)


def _attend_balanced(run: Run, ring: Ring, x: dict[str, Any], statics: dict[str, Any]) -> Joined:
    own = run(_whole_lengths(x, _keys_of(x), ring, ring.index), statics)

    def part(joined: Joined, kv: dict[str, Any], step: Any) -> Joined:
        source = (ring.index - step) % ring.count

        def before() -> Joined:  # its first chunk of keys is before all of these queries, its second after
            return joined.plus(*run(*_of_first_keys(x, kv, statics, ring, source)))

        def after() -> Joined:  # these queries' second chunk is after both of its chunks, their first before
            out, lse = run(*_of_last_queries(x, kv, statics, ring, source))
            first, second = (Joined(*halves) for halves in zip(*map(_halves, (joined.out, joined.lse))))
            return jax.tree.map(lambda *halves: jnp.concatenate(halves, 1), first, second.plus(out, lse))

        return jax.lax.cond(source < ring.index, before, after)

    return _around(ring, ring.count, Joined.start(*own), _keys_of(x), part)


def _around(ring: Ring, steps: int, joined: Joined, kv: dict, part: Callable[..., Joined]) -> Joined:
    """`joined = part(joined, kv, step)` for the steps after a device's own, in each of which other keys come by."""
    if steps == 1:
        return joined

    def step(state: Any, i: Any) -> tuple[Any, None]:
        joined, kv = state
        coming = ring.passed_on(kv)  # on its way while this device works on what it has
        return (part(joined, kv, i), coming), None

    state = joined, ring.passed_on(kv)
    if steps > 2:
        state, _ = jax.lax.scan(step, state, jnp.arange(1, steps - 1))
    return part(*state, steps - 1)


# Chunks of both ends


def _whole_lengths(x: dict[str, Any], kv: dict[str, Any], ring: Ring, source: Any) -> dict[str, Any]:
    """All of this device's queries and of `source`'s keys, with how many of those are valid."""
    if x["kv_lengths"] is None:
        return {**x, **kv}
    chunk = kv["key"].shape[1] // 2
    starts = source * chunk, (2 * ring.count - 1 - source) * chunk
    return {**x, **kv, "kv_lengths": sum(jnp.clip(x["kv_lengths"] - start, 0, chunk) for start in starts)}


def _of_first_keys(
    x: dict[str, Any], kv: dict[str, Any], statics: dict[str, Any], ring: Ring, source: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All queries, and the first chunk of keys, which they all see."""
    chunk = kv["key"].shape[1] // 2
    found = {**x, **{name: a[:, :chunk] for name, a in kv.items()}}
    if x["kv_lengths"] is not None:
        found["kv_lengths"] = jnp.clip(x["kv_lengths"] - source * chunk, 0, chunk)
    return found, statics | {"causal": False}


def _of_last_queries(
    x: dict[str, Any], kv: dict[str, Any], statics: dict[str, Any], ring: Ring, source: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second chunk of queries, and all keys, which they all see."""
    found = _whole_lengths(x, kv, ring, source)
    found |= {name: _halves(found[name])[1] for name in _OF_QUERIES if found.get(name) is not None}
    return found, statics | {"causal": False}


# Backward


def backward(run: Run, ring: Ring, x: dict[str, Any], statics: dict[str, Any]) -> dict[str, jax.Array]:
    """Gradients of this device's parts of the operands, by name; those that are wanted.

    Args:
        run: the gradients of attention on one device, from operands by name and statics to gradients by name.
        ring: the devices that split the length.
        x: this device's parts of the operands, output, log-sum-exp and cotangents, by name.
        statics: the static arguments.
    """
    given, balanced = x, shares_work(x, statics)
    moved = (*_OF_QUERIES, *_OF_KEYS)
    if balanced:
        x = {n: to_both_ends(a, ring) if n in moved and a is not None else a for n, a in x.items()}
    grads = (_gradients_balanced if balanced else _gradients_in_order)(run, ring, x, statics)
    if balanced:
        grads = {n: from_both_ends(g, ring) if n in moved else g for n, g in grads.items()}
    return {name: g.astype(given[name].dtype) for name, g in grads.items()}


def _gradients_in_order(run: Run, ring: Ring, x: dict[str, Any], statics: dict[str, Any]) -> dict[str, jax.Array]:
    def placed(made: dict[str, Any], source: Any) -> dict[str, Any]:
        """Gradients of a part of keys as those of the operands: a bias has all keys."""
        if "bias" not in made or x["bias"].shape[3] == 1:
            return made
        whole = jnp.zeros_like(made["bias"], shape=x["bias"].shape)
        first = source * made["bias"].shape[3]
        return made | {"bias": jax.lax.dynamic_update_slice_in_dim(whole, made["bias"], first, 3)}

    own = run(*_part(x, _keys_of(x), statics, ring, ring.index))
    staying, moving = _split_moving(_wide(placed(own, ring.index)))
    others = x | {"sinks": None}  # whose gradient is made

    def part(staying: dict, kv: dict, kv_grads: dict, step: Any) -> tuple[dict, dict]:
        source = (ring.index - step) % ring.count
        found, options = _part(others, kv, statics, ring, source)

        def gradients() -> tuple[dict, dict]:
            made = placed(run(found, options), source)
            return _plus(staying, made), _plus(kv_grads, made)

        return jax.lax.cond(_sees_any(found, options), gradients, lambda: (staying, kv_grads))

    return _around_and_home(ring, num_steps(x, statics, ring), staying, _keys_of(x), moving, part)


def _gradients_balanced(run: Run, ring: Ring, x: dict[str, Any], statics: dict[str, Any]) -> dict[str, jax.Array]:
    own = run(_whole_lengths(x, _keys_of(x), ring, ring.index), statics)
    staying, moving = _split_moving(_wide(own))
    others = x | {"sinks": None}  # whose gradient is made

    def part(staying: dict, kv: dict, kv_grads: dict, step: Any) -> tuple[dict, dict]:
        source = (ring.index - step) % ring.count

        def before() -> tuple[dict, dict]:
            made = run(*_of_first_keys(others, kv, statics, ring, source))
            return _plus(staying, made), _plus(kv_grads, made, half=0)

        def after() -> tuple[dict, dict]:
            made = run(*_of_last_queries(others, kv, statics, ring, source))
            return _plus(staying, made, half=1), _plus(kv_grads, made)

        return jax.lax.cond(source < ring.index, before, after)

    return _around_and_home(ring, ring.count, staying, _keys_of(x), moving, part)


def _wide(grads: dict[str, Any]) -> dict[str, jax.Array]:
    """Gradients in the type of sums."""
    return {name: g.astype(compute_dtype(g.dtype)) for name, g in grads.items()}


def _split_moving(grads: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that stay on this device, and those that go around with the keys."""
    moving = {name: grads[name] for name in ("key", "value") if name in grads}
    return {name: g for name, g in grads.items() if name not in moving}, moving


def _plus(sums: dict[str, Any], made: dict[str, Any], half: int | None = None) -> dict[str, Any]:
    """Sums with the gradients that a part made, of all of their length or of a half; the others as they are."""

    def plus(total: jax.Array, grad: jax.Array | None) -> jax.Array:
        if grad is None:
            return total
        if half is None:
            return total + grad.astype(total.dtype)
        halves = list(_halves(total))
        halves[half] = halves[half] + grad.astype(total.dtype)
        return jnp.concatenate(halves, 1)

    return {name: plus(total, made.get(name)) for name, total in sums.items()}


def _around_and_home(
    ring: Ring, steps: int, staying: dict, kv: dict, kv_grads: dict, part: Callable[..., Any]
) -> dict[str, Any]:
    """All gradients after `staying, kv_grads = part(staying, kv, kv_grads, step)` for the steps after a device's own.

    Keys and values go around, and with them their gradients, which in the end go back to whom they belong.
    """
    if steps == 1:
        return staying | kv_grads

    def step(state: Any, i: Any) -> tuple[Any, None]:
        staying, kv, kv_grads = state
        coming = ring.passed_on(kv)  # on its way while this device works on what it has
        staying, kv_grads = part(staying, kv, kv_grads, i)
        return (staying, coming, ring.passed_on(kv_grads)), None

    start = staying, ring.passed_on(kv), ring.passed_on(kv_grads)
    (staying, _, kv_grads), _ = jax.lax.scan(step, start, jnp.arange(1, steps))
    if away := steps % ring.count:
        home = [(i, (i - away) % ring.count) for i in range(ring.count)]
        kv_grads = ring.sent(kv_grads, home)
    return staying | kv_grads
