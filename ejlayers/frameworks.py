"""Which framework a model is of: finds its adapter without importing any framework that is not in use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from ejkernel_ops import ConfigError

_ADAPTERS = {"flax.nnx": "ejlayers.nnx.graph"}  # framework module -> our adapter


def adapters() -> list[ModuleType]:
    """The adapters of the frameworks that are imported in this process."""
    return [importlib.import_module(ours) for theirs, ours in _ADAPTERS.items() if theirs in sys.modules]


def adapter_of(model: Any) -> ModuleType:
    """The adapter of a model's framework.

    Raises:
        ConfigError: the model is of no framework that is known.
    """
    for adapter in adapters():
        if adapter.is_model(model):
            return adapter
    raise ConfigError(f"model is a {type(model).__module__}.{type(model).__qualname__}; expected a flax.nnx.Module")
