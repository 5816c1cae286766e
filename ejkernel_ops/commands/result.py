"""`python -m ejkernel_ops result`: files of tuned configs shown, compared, merged and drawn, of any device."""

from __future__ import annotations

import enum
import functools
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CacheFormatError, ConfigError
from ..execution.result import AutotuningResult
from ..execution.result_json import read
from ..utils.files import read_file
from .options import Modules, import_modules, require_folder

app = typer.Typer(no_args_is_help=True, help="Files of tuned configs: show, diff, merge, plot.")
File = Annotated[Path, typer.Argument(help="A file that `AutotuningResult.save` wrote.")]


class Prefer(enum.StrEnum):
    """Whose config is taken where files have two for one call."""

    FIRST = "first"
    LAST = "last"


@app.command()
def show(
    file: File,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    modules: Modules = None,
) -> None:
    """Shows what was tuned, how much faster it is, and what was not tuned and why."""
    import_modules(modules)
    result = _read(file, allow_unknown_ops=True)
    typer.echo(result.to_markdown() if markdown else str(result))


@app.command()
def diff(first: File, second: File, modules: Modules = None) -> int:
    """Shows calls that only one file has (- the first, + the second) or that have other configs (!).

    The exit status is 1 where the files differ, and 2 where they cannot be compared.
    """
    import_modules(modules)
    found = _read(first).diff(_read(second))
    typer.echo(str(found))
    return 1 if found else 0


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Files of one device model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    prefer: Annotated[
        Prefer | None, typer.Option(help="Whose config is taken where two have one for a call; without it, an error.")
    ] = None,
    modules: Modules = None,
) -> None:
    """Writes one file with every call of several."""
    require_folder(out)
    import_modules(modules)
    side = {None: None, Prefer.FIRST: "self", Prefer.LAST: "other"}[prefer]
    merged = functools.reduce(lambda first, second: first.merge(second, prefer=side), map(_read, files))
    merged.save(out)
    typer.echo(f"{out}: {len(merged.entries)} calls, digest {merged.digest[:16]}")


@app.command()
def plot(
    file: File,
    out: Annotated[Path, typer.Argument(help="The picture: .png, .svg or .pdf.")],
    modules: Modules = None,
) -> None:
    """Draws each call's gain and the times of its candidates."""
    import_modules(modules)
    _read(file, allow_unknown_ops=True).plot(out)
    typer.echo(str(out))


def _read(path: Path, allow_unknown_ops: bool = False) -> AutotuningResult:
    """A result as it is, for whatever device: nothing is entered here."""
    try:
        return read(AutotuningResult, read_file(path), allow_unknown_ops)
    except CacheFormatError as error:
        raise CacheFormatError(f"{path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}, with --import MODULE") from None
