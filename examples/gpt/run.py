"""One run, from the text to the pictures."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejlayers
from ejkernel_ops import AutotuningResult, ConfigSelectorChain, find_labels_in_lowered, policy_override
from ejkernel_ops.execution.local_calls import with_local_labels
from ejkernel_ops.utils.meta import program_text, split_label

from . import charts
from .checkpoints import Checkpoints, arrays_of, remove_checkpoints, with_arrays
from .corpus import Corpus
from .frameworks import training_of
from .launch import in_first, is_first
from .metrics import Metrics
from .progress import bar, console, log_tuning, memory_mib
from .sampling import sample
from .settings import Settings
from .sharding import Spread

RESULT = "result.json"
_COMPARED = 200  # steps


class Run:
    """Swaps, tunes, trains, samples, draws; or goes on with training.

    A run has one or two states: of the swapped model, and of the one that it is compared with. Where it has several
    processes all of them do the same, and the first one writes and prints.
    """

    def __init__(
        self, settings: Settings, corpus: Corpus, folder: Path, result: AutotuningResult | None, spread: Spread
    ):
        self.settings, self.size, self.corpus = settings, settings.shape, corpus
        self.folder, self.result, self.spread = folder, result, spread
        self.training = training_of(settings)

    def go(self, save_every: int, first_step: int = 0) -> None:
        """Runs from a step whose checkpoint is there, or from the beginning."""
        with self.spread.entered():
            self._go(save_every, first_step)

    def _go(self, save_every: int, first_step: int) -> None:
        started = time.monotonic()
        self._introduce()
        states = {"tuned": self._new_state(ejlayers.swap)}
        result = self._tuned(states["tuned"]) if self.result is None else self.result
        self._show(result, states["tuned"])
        if self.settings.compare or not first_step:
            states["baseline"] = self._new_state()
        if first_step:
            console.print(f"[bold]resumed[/]   after step {first_step}")
        else:
            states = self._timed(states, result)
            in_first("beginning", lambda: self._begin(result))
        if not self.settings.compare:
            states.pop("baseline", None)
        state, held_out = self._train(states, result, save_every, first_step)
        console.print(f"[bold]held out[/]  {held_out:.4f} nats per byte")
        self._sample(state, result)
        if is_first():
            charts.tuning_chart(self.folder / "tuning.png", result)
        console.print(f"[bold]wrote[/]     {self.folder}: loss.png tuning.png {RESULT} metrics.csv checkpoints")
        console.print(f"[bold]took[/]      {time.monotonic() - started:.0f} s")

    def _introduce(self) -> None:
        megabytes = [f"{len(part) / 1e6:.1f} MB" for part in (self.corpus.train, self.corpus.held_out)]
        console.print(f"[bold]text[/]      {self.corpus.files} files, {megabytes[0]}, {megabytes[1]} held out")
        device = f"{jax.devices()[0].device_kind}, {jax.device_count()} of them, {self.settings.dtype}"
        console.print(f"[bold]device[/]    {device}")
        if self.spread.mesh is not None:
            console.print(f"[bold]mesh[/]      {self.spread}, {jax.process_count()} processes")

    def _new_state(self, *prepared: Any) -> Any:
        s = self.settings
        return self.spread.state(
            self.training,
            lambda: self.training.new_state(self.size, jnp.dtype(s.dtype), s.seed, s.steps, *prepared),
        )

    def _batch(self, step: int) -> Any:
        return self.spread.batch(self.corpus.batch(self.size.batch, self.size.context, self.settings.seed, step))

    def _tuned(self, state: Any) -> AutotuningResult:
        selector = ConfigSelectorChain(on_event=log_tuning)  # no disk: each run shows its own tuning
        return ejlayers.tune(self.training.train_step, state, self._batch(0), selector=selector, sync=True)

    def _show(self, result: AutotuningResult, state: Any) -> None:
        """Says how many of the step's kernels the result has configs for: one of another size has none."""
        program = program_text(self.training.train_step.lower(state, self._batch(0)))
        labels = find_labels_in_lowered(with_local_labels(program))
        known = {(key.op_id_v, key.call_key) for key in result.as_overlay()}
        covered = sum(split_label(label) in known for label in labels)
        console.print(f"[bold]result[/]    has configs for {covered} of the {len(labels)} kernels of this step")
        if covered == 0 and labels:
            console.print("          [yellow]it is of another model, batch or mesh: heuristics are used[/]")
        else:
            console.print(str(result), markup=False, soft_wrap=True)

    def _steps(self, result: AutotuningResult) -> dict[str, Any]:
        """The training step of the swapped model with its result, and of the one before it."""
        step = self.training.train_step
        return {"tuned": result.wrap(step), "baseline": _untuned(step)}

    def _timed(self, states: dict[str, Any], result: AutotuningResult) -> dict[str, Any]:
        """Says what a training step of both models takes, in turns; returns the states as they were before."""
        steps, batch, arrays = self._steps(result), self._batch(0), arrays_of(self.training, states)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(9):
            for name, step in steps.items():
                start = time.perf_counter()
                states[name], _loss = jax.block_until_ready(step(states[name], batch))
                times[name].append((time.perf_counter() - start) * 1e3)
        before, after = (statistics.median(times[name][2:]) for name in ("baseline", "tuned"))  # the first compiles
        what = "swapped and tuned" if self.training.BASELINE == "stock" else "tuned"
        gain = f"{before / after:.2f}x"
        console.print(f"[bold]step[/]      {self.training.BASELINE} {before:.1f} ms, {what} {after:.1f} ms: {gain}")
        return with_arrays(self.training, states, arrays)

    def _begin(self, result: AutotuningResult) -> None:
        """Takes the folder over from a run that may have been there."""
        remove_checkpoints(self.folder)
        self.settings.save(self.folder)
        result.save(self.folder / RESULT)

    def _train(
        self, states: dict[str, Any], result: AutotuningResult, save_every: int, first_step: int
    ) -> tuple[Any, float]:
        """Trains from a step on; returns the swapped model's state and its last held-out loss."""
        last, steps = self.settings.steps, self._steps(result)
        with (
            Checkpoints(self.folder, self.training) as checkpoints,
            Metrics(self.folder / "metrics.csv", first_step, writes=is_first()) as metrics,
            bar() as progress,
        ):
            if first_step:
                states = checkpoints.restored(first_step, states)
            task = progress.add_task("training", total=last, completed=first_step)
            for index in range(first_step + 1, last + 1):
                row = self._step(index, states, steps)
                is_told = index % max(1, last // 10) == 0 or index == last
                if is_told:
                    row["held_out"] = self._held_out(states["tuned"], result)
                metrics.add(row)
                line = f"loss {row['loss']:.3f}  {row['tokens_per_s'] / 1e3:.1f}k tokens/s  {row['memory_mib']} MiB"
                progress.update(task, advance=1, description=line)
                if is_told:
                    console.print(f"  step {index:5d}  {line}  held out {row['held_out']:.3f}")
                if index % save_every == 0 or index == last:
                    checkpoints.save(index, states)
        if self.settings.compare:
            first = min(_COMPARED, last)
            console.print(
                f"[bold]compared[/]  losses differ by at most {metrics.apart(first):.1e} over the first {first} steps"
            )
        if is_first():
            charts.loss_curve(self.folder / "loss.png", metrics.rows, self.training.BASELINE)
        return states["tuned"], metrics.rows[-1]["held_out"]

    def _step(self, index: int, states: dict[str, Any], steps: dict[str, Any]) -> dict[str, Any]:
        """Takes a step with each state; returns its numbers."""
        batch, row = self._batch(index), {"step": index}
        start = time.perf_counter()
        for name, loss_name in (("tuned", "loss"), ("baseline", "baseline_loss")):
            if name in states:
                states[name], loss = steps[name](states[name], batch)
                row[loss_name] = float(loss)
            if name == "tuned":
                row["tokens_per_s"] = round(self.size.batch * self.size.context / (time.perf_counter() - start))
        return row | {"memory_mib": round(memory_mib())}

    def _held_out(self, state: Any, result: AutotuningResult) -> float:
        evaluate = result.wrap(self.training.eval_step)
        batches = self.corpus.validation(self.size.batch, self.size.context, 8)
        return statistics.fmean(float(evaluate(state, self.spread.batch(batch))) for batch in batches)

    def _sample(self, state: Any, result: AutotuningResult) -> None:
        def next_logits(*args: Any) -> jax.Array:
            return self.spread.whole(self.training.next_logits(state, *args))

        console.print("[bold]sample[/]    after 'def ':")
        with result:
            text = sample(next_logits, b"def ", 240, self.size.context, self.settings.seed)
        console.print(text, markup=False, style="dim")


def _untuned(step: Any) -> Any:
    """A step whose kernels, where it has any, run with their heuristics."""

    def run(*args: Any) -> Any:
        with policy_override(mode="off"):
            return step(*args)

    return run
