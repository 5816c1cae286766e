"""`set_config`: changes what the layers of a model pin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_ops import ConfigError

from .frameworks import adapters
from .plan import RuleBook, Rules


def set_config(tree: Any, rules: Rules) -> Any:
    """Changes the configs that modules pin, anywhere in a pytree; jitted functions retrace once.

    Args:
        tree: a model, an optimizer or its state, a `TrainState` of Flax whose `apply_fn` is that of a swapped model, or
            any pytree of them; then paths begin with that of the model in the pytree.
        rules: path pattern or type -> config, `None` or `False` to pin nothing, or `True` to leave it as it is.

    Returns:
        The tree; of Flax NNX the same objects, changed in place, of Equinox and Linen new ones. Where a model of
        Equinox has an optimizer state already, that has to be changed too: `model, state = set_config((model, state),
        {"**.attention": ...})`.

    Raises:
        ConfigError: a rule that matches nothing, as those for a model that was not swapped, or a config for a layer of
            another kind.

    Example:
        >>> from flax import nnx
        >>> from ejkernel_ops import FwdParams, LinearConfig
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> _ = set_config(model, {"**": LinearConfig(fwd=FwdParams(blocksize_m=64))})
        >>> model.config.fwd.blocksize_m
        64
    """
    if rules is None:
        raise ConfigError("rules is None; expected a mapping; to pin nothing anywhere pass {'**': None}")
    if isinstance(rules, Mapping):
        rules = {pattern: False if value is None else value for pattern, value in rules.items()}
    book = RuleBook(rules, pins=True)
    changes = [adapter.chosen(tree, book) for adapter in adapters()]
    book.refuse_unused()
    for change in changes:  # only after all rules are known to be good
        tree = change(tree)
    return tree
