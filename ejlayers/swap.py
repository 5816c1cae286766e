"""`swap`: replaces the stock layers of a model."""

from __future__ import annotations

from typing import Any, TypeVar

from .frameworks import adapter_of
from .plan import Plan, Rules

M = TypeVar("M")


def swap(model: M, *, rules: Rules | None = None, config: Any = None, reproducible: bool | None = None) -> M:
    """Replaces the stock layers of a model by ours: same parameters, same state, same checkpoints.

    Flax NNX models are changed in place: same objects, so optimizers, tied and stacked layers stay as they are. Of
    Linen a new module is returned, whose layers are exchanged while it runs, and whose rules are tried then; of Equinox
    a new pytree: swap before the optimizer's state is made, or both at once, `swap((model, state))`. Layers with
    functions of one's own (`attention_fn`, `dot_general`, `promote_dtype`), those that no kernel computes, and
    subclasses, are left alone; `report` says so. Swapping twice is swapping once.

    Args:
        model: a `flax.nnx.Module`, `flax.linen.Module` or `equinox.Module`, a `TrainState` of Flax whose `apply_fn` is
            that of one, or a pytree of them; then paths begin with that of the model in the pytree.
        rules: path pattern or type -> config to pin, `True`, or `False` to leave the layer alone; the first
            that matches wins, layers that none matches are replaced.
        config: config to pin in each replaced layer that takes it, or a list of configs of several kinds.
        reproducible: whether gradients of attention are the same bits in each run. `False` lets them be summed in any
            order, which is faster on GPUs from head_dim 128 on; default what a layer has, at first `True`. It is
            `deterministic` of `flash_attention`; in layers that name is about dropout already.

    Returns:
        The model: the same object, of Linen and Equinox a new one.

    Raises:
        ConfigError: a model of no known framework, a rule that matches nothing, a config or a `reproducible` that no
            layer takes.
        TypeError: a `reproducible` that is no bool.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> isinstance(model, nnx.Linear), type(model) is ejlayers.nnx.Linear
        (True, True)
    """
    return adapter_of(model, or_tree=True).swapped(model, Plan(rules, config, reproducible))
