"""`python -m ejkernel_ops cache`: what is on disk is seen, removed and carried elsewhere, without a device."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ejkernel_ops import FwdParams, Key, LinearConfig, PersistentCache
from ejkernel_ops.__main__ import main
from ejkernel_ops.config import persistent
from ejkernel_ops.config.neighbours import HintsKey, Neighbour, Place, dump_hints, read_hints

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
DIGITS = "0123456789abcdef"
H100, CPU = "gpu|NVIDIA H100 80GB HBM3|9.0", "cpu|x86_64|2"
LINEAR = Key(H100, "linear@v1", DIGITS)
KEYS = (LINEAR, Key(CPU, "linear@v1", DIGITS), Key(CPU, "rms_norm@v1", "f" * 16))
CONFIG = LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=2))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the user with an entry of each key, hints, and an entry of no call."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "configs"))
    cache = PersistentCache()
    for key in KEYS:
        cache.put(key, CONFIG if "linear" in key.op_id_v else {"backend": "xla"})
    cache.put(HintsKey(CPU, "linear@v1", "e" * 16), "[]")
    cache.put("my own key", 3)
    return cache.path


def told(capsys, *arguments):
    """Exit status, output and errors of a command."""
    try:
        status = main(["cache", *arguments])
    except SystemExit as end:
        status = end.code
    return (status, *capsys.readouterr())


def calls(capsys, *options):
    status, out, _ = told(capsys, "list", "--json", *options)
    assert status == 0
    return {(row["device"], row["op"], row["call"]) for row in json.loads(out)}


def test_list_shows_device_op_call_and_config(folder, capsys):
    status, out, err = told(capsys, "list")
    assert (status, err) == (0, "")
    [row] = [line for line in out.splitlines() if H100 in line]
    assert row.split()[-3:] == ["linear@v1", DIGITS, '{"backend":"xla","fwd":{"blocksize_m":2}}']
    assert "hints for shapes nearby" in out
    assert out.endswith(f"5 entries in {folder}\n")


def test_a_name_that_was_forged_does_nothing_to_a_terminal(folder, capsys):
    PersistentCache().put(Key("gpu|\x1b]0;title\x07\x1b[2J", "op\n@v1", DIGITS), 3)
    out = told(capsys, "list")[1]
    assert out.replace("\n", "").isprintable()
    assert "gpu|?]0;title??[2J" in out


@pytest.mark.parametrize(("options", "found"), [
    ((), 5), (("--device", "H100"), 1), (("--op", "linear"), 3), (("--op", "linear@v1", "--device", "cpu"), 2),
    (("--op", "lin"), 0), (("--op", "linear@v2"), 0),
])  # fmt: skip
def test_lists_can_be_narrowed(folder, options, found, capsys):
    assert len(calls(capsys, *options)) == found
    narrowed = " of 5" if options else ""
    assert told(capsys, "list", *options)[1].endswith(f"entr{'y' if found == 1 else 'ies'}{narrowed} in {folder}\n")


@pytest.mark.parametrize("name", [DIGITS, f"ejkernel_ops#linear@v1:{DIGITS}"])
def test_show_tells_all_of_a_call_on_each_device(folder, name, capsys):
    status, out, _ = told(capsys, "show", name)
    rows = json.loads(out)
    assert status == 0
    assert {row["device"] for row in rows} == {H100, CPU}
    assert all(row["config"] == {"backend": "xla", "fwd": {"blocksize_m": 2}} for row in rows)
    assert all(row["versions"]["jax"] and (folder / row["file"]).exists() for row in rows)


@pytest.mark.parametrize(("options", "left"), [
    (("--device", "H100"), 4), (("--op", "linear"), 2), (("--outdated",), 4), ((), 0), (("--op", "none"), 5)
])  # fmt: skip
def test_clear_removes_what_was_asked_for_and_nothing_else(folder, options, left, capsys, monkeypatch):
    (folder / "notes.txt").write_text("the user's own")
    with monkeypatch.context() as other:
        other.setattr(persistent, "tuned_with", lambda: {"jax": "0.1"})
        PersistentCache().put(LINEAR, CONFIG)
    status, out, _ = told(capsys, "clear", "--yes", *options)
    assert status == 0
    assert out.startswith(f"{5 - left} file")
    assert len(PersistentCache().keys()) == left
    assert (folder / "notes.txt").exists()


def test_a_forged_key_breaks_no_command(folder, capsys):
    """Such text makes NumPy raise a SyntaxError, and compile some of it."""
    forged = [{"dtype": "(,f8"}, {"array": ["(2,3)f4", [2], False]}, {"scalar": ["(2,)f4", "1"]}]
    for key in forged:
        entry = dataclasses.replace(next(PersistentCache().entries()), key=key)
        (folder / entry.file_name).write_text(entry.dumps())
    assert len(PersistentCache().keys()) == 5
    for arguments in (["list"], ["export", "out.json"], ["sweep"], ["clear", "--yes"]):
        arguments = [str(folder.parent / a) if a.endswith(".json") else a for a in arguments]
        assert told(capsys, *arguments)[0] == 0
    assert told(capsys, "import", str(folder.parent / "out.json"))[0] == 2  # the forged ones


def test_clear_says_how_many_files_it_cannot_read(folder, capsys, monkeypatch):
    (folder / f"{'0' * 64}.json").write_text("damaged")
    monkeypatch.setattr("typer.confirm", lambda text, **_: print(text))
    assert "Remove 5 entries and 1 file that cannot be read here" in told(capsys, "clear")[1]


def test_clear_asks_and_takes_silence_for_no(folder, capsys, monkeypatch):
    for answer, left in (("", 5), ("n\n", 5), ("y\n", 0)):
        read, write = os.pipe()
        os.write(write, answer.encode())
        os.close(write)
        with os.fdopen(read) as stdin, monkeypatch.context() as here:
            here.setattr(sys, "stdin", stdin)
            status, _, err = told(capsys, "clear")
        assert f"Remove 5 entries from {folder}?" in err
        assert ("nothing was done" in err) == (left == 5)
        assert (status, len(PersistentCache().keys())) == (int(left == 5), left)


def test_sweep_removes_damaged_files_leftovers_and_what_is_old_if_told(folder, capsys):
    files = sorted(folder.iterdir())
    files[0].write_text("{")
    (folder / f".tmp-{DIGITS}").write_text("half")
    os.utime(folder / f".tmp-{DIGITS}", (0, time.time() - 7200))
    assert told(capsys, "sweep") == (0, f"2 files removed from {folder}\n", "")
    os.utime(files[1], (0, time.time() - 3 * 86400))
    assert told(capsys, "sweep") == (0, f"0 files removed from {folder}\n", "")
    assert told(capsys, "sweep", "--days", "2") == (0, f"1 file removed from {folder}\n", "")
    assert sorted(folder.iterdir()) == files[2:]


def test_export_and_import_carry_entries_to_another_folder(folder, capsys, monkeypatch, tmp_path):
    file, before = str(tmp_path / "entries.json"), calls(capsys)
    assert told(capsys, "export", file) == (0, f"5 entries written to {file}\n", "")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(other := tmp_path / "other"))
    assert told(capsys, "import", file) == (0, f"5 entries of 5 imported into {other}\n", "")
    assert calls(capsys) == before
    assert PersistentCache().get(LINEAR) == CONFIG
    assert told(capsys, "import", file)[1].splitlines() == [
        f"0 entries of 5 imported into {other}", "5 entries of the file are here already",
    ]  # fmt: skip


def test_import_leaves_what_is_here_unless_told(folder, capsys, tmp_path):
    file, mine = str(tmp_path / "entries.json"), LinearConfig(backend="xla", fwd=FwdParams(blocksize_m=7))
    told(capsys, "export", file, "--op", "linear", "--device", "H100")
    PersistentCache().put(LINEAR, mine)
    _, out, _ = told(capsys, "import", file)
    assert "0 entries of 1" in out
    assert "1 entry stayed as here, where the file has another config; --replace takes the file's" in out
    assert PersistentCache().get(LINEAR) == mine
    assert "1 entry of 1" in told(capsys, "import", file, "--replace")[1]
    assert PersistentCache().get(LINEAR) == CONFIG


HINTS, LARGER = HintsKey(CPU, "linear@v1", "e" * 16), FwdParams(blocksize_m=7)


def hints(*calls):
    """Hints for calls of these rows, a config of each."""
    plain = [Neighbour(Place(HINTS.kind, ((rows, 4),)), LinearConfig(fwd=fwd)) for rows, fwd in calls]
    return dump_hints(plain)


@pytest.mark.parametrize("options", [(), ("--replace",)], ids=["here_wins", "the_file_wins"])
def test_import_merges_hints(options, folder, capsys, tmp_path):
    file, cache = str(tmp_path / "entries.json"), PersistentCache()
    cache.put(HINTS, hints((8, LARGER), (16, LARGER)))
    told(capsys, "export", file, "--op", "linear", "--device", "cpu")
    cache.put(HINTS, hints((32, None), (8, None)))
    assert told(capsys, "import", file, *options) == (
        0, f"1 entry of 2 imported into {folder}\n1 entry of the file is here already\n", "",
    )  # fmt: skip
    merged = read_hints(cache.get(HINTS), HINTS.kind, LinearConfig)
    found = {n.place.lengths[0][0]: n.cfg.fwd for n in merged}
    assert found == {8: LARGER if options else None, 16: LARGER, 32: None}
    assert told(capsys, "import", file, *options)[1].startswith("0 entries of 2")


@pytest.mark.parametrize("bad", ["[3]", [3]], ids=["text", "no_text"])
def test_import_repairs_hints_that_are_bad_here_and_refuses_those_that_are_bad_there(bad, folder, capsys, tmp_path):
    file, cache = str(tmp_path / "entries.json"), PersistentCache()
    cache.put(HINTS, good := hints((8, LARGER)))
    told(capsys, "export", file, "--op", "linear", "--device", "cpu")
    cache.put(HINTS, bad)
    assert told(capsys, "import", file)[1].startswith("1 entry of 2")
    assert cache.get(HINTS) == good
    cache.put(HINTS, bad)
    told(capsys, "export", file, "--op", "linear", "--device", "cpu")
    status, _, err = told(capsys, "import", file)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"entry \d of 2: not a (list|str)", err)


ENTRY = '"blocksize_m": 2'
FILES = {
    "no json": (lambda text: "{", "not valid JSON"),
    "a result": (lambda text: '{"format": "ejkernel_ops.AutotuningResult"}', "not exported entries"),
    "damaged": (lambda text: text.replace(ENTRY, '"blocksize_m": 4'), "entry 1 of 1: checksum does not match"),
    "other schema": (lambda text: text.replace('"schema": 3', '"schema": 4'), "entry 1 of 1: schema 4; this version"),
    "no list": (lambda text: '{"format": "ejkernel_ops.cache", "entries": 3}', "not exported entries"),
}


@pytest.mark.parametrize("kind", FILES)
def test_import_of_a_bad_file_takes_nothing_and_says_why_in_a_line(kind, folder, capsys, tmp_path):
    change, message = FILES[kind]
    file = tmp_path / "entries.json"
    told(capsys, "export", str(file), "--device", "H100")
    told(capsys, "clear", "--yes")
    file.write_text(change(file.read_text()))
    status, out, err = told(capsys, "import", str(file))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{file}: ")
    assert message in err
    assert not PersistentCache().keys()


def test_import_refuses_a_config_that_is_illegal_today(folder, capsys, tmp_path):
    PersistentCache(cfg_type=dict).put(Key(CPU, "none@v1", DIGITS), {"backend": "cuda"})
    file = tmp_path / "entries.json"
    told(capsys, "export", str(file), "--op", "none")
    body = json.loads(file.read_text())
    entry = persistent.CacheEntry.from_plain(body["entries"][0])
    forged = persistent.CacheEntry(
        json.loads(json.dumps(entry.key).replace("none@v1", "linear@v1")), "x:y", {"m": 1}, {}
    )
    file.write_text(json.dumps(body | {"entries": [forged.to_plain()]}))
    status, _, err = told(capsys, "import", str(file))
    assert status == 2
    assert "entry 1 of 1: config has an unknown field 'm'" in err


@pytest.mark.parametrize(("arguments", "status", "message"), [
    (("show", "3"), 2, "no entry of the call '3' is in"),
    (("export", "{folder}/none/file.json"), 2, "the folder {folder}/none does not exist"),
    (("export", "{folder}/file.json", "--op", "none"), 2, "nothing to export"),
    (("export", "{folder}"), 2, "{folder}: Is a directory"),
    (("import", "{folder}/none.json"), 2, "{folder}/none.json: No such file or directory"),
    (("lst",), 2, "No such command 'lst'"), (("show",), 2, "Missing argument"),
    (("show",), 2, "(python -m ejkernel_ops cache show --help tells more)"),
    (("list", "--opp", "x"), 2, "--opp"),
    (("sweep", "--days", "-1"), 2, "--days"), (("sweep", "--days", "x"), 2, "--days"), ((), 2, "Missing command"),
])  # fmt: skip
def test_errors_are_one_line_and_a_status(arguments, status, message, folder, capsys):
    found, out, err = told(capsys, *(text.replace("{folder}", str(folder)) for text in arguments))
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert message.replace("{folder}", str(folder)) in err
    assert "Traceback" not in err


def test_a_folder_that_cannot_be_read_is_an_error_and_none_at_all_is_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "none"))
    assert told(capsys, "list") == (0, f"0 entries in {tmp_path}/none\n", "")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    status, _, err = told(capsys, "list")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("warning: config cache: could not list")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "configs")
    status, out, err = told(capsys, "list")
    assert (status, out) == (2, "")
    assert err == "EJKERNEL_CACHE_DIR is 'configs'; expected an absolute path, or one that starts with ~\n"


def test_damaged_files_are_told_and_are_no_failure(folder, capsys):
    for file in sorted(folder.iterdir())[:2]:
        file.write_text("{")
    status, out, err = told(capsys, "list")
    assert (status, out.splitlines()[-1]) == (0, f"3 entries in {folder}")
    assert err.splitlines()[-1] == "2 files cannot be read; `cache sweep` removes damaged ones"


def test_no_command_on_the_cache_starts_a_device(folder):
    code = (
        "import sys; from ejkernel_ops.__main__ import main; status = main(['cache', 'list'])\n"
        "from jax._src import xla_bridge; sys.exit(status or xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 entries" in done.stdout
