"""`doctor`: what is installed and runs here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .. import doctor as examination


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
    probe: Annotated[str | None, typer.Option(hidden=True)] = None,  # what its own children are asked
) -> int:
    """What is installed, and what runs here.

    And what to do about back ends that do not; exit status 1 if one that should does not.
    """
    if probe:
        return examination.probe(probe)
    report = examination.examine()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    return 0 if report.ok else 1
