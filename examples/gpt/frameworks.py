"""What the training loop knows of a model, whatever framework it is made with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import jax

from .settings import Settings
from .sizes import Size


class Training(Protocol):
    """What each of the modules `nnx_model`, `linen_model`, `equinox_model` and `llama_model` has.

    A state is the parameters and the optimizer: with NNX objects that change in place, else a pytree.

    Attributes:
        BASELINE: what the model is before anything is swapped or tuned.
    """

    BASELINE: str

    def new_state(self, size: Size, dtype: Any, seed: int, steps: int, prepared: Callable = ...) -> Any:
        """The state to begin with; `prepared` is what is done to the model before: `ejlayers.swap`."""
        ...

    def abstract(self, make: Callable[[], Any]) -> Any:
        """What a function makes, a state, with arrays that are only described."""
        ...

    def train_step(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        """The state after a step, and the loss before it."""
        ...

    def eval_step(self, state: Any, tokens: jax.Array) -> jax.Array:
        """The loss of a batch."""
        ...

    def next_logits(self, state: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Logits of the byte after the first `length` ones of a padded context."""
        ...

    def arrays_of(self, state: Any) -> Any:
        """All arrays of a state, to be saved."""
        ...

    def with_arrays(self, state: Any, arrays: Any) -> Any:
        """The state with saved arrays for its own."""
        ...


def training_of(settings: Settings) -> Training:
    """The module that has the model and its steps."""
    return importlib.import_module(f"gpt.{'llama' if settings.is_llama else settings.framework}_model")  # type: ignore
