"""What commands share: errors of users in one line, modules that they name, files that they pass."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ..errors import EjkernelError

FAILED = 2  # the exit status, as of arguments that cannot be parsed; 1 is an answer, such as that files differ

Modules = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import a module that makes kernels of your own; may be repeated."),
]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the command with one line where a user can do something about an error."""
    try:
        yield
    except (EjkernelError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Ends the command with one line on stderr."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(FAILED)


def import_modules(names: Iterable[str] | None) -> None:
    """Imports what the user named: no file says what is imported."""
    for name in names or ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            fail(f"cannot import {name!r}: {error}; is its folder on PYTHONPATH?")


def require_folder(path: Path) -> None:
    """Refuses a file to be written whose folder is not there, before any work is done for it."""
    if not path.parent.is_dir():
        fail(f"cannot write {path}: the folder {path.parent} does not exist")
