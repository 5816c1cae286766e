"""Checkpoints of a run: each device writes and reads its own part, and the mesh may be another one than before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from .frameworks import Training

_FOLDER = "checkpoints"


class Checkpoints:
    """The last two states of a run, in its folder. All processes save and restore together.

    A run has one or two states: of the swapped model, and of the one that it is compared with.
    """

    def __init__(self, folder: Path, training: Training):
        self.training = training
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager((folder / _FOLDER).absolute(), options=options)

    def save(self, step: int, states: dict[str, Any]) -> None:
        """Writes the states after a step, while training goes on."""
        self._manager.save(step, args=ocp.args.StandardSave(arrays_of(self.training, states)))

    def restored(self, step: int, states: dict[str, Any]) -> dict[str, Any]:
        """The states after a step, each array spread as it is in the given ones."""
        found = self._manager.restore(step, args=ocp.args.StandardRestore(arrays_of(self.training, states)))
        return with_arrays(self.training, states, found)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()  # waits for what is being written


def last_step(folder: Path) -> int:
    """The last step of a run whose checkpoint is whole; 0 where there is none."""
    return max((int(p.name) for p in (folder / _FOLDER).glob("*") if p.name.isdigit()), default=0)


def remove_checkpoints(folder: Path) -> None:
    """Removes those of a run that was in a folder before."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def arrays_of(training: Training, states: dict[str, Any]) -> dict[str, Any]:
    """The arrays of each state."""
    return {name: training.arrays_of(state) for name, state in states.items()}


def with_arrays(training: Training, states: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Each state with other arrays."""
    return {name: training.with_arrays(state, arrays[name]) for name, state in states.items()}
