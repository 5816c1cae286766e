"""What the Linen layers have in common: the config and back end that a module pins, and its path."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax.core import meta
from flax.linen import dtypes

from ..fallback import no_type, run_stock
from ..functional import explaining
from ..pins import check_pins
from .twins import undecorated


class Pinned:
    """Mixed into a layer before the stock class; the layer has the fields `config` and `backend`.

    Attributes:
        config_type: the config of the layer's op.
        kernel_of_layer: the kernel of the layer's op.
    """

    config_type: ClassVar[type]
    kernel_of_layer: ClassVar[Any]

    def __post_init__(self: Any) -> None:
        """Refuses what is wrong with the pinned fields where the layer is made."""
        check_pins(self)
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def kernel_path(self: Any) -> str | None:
        """The module's dotted path, while `explain` asks for it."""
        return (".".join(self.path) or type(self).__name__) if explaining() else None

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None

    @classmethod
    def when_not(cls, module: Any) -> str | None:
        """When a module of ours computes as the stock one, as far as its fields say; `None` if never."""
        return cls.why_not(module)

    def _stock(self, reason: str, stock: type, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the stock layer, in the midst of ours."""
        return run_stock(
            self.kernel_of_layer, self.kernel_path, reason, undecorated(stock, method), self, *args, **kwargs
        )


def custom_types(module: Any) -> str | None:
    """Why no kernel computes in the types of a stock module; `None` where one does."""
    if getattr(module, "promote_dtype", dtypes.promote_dtype) is not dtypes.promote_dtype:
        return "custom promote_dtype"
    return no_type(module.param_dtype if module.dtype is None else module.dtype)


def no_type_of_call(module: Any, x: Any, *names: str) -> str | None:
    """Why no kernel computes in the type that a call brings input and parameters to; `None` where one does."""
    variables = {name: meta.unbox(module.get_variable("params", name)) for name in names}
    made = jax.numpy.zeros((), module.param_dtype)  # of the type of parameters that are not there before `init`
    operands = [made if p is None else p for p in variables.values()]
    return no_type(dtypes.canonicalize_dtype(x, *operands, dtype=module.dtype))
