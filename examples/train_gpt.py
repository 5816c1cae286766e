"""Trains a byte-level GPT of stock Flax NNX layers on real text, with its kernels swapped and tuned.

    python examples/train_gpt.py --size tiny --name first

It swaps the layers, times the step, tunes every kernel of it, trains inside the result, samples text, and
writes `runs/<name>/`: loss curve and tuning chart, the result as JSON, metrics as CSV.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

_TYPES = {"float32", "bfloat16"}


class Refused(Exception):
    """Something the user asked for that cannot be done: one line and exit status 2."""


def main(
    size: Annotated[str, typer.Option(help="smoke, tiny, small or gpt2-small")] = "tiny",
    name: Annotated[str | None, typer.Option(help="folder in runs, replaced if it exists; default a new one")] = None,
    steps: Annotated[int | None, typer.Option(help="steps of training; default that of the size")] = None,
    result: Annotated[Path | None, typer.Option(help="use a result that was saved before, do not tune")] = None,
    compare: Annotated[bool, typer.Option(help="train the stock model beside it")] = False,
    corpus: Annotated[Path | None, typer.Option(help="folder of .py files; default the standard library")] = None,
    dtype: Annotated[str, typer.Option(help="compute type: float32 or bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="seed of parameters and batches")] = 0,
    runs: Annotated[Path, typer.Option(help="folder of runs")] = Path("runs"),
) -> None:
    """Trains a byte-level GPT with swapped and tuned layers."""
    from gpt.model import SIZES  # JAX starts here, after the flags are known to parse

    if size not in SIZES:
        raise Refused(f"--size is {size!r}; expected one of {', '.join(SIZES)}")
    if dtype not in _TYPES:
        raise Refused(f"--dtype is {dtype!r}; expected one of {', '.join(sorted(_TYPES))}")
    if steps is not None and steps < 1:
        raise Refused(f"--steps is {steps}; expected at least 1")
    if name is not None and (not name or set(name) & set("/\\\0") or name in (".", "..")):
        raise Refused(f"--name is {name!r}; expected a plain folder name")
    Run(
        SIZES[size],
        dtype,
        steps or SIZES[size].steps,
        seed,
        compare,
        result,
        corpus,
        runs / (name or _free_name(runs, size)),
    ).go()


def _free_name(runs: Path, size: str) -> str:
    """A folder name that no run has yet: the size, then size-2, size-3, ..."""
    names = (size if number == 1 else f"{size}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (runs / name).exists())


class Run:
    """One run, from the text to the pictures."""

    def __init__(self, size, dtype, steps, seed, compare, result_file, corpus_folder, folder):
        from gpt.corpus import CorpusError, read_corpus

        self.size, self.dtype, self.steps, self.seed, self.compare = size, dtype, steps, seed, compare
        self.folder, self.rows, self.result_file = folder, [], result_file
        try:
            self.corpus = read_corpus(corpus_folder, size.context)
        except CorpusError as error:
            raise Refused(str(error)) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # a run that is there stays as it is until this one has begun
        except OSError as error:
            raise Refused(f"cannot write to {folder}: {error.strerror}") from None

    def go(self) -> None:
        """Swaps, tunes, trains, samples, draws."""
        import jax
        from gpt import charts
        from gpt.model import sample
        from gpt.progress import console

        import ejlayers

        started = time.monotonic()
        megabytes = [f"{len(part) / 1e6:.1f} MB" for part in (self.corpus.train, self.corpus.held_out)]
        console.print(f"[bold]text[/]      {self.corpus.files} files, {megabytes[0]}, {megabytes[1]} held out")
        console.print(f"[bold]device[/]    {jax.devices()[0].device_kind}, {jax.device_count()} of them, {self.dtype}")
        given = self._loaded()  # a file that cannot be used must not cost any time
        stock, model = self._new_model(), self._new_model()
        ejlayers.swap(model[0])
        replaced = sum(row.replaced for row in ejlayers.report(model[0]).rows)
        console.print(f"[bold]swapped[/]   {replaced} layers")
        result = self._tuned(model) if given is None else given
        covered, calls = self._covered(model, result)
        console.print(f"[bold]result[/]    has configs for {covered} of the {calls} kernels of this step")
        if covered == 0 and calls > 0:
            console.print("          [yellow]it is of another model or batch: heuristics are used[/]")
        else:
            console.print(str(result), markup=False, soft_wrap=True)
        stock_ms, tuned_ms = self._step_times(stock, model, result)
        gain = f"{stock_ms / tuned_ms:.2f}x"
        console.print(f"[bold]step[/]      stock {stock_ms:.1f} ms, swapped and tuned {tuned_ms:.1f} ms: {gain}")
        result.save(self.folder / "result.json")
        held_out = self._train(model, stock if self.compare else None, result)
        console.print(f"[bold]held out[/]  {held_out:.4f} nats per byte")
        console.print("[bold]sample[/]    after 'def ':")
        with result:
            console.print(sample(model[0], b"def ", 240, self.size.context, self.seed), markup=False, style="dim")
        charts.loss_curve(self.folder / "loss.png", self.rows, held_out)
        charts.tuning_chart(self.folder / "tuning.png", result)
        console.print(f"[bold]wrote[/]     {self.folder}: loss.png tuning.png result.json metrics.csv")
        console.print(f"[bold]took[/]      {time.monotonic() - started:.0f} s")

    def _new_model(self) -> tuple[Any, Any]:
        import jax.numpy as jnp
        from flax import nnx
        from gpt.model import GPT, make_optimizer

        model = GPT(self.size, jnp.dtype(self.dtype), nnx.Rngs(self.seed))
        return model, make_optimizer(model, self.size, self.steps)

    def _loaded(self) -> Any:
        from ejkernel_ops import AutotuningResult, EjkernelError

        if self.result_file is None:
            return None
        try:
            return AutotuningResult.load(self.result_file)
        except EjkernelError as error:
            raise Refused(f"--result: {error}") from None
        except OSError as error:
            raise Refused(f"--result: cannot read {self.result_file}: {error.strerror}") from None

    def _covered(self, model: tuple[Any, Any], result: Any) -> tuple[int, int]:
        """How many of the step's kernels the result has configs for: one of another size has none."""
        from gpt.model import train_step

        from ejkernel_ops import find_labels_in_lowered
        from ejkernel_ops.utils.meta import split_label

        labels = find_labels_in_lowered(train_step.lower(*model, self._batch()))
        known = {(key.op_id_v, key.call_key) for key in result.as_overlay()}
        return sum(split_label(label) in known for label in labels), len(labels)

    def _batch(self) -> Any:
        return next(self.corpus.batches(self.size.batch, self.size.context, self.seed + 1))

    def _step_times(self, stock: tuple[Any, Any], model: tuple[Any, Any], result: Any) -> list[float]:
        """Median milliseconds of a training step of both models, taking turns, on copies of them."""
        import jax
        from flax import nnx
        from gpt.model import train_step

        steps = [(train_step, nnx.clone(stock, arrays=True)), (result.wrap(train_step), nnx.clone(model, arrays=True))]
        times, batch = [[], []], self._batch()
        for _ in range(9):
            for samples, (step, copy) in zip(times, steps):
                start = time.perf_counter()
                jax.block_until_ready(step(*copy, batch))
                samples.append((time.perf_counter() - start) * 1e3)
        return [statistics.median(samples[2:]) for samples in times]  # the first compiles

    def _tuned(self, model: tuple[Any, Any]) -> Any:
        from gpt.model import train_step
        from gpt.progress import log_tuning

        import ejlayers
        from ejkernel_ops import ConfigSelectorChain

        selector = ConfigSelectorChain(on_event=log_tuning)  # no disk: each run shows its own tuning
        return ejlayers.tune(train_step, *model, self._batch(), selector=selector)

    def _train(self, model: tuple[Any, Any], stock: tuple[Any, Any] | None, result: Any) -> float:
        """Trains; returns the last held-out loss."""
        from gpt.model import train_step
        from gpt.progress import bar, console, memory_mib

        step = result.wrap(train_step)  # only the step is keyed by the result, not what else is jitted here
        batches = self.corpus.batches(self.size.batch, self.size.context, self.seed)
        tokens, every, held_out, apart = self.size.batch * self.size.context, max(1, self.steps // 10), 0.0, 0.0
        with bar() as progress, open(self.folder / "metrics.csv", "w", 1, newline="") as file:
            fields = ["step", "loss", "stock_loss", "held_out", "tokens_per_s", "memory_mib"]
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            task, since = progress.add_task("training", total=self.steps), time.perf_counter()
            for index, batch in zip(range(1, self.steps + 1), batches):
                loss = float(step(*model, batch))
                now = time.perf_counter()
                stock_loss = "" if stock is None else float(train_step(*stock, batch))
                if stock_loss != "" and index <= 200:
                    apart = max(apart, abs(loss - stock_loss))
                speed, since = tokens / (now - since), time.perf_counter()
                measured = index % every == 0 or index == self.steps
                held_out = self._held_out(model[0], result) if measured else held_out
                since = time.perf_counter() if measured else since
                row = dict(
                    zip(
                        fields,
                        (index, loss, stock_loss, held_out if measured else "", round(speed), round(memory_mib())),
                    )
                )
                self.rows.append(row)
                writer.writerow(row)
                line = f"loss {loss:.3f}  {speed / 1e3:.1f}k tokens/s  {memory_mib():.0f} MiB"
                progress.update(task, advance=1, description=line)
                if measured:
                    console.print(f"  step {index:5d}  {line}  held out {held_out:.3f}")
        if stock is not None:
            console.print(
                f"[bold]compared[/]  losses differ by at most {apart:.1e} over the first {min(200, self.steps)} steps"
            )
        return held_out

    def _held_out(self, model: Any, result: Any) -> float:
        from gpt.model import eval_step

        evaluate = result.wrap(eval_step)
        batches = self.corpus.validation(self.size.batch, self.size.context, 8)
        return statistics.fmean(float(evaluate(model, batch)) for batch in batches)


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
