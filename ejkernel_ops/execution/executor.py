"""`Executor`: runs kernels with configs of one chooser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..config.cache import generation
from ..config.selection import ConfigChooser, ConfigSelectorChain, default_selector
from ..core.call import explicit_pairs
from ..core.invocation import Invocation
from ..core.kernel import Kernel, require_kernel
from ..core.partition import require_manual
from ..core.primitive import call_kernel
from ..core.snapshot import Snapshot, current, with_selector
from ..errors import ConfigError
from ..utils.fingerprint import is_array

__all__ = ["ConfigChooser", "Executor", "default_executor"]


class Executor:
    """Runs kernels with the configs that a chooser picks.

    Args:
        chooser: a `ConfigSelectorChain`, or anything with `choose(inv, kernel)`; `None` is the default
            selector of the moment.

    Raises:
        ConfigError: the chooser has no method `choose`.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel_ops import ConfigSelectorChain
        >>> from ejkernel_ops.kernels import LINEAR
        >>> executor = Executor(ConfigSelectorChain())
        >>> executor(LINEAR, jnp.ones((2, 3)), jnp.ones((3, 4)))[0].shape
        (2, 4)
    """

    def __init__(self, chooser: ConfigChooser | None = None):
        if chooser is not None and not hasattr(chooser, "choose"):
            raise ConfigError(f"chooser is {chooser!r}; expected something with a method choose(inv, kernel)")
        self._chooser = chooser

    @property
    def chooser(self) -> ConfigChooser:
        """What picks configs."""
        return default_selector() if self._chooser is None else self._chooser

    def __call__(
        self, kernel: Kernel, *args: Any, cfg: Any = None, mesh_axes: Mapping[str, str] | None = None, **kwargs: Any
    ) -> Any:
        """Runs a kernel.

        Args:
            kernel: the kernel.
            *args: its arguments.
            cfg: an explicit config; its `None` fields inherit.
            mesh_axes: inside `jax.shard_map`, names of the kernel's `dims` with the mesh axis that splits each: every
                array with such a name is then a part of the whole, and the devices do together what one would do.
            **kwargs: its keyword arguments.

        Returns:
            The kernel's output.

        Raises:
            ConfigError: a bad config, an argument without a value-based form, or `mesh_axes` outside of a `shard_map`.
            UnsupportedError: the explicit back end cannot do the call.
        """
        require_kernel(kernel)
        pairs = tuple((name, (axis,)) for name, axis in (mesh_axes or {}).items())
        require_manual(kernel, mesh_axes or {})
        return call_kernel(kernel, args, kwargs, explicit_pairs(kernel, cfg), self._snapshot(), generation(), pairs)

    def choose_config(self, kernel: Kernel, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """The config that a call would get, without running it; arguments may be abstract."""
        require_kernel(kernel)
        args, kwargs = kernel.prepare(*args, **kwargs)
        inv = Invocation(kernel, args, kwargs, override_cfg=dict(explicit_pairs(kernel, cfg)).get(kernel.op_id))
        if isinstance(self.chooser, ConfigSelectorChain):
            return self.chooser.choose_for(inv, current(), generation()).cfg
        return self.chooser.choose(inv, kernel)

    def compile(self, kernel: Kernel, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """Compiles a call ahead of time, for its arrays alone; arguments may be abstract."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

        def run(*arrays):
            given = dict(zip(places, arrays))
            args, kwargs = jax.tree.unflatten(treedef, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            return self(kernel, *args, cfg=cfg, **kwargs)

        return jax.jit(run).lower(*[leaves[index] for index in places]).compile()

    def _snapshot(self) -> Snapshot:
        snapshot = current()
        if self._chooser is None or snapshot.selector is self._chooser:
            return snapshot
        return with_selector(snapshot, self._chooser)


_DEFAULT = Executor()


def default_executor() -> Executor:
    """The executor of ops that are called without one: it uses the default selector.

    Returns:
        The same object in each call.

    Example:
        >>> default_executor() is default_executor()
        True
    """
    return _DEFAULT
