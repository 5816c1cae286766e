"""`python -m ejkernel_ops`: the commands of this package. Nothing touches a device before one of them runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import doctor

_COMMANDS = (doctor,)  # each has an `add_command`, which adds a parser; its `run(options)` gives the exit status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m ejkernel_ops", description="Tunable, labelled kernels for JAX.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for module in _COMMANDS:
        module.add_command(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
