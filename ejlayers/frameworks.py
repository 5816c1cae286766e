"""Which framework a model is of: finds its adapter without importing any framework that is not in use."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

from ejkernel_ops import ConfigError

from .plan import Plan, Row, RuleBook

_OURS = {  # framework module -> our module whose ADAPTER it is
    "flax.nnx": "ejlayers.nnx.adapter",
    "flax.linen": "ejlayers.linen.adapter",
    "equinox": "ejlayers.equinox.adapter",
}
FRAMEWORKS = tuple(name.split(".")[1] for name in _OURS.values())
_MODULES = tuple(f"{name}.Module" for name in _OURS)


def require(framework: str, module: str) -> None:
    """Imports the framework of a module of layers, or says how to get it."""
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ModuleNotFoundError(
            f"{module} needs {framework}, which is not installed: pip install 'ejlayers[{framework}]'", name=framework
        ) from None


class Adapter(Protocol):
    """What is done around models of one framework.

    Attributes:
        replacements: stock class -> ours.
    """

    replacements: dict[type, type]

    def is_model(self, tree: Any) -> bool:
        """Whether an object is a module of the framework."""
        ...

    def holds_model(self, tree: Any) -> bool:
        """Whether a pytree has a module of the framework in it."""
        ...

    def swapped(self, model: Any, plan: Plan) -> Any:
        """A model, or a pytree with some, with ours for stock layers as a plan says; in place where that works."""
        ...

    def rows(self, model: Any, inputs: tuple, kwargs: dict) -> list[Row]:
        """What its layers are."""
        ...

    def original(self, model: Any) -> Any:
        """A stock model over the same parameters."""
        ...

    def reverted(self, model: Any) -> Any:
        """The model with its stock layers back; in place where the framework works so."""
        ...

    def only(self, model: Any, path: str) -> Any:
        """A model over the same parameters in which one layer alone is one of ours."""
        ...

    def chosen(self, tree: Any, book: RuleBook) -> Callable[[Any], Any]:
        """Asks rules for the configs of a pytree's layers; what it returns makes the pytree that pins them."""
        ...

    def with_paths(self, tree: Any) -> Any:
        """A copy of a pytree in which each of our modules knows its path; the copy shares all arrays."""
        ...

    def meeting_all(self) -> contextlib.AbstractContextManager:
        """Context in which a model that runs refuses rules that match none of its layers."""
        ...

    def value_and_grads(self, model: Any, inputs: tuple, kwargs: dict, where: Any) -> tuple[Any, Any]:
        """Outputs of a model, and gradients of a combination of them with respect to parameters and float inputs."""
        ...


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that are imported in this process."""
    return [importlib.import_module(ours).ADAPTER for theirs, ours in _OURS.items() if theirs in sys.modules]


def is_nnx(tree: Any) -> bool:
    """Whether an object is a module of Flax NNX: as it may hold itself, no other framework may walk into it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(tree, nnx.Module)


def adapter_of(model: Any, *, or_tree: bool = False) -> Adapter:
    """The adapter of a model's framework; if asked for, that of a model in a pytree.

    Raises:
        ConfigError: the model is of no framework that is known.
    """
    for adapter in adapters():
        if adapter.is_model(model) or (or_tree and adapter.holds_model(model)):
            return adapter
    raise ConfigError(
        f"model is a {type(model).__module__}.{type(model).__qualname__}; expected a {' or '.join(_MODULES)}"
    )
