"""Configs as JSON: typed, nested, versioned, and the same text in every process."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from ejkernel_ops import AttentionConfig, BwdParams, CacheFormatError, ConfigError, FwdParams, from_json, to_json


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a config."""

    rows: int
    names: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Nested:
    """A config of every kind of field."""

    tile: Tile
    sizes: tuple[int, ...] = ()
    scale: float | None = None
    by_name: dict[str, Tile] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Changed:
    """Its fields have changed their meaning."""

    config_version: ClassVar[int] = 2
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class Holder:
    """A `None` that is not the default, numbers as names, and a versioned part."""

    size: int | None = 4
    by_number: dict[int, int] = dataclasses.field(default_factory=dict)
    part: Changed | None = None


NESTED = Nested(Tile(3, frozenset({"b", "a", "c"})), (1, 2), 0.5, {"z": Tile(1), "a": Tile(2)})


@pytest.mark.parametrize("config", [
    FwdParams(q_blocksize=128, num_warps=4), BwdParams(), AttentionConfig(backend="xla", fwd=FwdParams(num_stages=2)),
    NESTED, Changed(3), Holder(None, {1: 2}, Changed(2)), 7, "text", 2.5, True, [1, 2], {"a": 1, "b": None},
])  # fmt: skip
def test_what_is_written_is_read_back_equal_and_typed(config):
    found = from_json(to_json(config), type(config))
    assert found == config
    assert type(found) is type(config)


def test_text_is_the_same_in_every_process():
    code = "from tests.test_schema import *; print(to_json(NESTED))"
    root = Path(__file__).parent.parent
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        )
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    assert {run.communicate(timeout=60)[0].strip() for run in runs} == {to_json(NESTED)}
    assert '"names":["a","b","c"]' in to_json(NESTED)


@pytest.mark.parametrize(("text", "kind", "message"), [
    ('{"rows":3}', Changed, "version 1 of Changed; this is version 2"),
    ('{"@version":3,"rows":3}', Changed, "version 3 of Changed; this is version 2"),
    ('{"@version":2,"num_warps":3}', FwdParams, "version 2 of FwdParams; this is version 1"),
    ('{"part":{"rows":1}}', Holder, r"config.part is of version 1 of Changed; this is version 2"),
    ('{"num_warp":3}', FwdParams, "unknown field 'num_warp'; did you mean 'num_warps'"),
    ('{"tile":{"rows":1,"cols":2}}', Nested, r"config.tile has an unknown field 'cols'"),
    ('{"num_warps":"4"}', FwdParams, "not a FwdParams"),
    ('{"num_warps":4.0}', FwdParams, "not a FwdParams"),
    ('{"num_warps":0}', FwdParams, "not a FwdParams"),
    ('{"num_warps":NaN}', FwdParams, "not valid JSON"),
    ('{"num_warps":4,"num_warps":8}', FwdParams, "not valid JSON: the name 'num_warps' occurs twice in one object"),
    ("[]", FwdParams, "not a FwdParams"),
])  # fmt: skip
def test_other_versions_unknown_fields_and_wrong_types_are_refused(text, kind, message):
    with pytest.raises(CacheFormatError, match=message):
        from_json(text, kind)


def test_a_config_without_a_json_form_is_refused():
    with pytest.raises(ConfigError, match="has no JSON form"):
        to_json({"a": float("nan")})
    with pytest.raises(ConfigError, match="has no JSON form"):
        to_json(object())


@pytest.mark.parametrize(("make", "message"), [
    (lambda: FwdParams(q_blocksiz=64), "FwdParams has no field 'q_blocksiz'; did you mean 'q_blocksize'"),
    (lambda: AttentionConfig(q_blocksize=64), r"no field 'q_blocksize'; it is one of FwdParams: fwd=FwdParams\("),
    (lambda: AttentionConfig(num_warps_mn=4), r"it is one of BwdParams: bwd=BwdParams\(num_warps_mn=\.\.\.\)"),
    (lambda: AttentionConfig(colour=64), "no field 'colour'; expected one of backend, fwd, bwd"),
])  # fmt: skip
def test_an_unknown_field_is_refused_with_a_hint(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_config_shows_what_it_sets_and_nothing_else():
    assert repr(AttentionConfig(backend="xla", fwd=FwdParams(num_stages=2))) == (
        "AttentionConfig(backend='xla', fwd=FwdParams(num_stages=2))"
    )
    assert repr(BwdParams()) == "BwdParams()"
