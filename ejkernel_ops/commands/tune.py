"""`python -m ejkernel_ops tune`: saved calls in, tuned configs out, without the model that made the calls."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..config.persistent import PersistentCache
from ..config.selection import ConfigSelectorChain
from ..errors import ConfigError
from ..execution.offline import autotune_recorded
from ..execution.tuning import Autotuner
from ..registry import clear_invocations, load_invocations, recorded_devices
from ..utils.fingerprint import device_fingerprint
from .options import Modules, import_modules, require_folder


def tune(
    file: Annotated[Path, typer.Argument(help="A file that `save_invocations` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file of the result.")],
    here: Annotated[bool, typer.Option("--here", help="Tune calls that were saved on another device model.")] = False,
    budget_s: Annotated[float, typer.Option(min=0.1, help="Seconds for each call.")] = 60.0,
    isolate: Annotated[bool, typer.Option("--isolate", help="Try candidates in a child process.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take what the disk cache has, and add what is tuned.")
    ] = True,
    modules: Modules = None,
) -> None:
    """Tunes the calls of a file on this device, and writes the result."""
    require_folder(out)
    import_modules(modules)
    clear_invocations()
    device = device_fingerprint()
    load_invocations(file, device=device if here else None)
    others = recorded_devices()
    if not others.pop(device, 0):
        raise ConfigError(
            f"{file} has no call of this device, {device}; pass --here to tune calls of another one on it"
        )
    if others:
        count = others.total()
        left = "1 call of another device is" if count == 1 else f"{count} calls of other devices are"
        warnings.warn(f"{file}: {left} left out; --here tunes {'it' if count == 1 else 'them'} too", stacklevel=2)
    tuner = Autotuner(budget_s=budget_s, isolate=isolate)
    result = autotune_recorded(ConfigSelectorChain(persistent=PersistentCache() if cache else None, tuner=tuner))
    result.save(out)
    typer.echo(str(result))
    if not result.entries:
        raise ConfigError(f"{out}: no call could be tuned; the lines above say why")
    typer.echo(f"written to {out}")
