"""Results from other people: what is refused, with its line; what loading never does; compared, merged, pinned."""

import json
import random
import sys

import jax
import jax.numpy as jnp
import pytest

import ejkernel_ops as ek
from ejkernel_ops.utils.json_lines import line_of

pytestmark = pytest.mark.once

X, W = jnp.ones((12, 4)), jnp.ones((4, 4)) / 4
DEVICE = ek.device_fingerprint()


def lowered():
    return jax.jit(lambda x: ek.linear(x, W)).lower(X)


[KEY] = (text.split(":")[1] for text in ek.find_labels_in_lowered(lowered()))
OTHER = "0" * 16


def config(rows=3, backend="xla"):
    return ek.LinearConfig(backend=backend, fwd=ek.FwdParams(blocksize_m=rows))


def entry(rows=3, key=KEY, **fields):
    return ek.Entry("linear@v1", key, config(rows), **fields)


def result(*entries, **fields):
    return ek.AutotuningResult(DEVICE, entries or (entry(),), **fields)


# Refused, with the line

TRIAL = ek.Trial(config(4), "timed", 1.0, 0.1)
LINES = {  # a path of the file, what stands there, the error and its text
    "an unknown op": (("entries", 1, "op"), "os@v1", ek.ConfigError, "unknown op 'os@v1'"),
    "an op that is no name": (("entries", 1, "op"), "../x@v1", ek.CacheFormatError, "Expected `str` matching"),
    "an unknown field of a config": (("entries", 1, "config"), {"fwd": {"rows": 3}}, ek.CacheFormatError, "'rows'"),
    "a field of another type": (
        ("entries", 1, "config", "fwd", "blocksize_m"), "3", ek.CacheFormatError, "got `str`",
    ),
    "true for a number": (("entries", 1, "config", "fwd", "blocksize_m"), True, ek.CacheFormatError, "got `bool`"),
    "a value out of range": (("entries", 1, "config", "fwd"), {"blocksize_m": -3}, ek.CacheFormatError, "blocksize_m"),
    "an unknown back end": (("entries", 1, "config"), {"backend": "gcc"}, ek.CacheFormatError, "gcc"),
    "a back end that the op lacks": (("entries", 1, "config"), {"backend": "cudnn"}, ek.CacheFormatError, "no cudnn"),
    "a field that the back end lacks": (
        ("entries", 1, "config"), {"backend": "xla", "fwd": {"num_warps": 4}}, ek.CacheFormatError, "num_warps=4",
    ),
    "no config": (("entries", 1, "config"), None, ek.CacheFormatError, "null"),
    "a trial of another type": (("entries", 1, "trials", 0, "ms"), "fast", ek.CacheFormatError, "got `str`"),
    "a trial's config": (("entries", 1, "trials", 0, "config"), {"x": 1}, ek.CacheFormatError, "'x'"),
    "an unknown field": (("entries", 1), {"op": "linear@v1", "run": "rm"}, ek.CacheFormatError, "damaged"),
    "a negative time": (("entries", 1, "ms"), -1.0, ek.CacheFormatError, ">= 0"),
    "a count that is none": (("entries", 1, "count"), 10**30, ek.CacheFormatError, "damaged"),
    "a version that is none": (("versions",), [1], ek.CacheFormatError, "damaged"),
}  # fmt: skip


def edited(path, value):
    body = json.loads(result(entry(), entry(key=OTHER, trials=(TRIAL,), ms=1.0)).dumps())
    *way, last = path
    holder = body
    for step in way:
        holder = holder[step]
    holder[last] = value
    return json.dumps(body, indent=1)


@pytest.mark.parametrize("kind", LINES)
def test_what_cannot_be_used_is_refused_with_its_line(kind):
    path, value, error, message = LINES[kind]
    text = edited(path, value)
    with pytest.raises(error, match=rf"^line {line_of(text, path)}: ") as told:
        ek.AutotuningResult.loads(text)
    assert message in str(told.value)


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_line_of_a_value_however_the_file_is_laid_out(indent):
    data = {"a": [1, {"b\n": "\n]", "c": []}], "d": {"e": -1.5e3}}
    text = "\n\n" + json.dumps(data, indent=indent, ensure_ascii=False)
    lines = text.split("\n")
    for path, start in [(("a", 1, "c"), '"c"'), (("d", "e"), '"e"'), ((), "{"), (("a", 1, "missing"), "{")]:
        assert start in lines[line_of(text, path) - 1]


