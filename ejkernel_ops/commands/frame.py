"""How a command is run, and how what goes wrong is told: one line on standard error, and an exit status."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import EjkernelError

PROGRAM = "python -m ejkernel_ops"


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name.

    Args:
        app: all commands. One returns its exit status, or `None` for 0.
        arguments: default those of the process.

    Returns:
        The exit status: that of the command, of which 1 is an answer, such as that files differ; 2 where it failed.

    Raises:
        SystemExit: with status 2, where no such command can be run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)  # this package's own: told, whatever Python was started with
        warnings.showwarning = _show_warning
        try:
            return app(arguments, prog_name=PROGRAM, standalone_mode=False) or 0
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)  # of the command that was named, if there is such a one
            _say(f"{error.format_message()} ({context.command_path if context else PROGRAM} --help tells more)")
            sys.exit(error.exit_code)
        except typer.Abort:
            _say("nothing was done")
            return 1
        except OSError as error:
            where = error.filename2 or error.filename
            _say(f"{where}: {error.strerror}" if where else str(error))
        except EjkernelError as error:
            _say(str(error))
    return 2


def _show_warning(message: Warning | str, *where: Any) -> None:
    _say(f"warning: {message}")


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)
