"""Files that are written as a whole or not at all, and read up to a size."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

from ..errors import CacheFormatError

MAX_BYTES = 64 << 20  # of a file that people pass to each other
_PART = re.compile(r"\.tmp-[0-9a-f]{16}")


def replace_file(path: str | os.PathLike, text: str) -> None:
    """Puts text into a file; who reads it meanwhile sees all of the old one or all of the new one.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {path}: the folder {path.parent} does not exist")
    part = path.with_name(f".tmp-{secrets.token_hex(8)}")  # a name of its own for each writer, of any thread or process
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)  # nothing after it may fail: the file is there
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def read_file(path: str | os.PathLike) -> bytes:
    """The bytes of a file from somebody else; a data set or a device that was named by mistake is not read to its end.

    Raises:
        CacheFormatError: larger than 64 MiB.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise CacheFormatError(f"larger than {MAX_BYTES >> 20} MiB")
    return raw


def leftovers(folder: Path, seconds: float) -> list[Path]:
    """The parts that killed writers left in a folder at least so long ago; younger ones may still be written to."""
    before, found = time.time() - seconds, []
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # its writer was still there
                if _PART.fullmatch(file.name) and file.stat(follow_symlinks=False).st_mtime <= before:
                    found.append(Path(file.path))
    return found
