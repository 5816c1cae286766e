"""Weights of checkpoints in Hugging Face's naming, read into a model of any framework."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .patterns import matches

M = TypeVar("M")
_WEIGHTS = {"kernel", "scale", "embedding", "weight"}  # what Flax and Equinox call what is `weight` there
_TRANSPOSED = {"kernel"}  # Flax has inputs first, Hugging Face (and Equinox) outputs


def from_huggingface(
    model: M, tensors: Mapping[str, Any], names: Mapping[str, str], *, ignore: Iterable[str] = ()
) -> M:
    """Fills the parameters of a model with tensors of a Hugging Face checkpoint.

    Args:
        model: a Flax NNX or Equinox module, abstract or not, or the parameters of a Linen model.
        tensors: by name, as `safetensors.numpy.load_file` returns them; linear weights are `(out, in)`.
        names: dotted path of a module here -> name of the module there, with the same wildcards on both sides: `*` is
            one name or a part of one, `**` any number of names. Heads of attention may be an axis of their own here.
        ignore: patterns of tensors that the model has no place for (`*` is one name, `**` any number).

    Returns:
        The model: of Flax NNX the same object, of the others a new pytree. Types, and shardings, are those it had.

    Raises:
        TypeError: a Linen module, which has no parameters.
        ValueError: a parameter that no tensor fills, a tensor without a place, or of another size, or other wildcards
            on the two sides of a name; nothing is changed.

    Example:
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> tensors = {"h.0.dense.weight": np.ones((3, 2)), "h.0.dense.bias": np.arange(3.0)}
        >>> from_huggingface(model, tensors, {"layers.*": "h.*.dense"}).layers[0].bias[...]
        Array([0., 1., 2.], dtype=float32)
    """
    _refuse_description(model)
    _check_wildcards(names)
    nnx: Any = sys.modules.get("flax.nnx")
    is_nnx: bool = isinstance(model, getattr(nnx, "Module", ()))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param) if is_nnx else model)
    sources = {i: _source(_dotted(path), names, tensors) for i, (path, leaf) in enumerate(leaves) if _is_array(leaf)}
    ignored = tuple(ignore)
    left = [n for n in tensors if n not in sources.values() and not any(matches(p, n) for p in ignored)]
    if left:
        raise ValueError(
            f"tensors have no place in the model: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}; name their "
            "modules in names, or ignore them"
        )
    filled = [
        _fitted(sources[i], tensors[sources[i]], _dotted(path), leaf) if i in sources else leaf
        for i, (path, leaf) in enumerate(leaves)
    ]
    tree = jax.tree.unflatten(treedef, filled)
    if not is_nnx:
        return tree
    nnx.update(model, tree)
    return model


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")  # or what stands for one in an abstract model


def _dotted(path: tuple[Any, ...]) -> str:
    """The path of a leaf, without what NNX has between a Variable and its array."""
    names = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))) for key in path]
    is_variable = len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value"
    return ".".join(map(str, names[:-1] if is_variable else names))


def _source(parameter: str, names: Mapping[str, str], tensors: Mapping[str, Any]) -> str:
    """The tensor that fills a parameter."""
    module, _, last = parameter.rpartition(".")
    for here, there in names.items():
        there = _translated(module, here, there)
        if there is None:
            continue
        name = f"{there}.{'weight' if last in _WEIGHTS else last}".lstrip(".")
        if name in tensors:
            return name
        raise ValueError(f"parameter {parameter} should be tensor {name!r} as names has it, which is not there")
    raise ValueError(f"parameter {parameter} has no entry in names; add one for {module!r}")


# `**` with the dot that goes with it, which is not there where it is no name at all.
_WILDCARDS = {"**.": r"((?:[^.]+\.)*)", ".**": r"((?:\.[^.]+)*)", "**": "(.*)", "*": "([^.]*)"}
_WILDCARD = re.compile(r"(\*\*\.|\.\*\*$|\*\*|\*)")


def _translated(module: str, here: str, there: str) -> str | None:
    """The name there of a module here; `None` where the pattern is another's.

    Example:
        >>> _translated("blocks.3.mlp.up", "blocks.*.**", "h.*.**"), _translated("a.b.c", "a.*", "*")
        ('h.3.mlp.up', None)
    """
    pattern = "".join(_WILDCARDS.get(part, re.escape(part)) for part in _WILDCARD.split(here))
    if (found := re.fullmatch(pattern, module)) is None:
        return None
    values = iter(found.groups())

    def filled(wildcard: re.Match) -> str:
        value = next(values).strip(".")
        return wildcard[0].replace("**", "*").replace("*", value) if value else ""

    return _WILDCARD.sub(filled, there)


def _refuse_description(model: Any) -> None:
    """Refuses a Linen module."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        name = type(model).__name__
        raise TypeError(f"model is the Linen module {name}, which holds no parameters; pass model.init(...)['params']")


def _check_wildcards(names: Mapping[str, str]) -> None:
    """Refuses names whose two sides have other wildcards."""
    for here, there in names.items():
        if re.findall(r"\*+", here) != re.findall(r"\*+", there):
            raise ValueError(f"names has {here!r}: {there!r}; expected the same wildcards, * and **, on both sides")


def _fitted(name: str, tensor: Any, parameter: str, leaf: Any) -> Any:
    """A tensor in the layout, shape, type and sharding of a parameter."""
    if parameter.rpartition(".")[2] in _TRANSPOSED and tensor.ndim > 2:
        raise ValueError(f"tensor {name!r} has sizes {tensor.shape}; expected a matrix for the kernel {parameter}")
    transposed = parameter.rpartition(".")[2] in _TRANSPOSED and tensor.ndim == 2
    tensor = tensor.T if transposed else tensor
    sizes = (leaf.shape, tensor.shape)
    if leaf.size != tensor.size or not _is_split(*sizes):
        raise ValueError(f"tensor {name!r} has sizes {sizes[1]} for parameter {parameter}, which has {sizes[0]}")
    array = jnp.asarray(np.asarray(tensor).reshape(leaf.shape), leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    is_free = isinstance(leaf, jax.Array) and not leaf.committed  # it goes where other operands are, and shall go on so
    return array if sharding is None or is_free else jax.device_put(array, sharding)


def _is_split(here: tuple[int, ...], there: tuple[int, ...]) -> bool:
    """Whether sizes are those of a tensor with some of its axes split, such as that of all heads."""
    rest = list(here)
    for size in there:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return all(size == 1 for size in rest)
