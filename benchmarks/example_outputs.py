"""Runs the examples that `docs/examples.md` shows, and writes what they print into it: `make examples`.

    python benchmarks/example_outputs.py

A block of the page that begins with `$ python examples/...` is replaced by that line and the output of the command,
cut to what can be read. What was tuned earlier on the machine does not count. Takes some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import jax
from charts import ROOT

PAGE = ROOT / "docs" / "examples.md"
FIRST, LAST, WIDTH = 8, 11, 128  # lines of an output, and characters of a line; more is cut
_BLOCK = re.compile(r"(?<=```console\n)\$ python (examples/[^\n]*)\n(.*?)(?=```)", re.DOTALL)
_MACHINE = re.compile(r"(?<=<!-- begin -->).*?(?=<!-- end -->)", re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """The commands of a page, each with what the page says that it prints."""
    return _BLOCK.findall(page)


def printed(command: str) -> str:
    """What an example prints, in a folder and with a cache of its own.

    Raises:
        CalledProcessError: it fails.
    """
    script, *arguments = command.split()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPATH": str(ROOT), "EJKERNEL_CACHE_DIR": folder, "COLUMNS": str(WIDTH)}
        done = subprocess.run(
            [sys.executable, ROOT / script, *arguments], cwd=folder, env=os.environ | environment, check=True,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    return done.stdout


def cut(output: str) -> str:
    """The first and the last lines."""
    lines = [line.rstrip() if len(line) <= WIDTH else f"{line[: WIDTH - 1].rstrip()}…" for line in output.splitlines()]
    kept = [*lines[:FIRST], "...", *lines[-LAST:]] if len(lines) > FIRST + LAST + 1 else lines
    return "".join(f"{line}\n" for line in kept)


def renewed(page: str, run: Callable[[str], str], machine: str) -> str:
    """The page with what its commands print on a machine."""
    page = _BLOCK.sub(lambda block: f"$ python {block[1]}\n{cut(run(block[1]))}", page)
    return _MACHINE.sub(lambda _: machine, page)


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    device, today = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    where = f"{os.cpu_count()} CPU cores" if device == "cpu" else device
    about = f"{where} (load {os.getloadavg()[0]:.1f} before, jax {jax.__version__}, {today})"
    PAGE.write_text(renewed(PAGE.read_text(), printed, about))


if __name__ == "__main__":
    main()
