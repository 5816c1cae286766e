"""What the NNX layers have in common: the config and back end that a module pins."""

from __future__ import annotations

from typing import Any, ClassVar

from ejkernel_ops.kernels.config import explicit_config


class Pinned:
    """Mixed into a layer after the stock class: attributes beside its own, and none as long as nothing is pinned.

    Attributes:
        config: what the module pins of its op's config.
        backend: the back end that the module pins.
        kernel_path: the module's dotted path, while `explain` asks for it.
        config_type: the config of the layer's op.
    """

    __slots__ = ()  # with this, and after the stock class, or else a stock object could not become one of ours

    config: Any = None
    backend: str | None = None
    kernel_path: str | None = None
    config_type: ClassVar[type]

    def pin(self, **fields: Any) -> Any:
        """Changes `config`, `backend` or `path` and returns the module; jitted functions retrace once."""
        explicit_config(self.config_type, fields.get("config"), None, fields.get("backend"))  # an error now, not later
        for name, value in fields.items():
            name = "kernel_path" if name == "path" else name
            if value is not None or name in vars(self):  # a module that pins nothing keeps the stock attributes
                setattr(self, name, value)
        return self

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a stock module cannot become this one; `None` where it can."""
        return None

    @staticmethod
    def adopt(module: Any) -> None:
        """What a stock module needs beside the new class: nothing."""

    def release(self) -> None:
        """Takes away what `pin` added."""
        for name in ("config", "backend", "kernel_path"):
            if name in vars(self):
                delattr(self, name)
