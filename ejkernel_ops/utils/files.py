"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


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
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
