"""Trains a byte-level GPT of stock layers on real text, with its kernels swapped and tuned.

    python examples/train_gpt.py --size tiny --name first

It swaps the layers, times the step, tunes every kernel of it, trains inside the result, samples text, and
writes `runs/<name>/`: loss curve and tuning chart, the result as JSON, metrics as CSV, checkpoints. The model is one
of Flax NNX, Flax Linen or Equinox: `gpt/*_model.py` has each as a user would write it.

    python examples/train_gpt.py --mesh fsdp=4,model=2

spreads parameters and batches over eight devices, as `gpt/sharding.py` says; `docs/launching.md` is about several
processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from gpt.launch import Launch, Refused, agreed, in_first, mesh_sizes
from gpt.settings import Settings

SIZE = "smoke, tiny (default), small or gpt2-small; a Llama of ejlayers' own layers: llama-smoke or llama-1b"

MESH = "how many devices split what: sizes of some of data, fsdp, context and model, such as fsdp=2,model=4"


def main(
    framework: Annotated[str | None, typer.Option(help="nnx (default), linen or equinox")] = None,
    size: Annotated[str | None, typer.Option(help=SIZE)] = None,
    name: Annotated[str | None, typer.Option(help="folder in runs, replaced if it exists; default a new one")] = None,
    resume: Annotated[str | None, typer.Option(help="go on with a run: its name in runs, or its folder")] = None,
    steps: Annotated[int | None, typer.Option(help="steps of training; default that of the size")] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between checkpoints; default a tenth of all")] = None,
    result: Annotated[Path | None, typer.Option(help="use a result that was saved before, do not tune")] = None,
    compare: Annotated[bool | None, typer.Option("--compare", help="train the stock model beside it")] = None,
    corpus: Annotated[Path | None, typer.Option(help="folder of .py files; default the standard library")] = None,
    dtype: Annotated[str | None, typer.Option(help="compute type: float32 (default) or bfloat16")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of parameters and batches; default 0")] = None,
    runs: Annotated[Path, typer.Option(help="folder of runs")] = Path("runs"),
    mesh: Annotated[str | None, typer.Option(help=MESH)] = None,
    distributed: Annotated[bool, typer.Option("--distributed", help="this is one of several processes")] = False,
    coordinator: Annotated[str | None, typer.Option(help="HOST:PORT of process 0, if no cluster tells it")] = None,
    processes: Annotated[int | None, typer.Option(help="how many processes there are")] = None,
    process: Annotated[int | None, typer.Option(help="which of them this is, from 0")] = None,
) -> None:
    """Trains a byte-level GPT with swapped and tuned layers."""
    flags = {
        "framework": framework,
        "size": size,
        "dtype": dtype,
        "seed": seed,
        "steps": steps,
        "compare": compare,
        "corpus": None if corpus is None else str(corpus.resolve()),
    }
    for flag, given in {"steps": steps, "save-every": save_every}.items():
        if given is not None and given < 1:
            raise Refused(f"--{flag} is {given}; expected at least 1")
    launch = Launch(mesh_sizes(mesh), distributed, coordinator, processes, process)
    if distributed and name is None and resume is None:
        raise Refused("--distributed without --name; all processes must name the same run")
    if resume is None:
        _start(flags, name, save_every, result, runs, launch)
    else:
        for flag, given in {"name": name, "result": result}.items():
            if given is not None:
                raise Refused(f"--{flag} is {str(given)!r}; a run that is resumed has its own: leave it out")
        _resume(flags, runs / resume if (runs / resume).is_dir() else Path(resume), save_every, launch)


def _start(
    flags: dict, name: str | None, save_every: int | None, result: Path | None, runs: Path, launch: Launch
) -> None:
    """Begins a run."""
    settings = Settings(**{flag: given for flag, given in flags.items() if given is not None})
    if name is not None and (not name or set(name) & set("/\\\0") or name in (".", "..")):
        raise Refused(f"--name is {name!r}; expected a plain folder name")
    folder, text = runs / (name or _free_name(runs, settings.size)), _corpus(settings)
    launch.start()
    in_first("making the folder", lambda: _make(folder))
    given = None if result is None else _loaded("--result", result)  # what cannot be used must not cost any time
    settings = dataclasses.replace(settings, text=text.digest)
    _run(settings, text, folder, given, launch).go(_interval(save_every, settings))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # a run that is there stays as it is until this one has begun
    except OSError as error:
        raise Refused(f"cannot write to {folder}: {error.strerror}") from None


def _resume(flags: dict, folder: Path, save_every: int | None, launch: Launch) -> None:
    """Goes on with a run."""
    settings = Settings.of_run(folder)
    settings.refuse_others(flags)
    text = _corpus(settings)
    if text.digest != settings.text:
        raise Refused(f"--resume: the text is not that of {folder} any more; its batches cannot be had")
    launch.start()
    from gpt.checkpoints import last_step

    result = _loaded("--resume", folder / "result.json")
    step = last_step(folder)
    if step == 0:
        raise Refused(f"--resume: {folder} has no checkpoint; start it anew with --name {folder.name}")
    if step == settings.steps:
        raise Refused(f"--resume: {folder} has all of its {step} steps")
    _run(settings, text, folder, result, launch, step).go(_interval(save_every, settings), step)


def _run(settings: Settings, text: Any, folder: Path, result: Any, launch: Launch, step: int = 0) -> Any:
    from gpt.run import Run  # JAX and a framework start here, after all that can be refused was
    from gpt.sharding import Spread

    def told(spread: Spread) -> str:
        return f"{settings}, mesh {spread}, after step {step}"

    spread = agreed("the run", lambda: Spread.over(launch.mesh, settings.shape), told)
    return Run(settings, text, folder, result, spread)


def _interval(save_every: int | None, settings: Settings) -> int:
    return save_every or max(1, settings.steps // 10)


def _free_name(runs: Path, size: str) -> str:
    """A folder name that no run has yet: the size, then size-2, size-3, ..."""
    names = (size if number == 1 else f"{size}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (runs / name).exists())


def _corpus(settings: Settings) -> Any:
    from gpt.corpus import CorpusError, read_corpus

    try:
        return read_corpus(None if settings.corpus is None else Path(settings.corpus), settings.shape.context)
    except CorpusError as error:
        raise Refused(str(error)) from None


def _loaded(flag: str, file: Path) -> Any:
    from ejkernel_ops import AutotuningResult, EjkernelError

    try:
        return agreed("reading the result", lambda: AutotuningResult.load(file), lambda result: result.digest[:16])
    except EjkernelError as error:
        raise Refused(f"{flag}: {error}") from None
    except OSError as error:
        raise Refused(f"{flag}: cannot read {file}: {error.strerror}") from None


def run(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        return app(arguments, standalone_mode=False) or 0
    except Refused as error:
        text = str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a complaint about a flag
            raise
        text = error.format_message()
    print(f"train_gpt: {' '.join(text.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(run())
