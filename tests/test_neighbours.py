"""Untuned shapes start from the nearest tuned ones, where their configs are legal; what they use is marked so."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops as ek
from ejkernel_ops.config.choice import parse_description
from ejkernel_ops.config.neighbours import HintsKey, Place, place_of
from ejkernel_ops.execution.trial import Trial, Tuned
from ejkernel_ops.utils.meta import call_sites


@dataclasses.dataclass(frozen=True)
class Tile:
    size: int = 1


class Tiled(ek.Kernel[Tile, jax.Array]):
    """Gives back the size of its tile."""

    name = "neighbour_test"

    def run(self, x, *, cfg, flag=False):
        return x[..., 0] * 0 + cfg.size

    def heuristic_cfg(self, inv):
        return Tile()

    def illegal(self, inv, cfg):
        rows = inv.arguments["x"].shape[0]
        return f"a tile of {cfg.size} does not divide {rows} rows" if rows % cfg.size else None


TILED = Tiled()


class Picks:
    """Tunes to a tile of half the rows, and keeps the hints that it got."""

    def __init__(self, pick=lambda rows: Tile(rows // 2)):
        self.pick, self.hints = pick, []

    def tune(self, inv, on_event=None, hints=()):
        self.hints.append(list(hints))
        cfg = self.pick(inv.arguments["x"].shape[0])
        return Tuned(cfg, Tile(), 1.0, 2.0, (Trial(cfg, "timed", 1.0),))


def lowered(rows, width=4, **kwargs):
    return jax.jit(lambda x: TILED(x, **kwargs)).lower(jax.ShapeDtypeStruct((rows, width), jnp.float32))


def sources(rows):
    """Where the config of each call came from."""
    return {tier for site in call_sites(lowered(rows)) for tier in parse_description(site.config)[1].values()}


def used(rows, width=4, dtype=jnp.float32, **kwargs):
    return int(jax.jit(lambda x: TILED(x, **kwargs))(jnp.zeros((rows, width), dtype))[0])


@pytest.fixture
def chain():
    chain = ek.ConfigSelectorChain(tuner=Picks())
    ek.set_default_selector(chain)
    return chain


def test_an_untuned_shape_uses_its_nearest_tuned_neighbour_and_says_so(chain):
    ek.autotune_lowered(chain, lowered(8))
    ek.autotune_lowered(chain, lowered(64))
    assert [used(rows) for rows in (8, 64, 16, 128, 24)] == [4, 32, 4, 32, 4]
    assert [sources(rows) for rows in (8, 16)] == [{"memory"}, {"neighbour"}]
    assert chain.stats["neighbour"] > 0
    assert chain.cache.get(ek.Key(ek.device_fingerprint(), TILED.op_id_v, key_of(16))) is None  # not stored as tuned


def key_of(rows):
    return ek.Invocation(TILED, (jax.ShapeDtypeStruct((rows, 4), jnp.float32),), {"flag": False}).call_key


def test_an_illegal_config_is_passed_over_for_the_next(chain):
    ek.autotune_lowered(chain, lowered(8))
    ek.autotune_lowered(chain, lowered(28))
    assert used(20) == 4  # 14 would not divide
    assert used(9) == 1
    assert sources(9) == {"heuristic"}


def test_an_illegal_config_of_the_call_is_refused_with_its_rule():
    with pytest.raises(
        ek.ConfigError, match=r"Tile\(size=2\), which is illegal for .*a tile of 2 does not divide 9 rows"
    ):
        TILED(jnp.ones((9, 4)), cfg=Tile(2))
    assert TILED(jnp.ones((8, 4)), cfg=Tile(2))[0] == 2


def test_other_statics_types_and_far_shapes_are_no_neighbours(chain):
    ek.autotune_lowered(chain, lowered(8))
    assert used(16, flag=True) == 1
    assert used(16, dtype=jnp.bfloat16) == 1
    assert used(16, width=64) == 1
    assert used(4096) == 1
    assert chain.stats["neighbour"] == 0


def test_where_the_heuristic_won_a_neighbour_has_its_own(chain):
    chain.tuner.pick = lambda rows: Tile()
    ek.autotune_lowered(chain, lowered(8))
    chain.tuner.pick = lambda rows: Tile(2)
    ek.autotune_lowered(chain, lowered(32))
    assert used(12) == 1
    assert used(24) == 2


@pytest.mark.parametrize("mode", ["off", "pinned", "cached"])
def test_policies_that_want_no_guess_get_none(chain, mode):
    ek.autotune_lowered(chain, lowered(8))
    with ek.policy_override(mode=mode):
        if mode == "pinned":
            with pytest.raises(ek.ConfigError, match="pinned"):
                used(16)
        else:
            assert used(16) == {"off": 1, "cached": 4}[mode]


def test_a_result_has_neighbours_too_and_keeps_them_in_its_file(tmp_path):
    result = ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks()), lowered(8))
    result.save(tmp_path / "result.json")
    loaded = ek.AutotuningResult.load(tmp_path / "result.json")
    assert loaded == result
    assert used(16) == 1
    with loaded:
        assert used(16) == 4
        assert used(9) == 1
    assert used(16) == 1


def test_results_of_older_files_have_none():
    result = ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks()), lowered(8))
    body = json.loads(result.dumps())
    del body["entries"][0]["place"]
    assert ek.AutotuningResult.loads(json.dumps(body)).entries[0].place is None


def test_winners_nearby_are_tried_first(chain):
    ek.autotune_lowered(chain, lowered(8))
    ek.autotune_lowered(chain, lowered(64))
    ek.autotune_lowered(chain, lowered(32))
    assert chain.tuner.hints == [[], [Tile(4)], [Tile(32), Tile(4)]]


def test_neighbours_outlive_the_process_on_disk(tmp_path):
    ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks(), persistent=ek.PersistentCache(tmp_path)), lowered(8))
    later = ek.ConfigSelectorChain(tuner=Picks(), persistent=ek.PersistentCache(tmp_path))
    ek.set_default_selector(later)
    assert used(16) == 4
    ek.autotune_lowered(later, lowered(32))
    assert later.tuner.hints == [[Tile(4)]]
    for file in tmp_path.iterdir():
        file.write_text("[")
    ek.set_default_selector(ek.ConfigSelectorChain(persistent=ek.PersistentCache(tmp_path)))
    with pytest.warns(UserWarning, match="config cache"):
        assert used(16) == 1


def hints_on_disk(path):
    """The one entry of hints, and its file."""
    [entry] = [entry for entry in ek.PersistentCache(path).entries() if isinstance(entry.value, HintsKey)]
    return entry, path / entry.file_name


FORGED = {
    "no JSON": "[",
    "lengths that are texts": '[[[["a", "b"], ["c", "d"]], null]]',
    "a length that is too long for a float": f"[[[[1{'0' * 400}, 4]], null]]",
    "a length below zero": "[[[[-8, 4]], null]]",
    "nesting without an end": "[" * 100_000,
    "no lengths": "[3]",
    "another config": '[[[[8, 4]], {"tile": 4}]]',
    "a config of another type": '[[[[8, 4]], {"size": "4"}]]',
}  # fmt: skip


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_hints_on_disk_that_are_forged_are_a_miss_that_is_told_once(text, tmp_path):
    ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks(), persistent=ek.PersistentCache(tmp_path)), lowered(8))
    entry, file = hints_on_disk(tmp_path)
    file.write_text(dataclasses.replace(entry, config=text).dumps())
    cache = ek.PersistentCache(tmp_path)
    ek.set_default_selector(ek.ConfigSelectorChain(persistent=cache))
    with pytest.warns(UserWarning, match="config cache: could not read") as told:
        assert [used(16), used(32)] == [1, 1]
    assert len(told) == 1
    assert cache.stats["read failed: corrupt"] == 1


def test_hints_of_a_cache_for_one_type_of_configs_are_found(tmp_path):
    for rows, expected in ((8, []), (32, [Tile(4)])):
        chain = ek.ConfigSelectorChain(tuner=Picks(), persistent=ek.PersistentCache(tmp_path, cfg_type=Tile))
        ek.autotune_lowered(chain, lowered(rows))
        assert chain.tuner.hints == [expected]
        assert not [name for name in chain.persistent.stats if "failed" in name]


def test_what_is_forgotten_is_no_neighbour(chain):
    result = ek.autotune_lowered(chain, lowered(8))
    [key] = result.as_overlay()
    chain.forget(key)
    assert used(16) == 1


def test_distance_counts_doublings_and_widths_more():
    def place(*lengths):
        return Place("k", lengths)

    assert place((8, 4)).distance(place((16, 4))) == 1.0
    assert place((8, 4)).distance(place((8, 8))) == 3.0
    assert place((8, 4), ()).distance(place((32, 4), ())) == 2.0
    assert place((8, 4)).distance(place((8, 4, 1))) == np.inf
    assert place((8, 4)).distance(Place("other", ((8, 4),))) == np.inf
    inv = ek.Invocation(TILED, (jnp.ones((8, 4)),))
    assert place_of(inv).lengths == ((8, 4),)
    assert place_of(inv).kind == place_of(ek.Invocation(TILED, (jnp.ones((9, 7)),))).kind


def test_a_tuner_that_takes_no_hints_is_asked_without(chain):
    class Plain:
        def tune(self, inv, on_event=None):
            return Tuned(Tile(2), Tile(), 1.0, 2.0, ())

    plain = ek.ConfigSelectorChain(tuner=Plain())
    assert ek.autotune_lowered(plain, lowered(8)).entries[0].cfg == Tile(2)


def test_a_kernel_without_a_rule_of_its_own_has_no_neighbours():
    class Strict(ek.Kernel[Tile, jax.Array]):
        def run(self, x, *, cfg):
            return x.reshape(cfg.size, -1).sum(0)

        def heuristic_cfg(self, inv):
            return Tile()

    strict = Strict("strict_test")
    chain = ek.ConfigSelectorChain(tuner=Picks(lambda rows: Tile(8)))
    ek.set_default_selector(chain)
    ek.autotune_lowered(chain, jax.jit(lambda x: strict(x)).lower(jnp.ones((16, 4))))
    assert strict(jnp.ones((9, 3))).shape == (27,)
    chain.tuner.hints.clear()
    ek.autotune_lowered(chain, jax.jit(lambda x: strict(x)).lower(jnp.ones((32, 4))))
    assert chain.tuner.hints == [[Tile(8)]]  # hints are checked, so they may come from there


def test_equal_results_have_equal_neighbours_in_whatever_order_they_were_merged():
    a = ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks()), lowered(8))
    b = ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks()), lowered(32))
    assert (a | b).digest == (b | a).digest
    found = []
    for result in (a | b, b | a):
        ek.set_default_selector(ek.ConfigSelectorChain())
        with result:
            found.append(int(jax.jit(lambda x: TILED(x))(jnp.zeros((16, 4)))[0]))
    assert found == [4, 4]  # of two that are equally near the smaller


@pytest.mark.parametrize("first", [0, 1], ids=["with_places", "without_places"])
def test_near_shapes_depend_on_the_result_that_is_entered_and_not_on_those_before(first):
    placed = ek.autotune_lowered(ek.ConfigSelectorChain(tuner=Picks()), lowered(8))
    bare = dataclasses.replace(placed, entries=tuple(dataclasses.replace(e, place=None) for e in placed.entries))
    assert placed.digest != bare.digest
    ek.set_default_selector(ek.ConfigSelectorChain())
    step = jax.jit(lambda x: TILED(x))
    found = {}
    for result in (placed, bare)[:: -1 if first else 1]:
        with result:
            found[result is placed] = [int(step(jnp.zeros((rows, 4)))[0]) for rows in (8, 16)]
    assert found == {True: [4, 4], False: [4, 1]}
    inner = ek.overlay_cache(dict.fromkeys(placed.as_overlay(), Tile(2)))
    with placed, inner:  # places of the outer one, configs of the inner one
        assert [int(step(jnp.zeros((rows, 4)))[0]) for rows in (8, 16)] == [2, 2]


def test_what_was_tuned_in_another_process_can_be_forgotten_and_what_others_wrote_stays(tmp_path):
    def chain():
        return ek.ConfigSelectorChain(tuner=Picks(), persistent=ek.PersistentCache(tmp_path))

    first, second = chain(), chain()
    second._near(ek.Invocation(TILED, (jnp.ones((8, 4)),)), ek.core.snapshot.current())  # has looked
    result = ek.autotune_lowered(first, lowered(8))
    ek.autotune_lowered(second, lowered(64))
    ek.set_default_selector(chain())
    assert [used(16), used(128)] == [4, 32]
    [key] = result.as_overlay()
    third = chain()
    third.forget(key)
    ek.set_default_selector(chain())
    assert used(12) == 1  # 32 does not divide it