def test_two_configs_for_one_call_are_refused_with_both_lines():
    body = json.loads(result().dumps())
    [first] = body["entries"]
    second = first | {"config": json.loads(ek.to_json(config(4)))}
    text = json.dumps(body | {"entries": [first, first, second]}, indent=1)
    lines = [line_of(text, ("entries", i)) for i in (0, 2)]
    with pytest.raises(ek.CacheFormatError, match=f"^line {lines[1]}: another config .* than in line {lines[0]}"):
        ek.AutotuningResult.loads(text)
    ek.AutotuningResult.loads(json.dumps(body | {"entries": [first, first]}))  # twice the same is no conflict
    with pytest.raises(ek.ConfigError, match="two configs for linear@v1"):
        result(entry(3), entry(4))


def test_ops_that_are_not_known_are_left_out_and_named_if_told():
    text = edited(("entries", 1, "op"), "unheard@v1")
    again = ek.AutotuningResult.loads(text, allow_unknown_ops=True)
    assert again.entries == result().entries
    [(label, reason)] = again.skipped
    assert (label, "left out" in reason) == (f"unheard@v1:{OTHER}", True)
    assert f"not tuned: unheard@v1:{OTHER}" in str(again)


def test_file_of_another_device_says_both_and_errors_name_the_file(tmp_path):
    ek.AutotuningResult("gpu|H100|9.0", (entry(),)).save(tmp_path / "r.json")
    with pytest.raises(ek.CacheFormatError, match=rf"r\.json: .*tuned for 'gpu\|H100\|9\.0', this is '{DEVICE[:3]}"):
        ek.AutotuningResult.load(tmp_path / "r.json")
    (tmp_path / "r.json").write_text(edited(("entries", 1, "op"), "unheard@v1"))
    with pytest.raises(ek.ConfigError, match=r"r\.json: line \d+: unknown op"):
        ek.AutotuningResult.load(tmp_path / "r.json")


class Picky(ek.Kernel[int, jax.Array]):
    """Takes configs up to 8."""

    name = "test_picky"

    def run(self, x, *, cfg):
        return x * cfg

    def heuristic_cfg(self, inv):
        return 1

    def illegal(self, inv, cfg):
        return f"{cfg} is more than 8" if cfg > 8 else None


PICKY = Picky()


def picky(cfg):
    inv = ek.Invocation(PICKY, (jnp.ones(3),))
    return ek.AutotuningResult(DEVICE, (ek.Entry(inv.op_id_v, inv.call_key, cfg),))


def test_config_that_is_illegal_for_its_call_is_refused_when_it_is_loaded_or_else_when_it_is_used(monkeypatch):
    text = picky(9).dumps()
    unseen = ek.AutotuningResult.loads(text)  # before the call was ever lowered here
    step = jax.jit(lambda x: PICKY(x))
    with unseen, pytest.raises(ek.ConfigError, match=r"illegal for Invocation.*9 is more than 8"):
        step(jnp.ones(3))
    with ek.AutotuningResult.loads(picky(8).dumps()):
        assert step(jnp.ones(3))[0] == 8
    with pytest.raises(ek.CacheFormatError, match=r"^line \d+: the config of test_picky@v1 is illegal here: 9 is more"):
        ek.AutotuningResult.loads(text)


def test_what_a_terminal_would_obey_is_not_printed():
    nasty = "\x1b]0;owned\x07\x1b[2J\u202e"
    text = result(entry(shapes=nasty, source=nasty), skipped=((nasty, nasty),), notes=(nasty,)).dumps()
    shown = str(ek.AutotuningResult.loads(text))
    assert "owned" in shown
    assert not set(nasty) - set("]0;owned[2J") & set(shown)


