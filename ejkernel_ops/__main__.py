"""`python -m ejkernel_ops`: the commands of this package. Nothing touches a device before one of them runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from .commands import cache, result
from .commands.doctor import doctor
from .commands.frame import run
from .commands.tune import tune

app = typer.Typer(help="Tunable, labelled kernels for JAX.", add_completion=False, rich_markup_mode=None)
app.add_typer(cache.app, name="cache")
app.command()(doctor)
app.add_typer(result.app, name="result")
app.command()(tune)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    return run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
