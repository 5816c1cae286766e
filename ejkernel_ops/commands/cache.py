"""`cache`: the tuned configs on this machine's disk. No command of it touches a device."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config.cache import Key, is_key
from ..config.entry import CacheEntry, dump_entries, load_entries
from ..config.neighbours import HintsKey, Neighbour, dump_hints, merge_hints, read_hints
from ..config.persistent import PersistentCache
from ..errors import CacheFormatError, ConfigError
from ..utils.files import read_file, replace_file
from ..utils.text_table import text_table
from ..utils.versions import tuned_with
from .options import Modules, import_modules

app = typer.Typer(help="The tuned configs on disk, in EJKERNEL_CACHE_DIR or the user's cache folder.")
Device = Annotated[str, typer.Option(help="Only entries for devices whose name contains this.")]
Op = Annotated[str, typer.Option(help="Only entries of this op, such as linear or linear@v1.")]
_DAMAGED = (": corrupt", ": other schema")


@app.command("list")
def list_entries(
    device: Device = "", op: Op = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known of each, as JSON.")] = False,
) -> int:  # fmt: skip
    """The entries: device, op, call key and config."""
    cache = PersistentCache()
    entries = list(cache.entries())
    found = [described(entry) for entry in entries if _chooses(device, op)(entry)]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        rows = [tuple(map(_printable, (row["device"], row["op"], row["call"], _shown(row)))) for row in found]
        if rows:
            print(text_table(("device", "op", "call", "config"), sorted(rows)))
        narrowed = f" of {len(entries)}" if device or op else ""
        print(f"{_entries(len(found))}{narrowed} in {cache.path}")
    if bad := sum(times for name, times in cache.stats.items() if name.startswith("read failed")):
        print(f"{_files(bad)} cannot be read; `cache sweep` removes damaged ones", file=sys.stderr)
    return _status(cache)


@app.command()
def show(call: Annotated[str, typer.Argument(help="A call key, 16 hex digits, or a label that ends in one.")]) -> int:
    """All that is known of a call, as JSON."""
    cache = PersistentCache()
    found = [row for row in map(described, cache.entries()) if row["call"] == call.rpartition(":")[2]]
    if not found:
        raise ConfigError(f"no entry of the call {call!r} is in {cache.path}; `cache list` shows the calls that are")
    print(json.dumps(found, indent=1))
    return _status(cache)


@app.command()
def clear(
    device: Device = "", op: Op = "",
    outdated: Annotated[bool, typer.Option(help="Only entries of another jax, driver or version of this.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:  # fmt: skip
    """Removes entries, after a question."""
    cache, chosen = PersistentCache(), _chooses(device, op)

    def which(entry: CacheEntry) -> bool:
        return chosen(entry) and not (outdated and entry.versions == tuned_with())

    if not yes:
        typer.confirm(f"{_question(cache, which, not (device or op or outdated))}?", abort=True, err=True)
    removed = cache.clear(which if device or op or outdated else None)
    print(f"{_files(removed)} removed from {cache.path}")
    return _status(cache)


@app.command()
def sweep(
    days: Annotated[float | None, typer.Option(min=0, help="Also remove what was written longer ago.")] = None,
) -> int:
    """Removes damaged files, and what killed processes left."""
    cache = PersistentCache()
    removed = cache.sweep(None if days is None else days * 86400)
    print(f"{_files(removed)} removed from {cache.path}")
    return _status(cache)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A JSON file to write.")], device: Device = "", op: Op = ""
) -> int:
    """Writes entries to one file, for `import` on another machine."""
    cache = PersistentCache()
    entries = [entry for entry in cache.entries() if _chooses(device, op)(entry)]
    if not entries:
        raise ConfigError(f"nothing to export: no such entry is in {cache.path}")
    replace_file(file, dump_entries(entries))
    print(f"{_entries(len(entries))} written to {file}")
    return _status(cache)


@app.command("import")
def import_entries(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    replace: Annotated[bool, typer.Option(help="Replace entries that are here with another config.")] = False,
    modules: Modules = None,
) -> int:
    """Takes the entries of a file, all or none; hints for shapes nearby are added to those that are here."""
    import_modules(modules)
    cache = PersistentCache()
    try:
        entries = load_entries(read_file(file))
    except CacheFormatError as error:
        raise CacheFormatError(f"{file}: {error}") from None
    here = {entry.file_name: entry for entry in cache.entries()}
    pairs = [(here.get(entry.file_name), entry) for entry in entries]
    wanted = [entry if old is None else _combined(old, entry, replace) for old, entry in pairs]
    news = [new for (old, _), new in zip(pairs, wanted) if old is None or old.config != new.config]
    stored = sum(map(cache.put_entry, news))
    print(f"{_entries(stored)} of {len(entries)} imported into {cache.path}")
    kept = sum(new is old and new.config != entry.config for (old, entry), new in zip(pairs, wanted))
    if same := len(entries) - len(news) - kept:
        print(f"{_entries(same)} of the file {'is' if same == 1 else 'are'} here already")
    if kept:
        print(f"{_entries(kept)} stayed as here, where the file has another config; --replace takes the file's")
    return _status(cache)


def _combined(old: CacheEntry, new: CacheEntry, replace: bool) -> CacheEntry:
    """What is kept of two entries of one key: of hints both, since each is for a call of its own."""
    first, other = (new, old) if replace else (old, new)
    if not described(new)["hints"]:
        return first
    known: list[Neighbour] = []
    for entry in (first, other):
        with contextlib.suppress(CacheFormatError):  # what is here may be damaged; the file was checked
            known = merge_hints(known, read_hints(entry.config, "", Any))
    return dataclasses.replace(first, config=dump_hints(known))


def described(entry: CacheEntry) -> dict[str, Any]:
    """An entry for people; `-` for what a key that is not a call's does not have."""
    try:
        key = entry.value
    except CacheFormatError:  # of a user's module
        key = None
    device, op, call = key if isinstance(key, (Key, HintsKey)) and is_key(key) else ("-", "-", "-")
    return {
        "device": device, "op": op, "call": call, "config": entry.config, "type": entry.type,
        "versions": entry.versions, "hints": isinstance(key, HintsKey), "key": entry.key, "file": entry.file_name,
    }  # fmt: skip


def _chooses(device: str, op: str) -> Callable[[CacheEntry], bool]:
    def chosen(entry: CacheEntry) -> bool:
        row = described(entry)
        return device in row["device"] and op in ("", row["op"], row["op"].rpartition("@")[0])

    return chosen


def _question(cache: PersistentCache, which: Callable[[CacheEntry], bool], everything: bool) -> str:
    """What `clear` asks; everything has damaged files and those of other versions in it, too."""
    count = sum(map(which, cache.entries()))
    others = len(cache.files()) - count if everything else 0
    more = f" and {_files(others)} that cannot be read here" if others else ""
    return f"Remove {_entries(count)}{more} from {cache.path}"


def _shown(row: dict[str, Any]) -> str:
    if row["hints"]:
        return "hints for shapes nearby"
    text = json.dumps(row["config"], separators=(",", ":"))
    return text if len(text) <= 100 else f"{text[:97]}..."


def _printable(text: str) -> str:
    """Text that can do nothing to a terminal, whoever wrote the entry."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _status(cache: PersistentCache) -> int:
    """1 where the disk failed, which the cache has told on standard error; a damaged file is no such failure."""
    return int(any(" failed: " in name and not name.endswith(_DAMAGED) for name in cache.stats))