def test_loading_mutated_files_runs_nothing_opens_nothing_imports_nothing():
    """1,000 damaged or hostile files under an audit hook: a result, or one of two errors."""
    good = result(
        entry(shapes="float32[12,4]", trials=(TRIAL,), heuristic=config(12), ms=1.0, heuristic_ms=2.0)
    ).dumps()
    ek.AutotuningResult.loads(good)  # what reads files is imported by now
    events, loaded, rng = [], 0, random.Random(0)
    watched = (
        "import",
        "open",
        "exec",
        "compile",
        "subprocess.Popen",
        "os.system",
        "socket.connect",
        "pickle.find_class",
    )
    on = [False]
    sys.addaudithook(lambda event, args: events.append((event, args)) if on[0] and event in watched else None)
    for index in range(1000):
        text = mutated(good, rng, index)
        on[0] = True
        try:
            ek.AutotuningResult.loads(text)
            loaded += 1
        except (ek.CacheFormatError, ek.ConfigError):
            pass
        finally:
            on[0] = False
    assert events == []
    assert 0 < loaded < 500
    on[0] = True
    compile("1", "", "eval")
    on[0] = False
    assert [event for event, _ in events] == ["compile"]  # the hook sees


WORDS = [
    "os:system", "__import__", "linear@v1", "pickle", "../../x", "\x00", "\ud800", "1e999", "NaN", "null", "true",
    "[" * 50, '{"a":1,"a":2}', "-1", "9" * 400, '"\\u0000"', "subprocess", "\x1b[2J", '{"@version":2}',
]  # fmt: skip


def mutated(text, rng, index):
    at, length = rng.randrange(len(text)), rng.randrange(1, 40)
    word = rng.choice(WORDS)
    return [
        lambda: text[:at],
        lambda: text[:at] + text[at + length :],
        lambda: text[:at] + word + text[at:],
        lambda: text.replace(rng.choice(["linear@v1", '"xla"', "null", "12", '"fwd"', "timed", "1.0"]), word),
        lambda: bytes(b ^ (rng.random() < 0.01) * rng.randrange(256) for b in text.encode()),
    ][index % 5]()


# Compared and merged


def test_digest_is_of_configs_and_calls_alone_in_any_order():
    entries = [entry(rows, key=f"{rows:016x}") for rows in (1, 2, 3)]
    first = result(*entries)
    assert result(*entries[::-1], notes=("later",)).digest == first.digest
    assert result(*entries[:2]).digest != first.digest
    assert ek.AutotuningResult("gpu|other", tuple(entries)).digest != first.digest


def test_diff_names_what_was_added_removed_and_changed_and_is_false_where_nothing_was():
    first, second = result(entry(3), entry(4, OTHER)), result(entry(5, ms=2.0), entry(4, "1" * 16))
    found = first.diff(second)
    assert [e.call_key for e in found.added] == ["1" * 16]
    assert [e.call_key for e in found.removed] == [OTHER]
    assert str(found).splitlines() == [
        f"- linear@v1:{OTHER}: backend=xla blocksize_m=4",
        f"+ linear@v1:{'1' * 16}: backend=xla blocksize_m=4",
        f"! linear@v1:{KEY}: backend=xla blocksize_m=3 -> backend=xla blocksize_m=5",
    ]
    same = result(entry(3)).diff(result(entry(3, ms=1.0)))
    assert not same
    assert str(same) == "the same configs for the same calls"
    assert result().diff(ek.AutotuningResult("gpu|other", (entry(),)))


@pytest.mark.parametrize(("prefer", "rows"), [("self", 3), ("other", 4)])
def test_merging_takes_the_config_of_whom_is_preferred_and_keeps_every_call(prefer, rows):
    label = f"ejkernel_ops#linear@v1:{OTHER}"
    first = result(entry(3), skipped=((label, "failed"), ("ejkernel_ops#x@v1:0", "why")), step_ms=(2.0, 1.0))
    both = first.merge(result(entry(4), entry(5, OTHER)), prefer=prefer)
    assert {e.call_key: e.cfg.fwd.blocksize_m for e in both.entries} == {KEY: rows, OTHER: 5}
    assert both.skipped == (("ejkernel_ops#x@v1:0", "why"),)  # what one of them tuned is tuned
    assert both.step_ms is None


def test_merging_refuses_two_configs_two_devices_and_another_preference():
    with pytest.raises(ek.ConfigError, match=f"two configs for linear@v1:{KEY}; say whose"):
        result(entry(3)).merge(result(entry(4)))
    assert len(result(entry(3)).merge(result(entry(3), entry(4, OTHER))).entries) == 2
    with pytest.raises(ek.ConfigError, match="only one device's"):
        result().merge(ek.AutotuningResult("gpu|other", ()))
    with pytest.raises(ek.ConfigError, match="prefer is 'faster'; expected one of self, other"):
        result().merge(result(), prefer="faster")
