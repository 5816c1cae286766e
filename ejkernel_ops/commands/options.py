"""What several commands are told in the same way: modules to import, files to write."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError

Modules = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import a module that makes kernels of your own; may be repeated."),
]


def import_modules(names: Iterable[str] | None) -> None:
    """Imports what the user named: no file says what is imported."""
    for name in names or ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"cannot import {name!r}: {error}; is its folder on PYTHONPATH?") from None


def require_folder(path: Path) -> None:
    """Refuses a file to be written whose folder is not there, before any work is done for it."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: the folder {path.parent} does not exist")
