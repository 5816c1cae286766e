"""What the NNX layers have in common: what a module pins, and what it does without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from flax.nnx.nn import dtypes

from ..fallback import no_kernel, no_type, run_stock
from ..pins import changed_pins


class Pinned:
    """Mixed into a layer after the stock class: attributes beside its own, and none as long as nothing is pinned.

    Attributes:
        config: what the module pins of its op's config.
        backend: the back end that the module pins.
        kernel_path: the module's dotted path, while `explain` asks for it.
        config_type: the config of the layer's op.
        kernel_of_layer: the kernel of the layer's op.
    """

    __slots__ = ()  # with this, and after the stock class, or else a stock object could not become one of ours

    config: Any = None
    backend: str | None = None
    kernel_path: str | None = None
    config_type: ClassVar[type]
    kernel_of_layer: ClassVar[Any]

    def pin(self, **fields: Any) -> Any:
        """Changes what the module pins and returns it; jitted functions retrace once.

        Args:
            **fields: of `config`, `backend`, `path` and, of attention, `reproducible` those that change.
        """
        for name, value in changed_pins(self, fields).items():
            if value is not getattr(type(self), name, None):
                setattr(self, name, value)
            elif name in vars(self):  # a module that pins nothing has the stock attributes
                delattr(self, name)
        return self

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None

    @classmethod
    def when_not(cls, module: Any) -> str | None:
        """When a module of ours computes as the stock one, as far as its attributes say; `None` if never."""
        return cls.why_not(module)

    @staticmethod
    def adopt(module: Any) -> None:
        """What a stock module needs beside the new class: nothing."""

    def release(self) -> None:
        """Takes away what `pin` added."""
        for name in ("config", "backend", "kernel_path", "reproducible"):
            if name in vars(self):
                delattr(self, name)

    def _stock(self, reason: str, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """The stock layer's own call."""
        return run_stock(self.kernel_of_layer, self.kernel_path, reason, run, *args, **kwargs)


def custom_types(module: Any, **parameters: Any) -> str | None:
    """Why no kernel computes in the types of a stock module; `None` where one does."""
    if module.promote_dtype is not dtypes.promote_dtype:
        return "custom promote_dtype"
    return no_kernel(**parameters) if module.dtype is None else no_type(module.dtype)


def no_type_of_call(module: Any, *operands: Any) -> str | None:
    """Why no kernel computes in the type that a call brings its operands to; `None` where one does."""
    return no_type(dtypes.canonicalize_dtype(*operands, dtype=module.dtype))
