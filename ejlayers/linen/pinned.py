"""What the Linen layers have in common: the config and back end that a module pins, and its path."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import linen as nn
from flax.linen import dtypes

from ejkernel_ops.kernels.config import explicit_config

from ..functional import explaining


class Pinned:
    """Mixed into a layer before the stock class; the layer has the fields `config` and `backend`.

    Attributes:
        config_type: the config of the layer's op.
    """

    config_type: ClassVar[type]

    def __post_init__(self: Any) -> None:
        """Refuses what is wrong with the pinned fields where the layer is made."""
        explicit_config(self.config_type, self.config, None, self.backend)
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def kernel_path(self: Any) -> str | None:
        """The module's dotted path, while `explain` asks for it."""
        return (".".join(self.path) or type(self).__name__) if explaining() else None

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None


def custom_promotion(module: Any) -> str | None:
    """Whether a stock module brings its types together in a way of its own."""
    return None if module.promote_dtype is dtypes.promote_dtype else "custom promote_dtype"
