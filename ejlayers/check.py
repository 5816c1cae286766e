"""`check`: how far the results of swapped layers are from the stock ones'."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import ConfigError

from .frameworks import adapter_of


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Largest differences between two models.

    Args:
        output_abs: of the outputs, absolute.
        output_rel: of the outputs, relative to the largest output.
        grad_abs: of the gradients of all float parameters and inputs, absolute.
        grad_rel: of the gradients, relative to the largest entry of them all.
        modules: if asked for, by path: the same where that layer alone is one of ours.

    Example:
        >>> CheckReport(0.0, 0.0, 0.0, 0.0).output_abs
        0.0
    """

    output_abs: float
    output_rel: float
    grad_abs: float
    grad_rel: float
    modules: Mapping[str, CheckReport] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        text = (
            f"outputs differ by at most {self.output_abs:.3g} ({self.output_rel:.3g} of the largest), "
            f"gradients by {self.grad_abs:.3g} ({self.grad_rel:.3g})"
        )
        if self.modules is None:
            return text
        from ejkernel_ops.utils.text_table import text_table  # rich, which only printing needs

        names = ("output_abs", "output_rel", "grad_abs", "grad_rel")
        rows = [[path, *(f"{getattr(m, name):.3g}" for name in names)] for path, m in self.modules.items()]
        columns = ("this layer alone", "outputs", "relative", "gradients", "relative")
        return f"{text}\n{text_table(columns, rows, right=columns[1:])}"


def check(model: Any, *inputs: Any, per_module: bool = False, where: Any = None, **kwargs: Any) -> CheckReport:
    """Compares outputs and gradients of a swapped model with those of its stock layers.

    The gradients are those of a fixed random combination of the outputs. Turn dropout off first: the layers draw
    other bits than the stock ones. A query that may see no key, such as one of padding, gives 0 in our attention and
    the mean of all values in the stock one: pass `where` to leave such outputs out.

    Args:
        model: a swapped model; or the original, and the swapped one as the first of `inputs`.
        *inputs: what the model is called with; for Linen the variables come first.
        per_module: also compare for each layer a model in which it alone is one of ours; each is compiled.
        where: bool, with the first axes of the outputs, such as `(batch, length)`: those that count, in the gradients
            too. Outputs with other axes count whole. Default all.
        **kwargs: keyword arguments of the call.

    Returns:
        Largest differences.

    Raises:
        ConfigError: a model of no known framework, or one that was not swapped; of Linen, a rule that matches nothing.
        ValueError: models whose outputs or parameters have different structures or shapes, or a `where` that fits none
            of the outputs.
        TypeError: a `where` that is not bool.

    Example:
        >>> from flax import nnx
        >>> import ejlayers
        >>> model = ejlayers.swap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> check(model, nnx.Rngs(1).normal((2, 3))).output_abs < 1e-5
        True
    """
    adapter = adapter_of(model)
    if inputs and adapter.is_model(inputs[0]):
        original, model, inputs = model, inputs[0], inputs[1:]
        rows = adapter.rows(model, inputs, kwargs)
    else:
        rows = adapter.rows(model, inputs, kwargs)
        if not any(row.replaced for row in rows):
            raise ConfigError("no layer of model is one of ours; pass what ejlayers.swap(model) returned")
        original = adapter.original(model)
    want = adapter.value_and_grads(original, inputs, kwargs, where)

    def compared(model: Any) -> CheckReport:
        got = adapter.value_and_grads(model, inputs, kwargs, where)
        return CheckReport(*_difference(want[0], got[0]), *_difference(want[1], got[1]))

    report = compared(model)
    if not per_module:
        return report
    paths = [row.path for row in rows if row.replaced]
    return dataclasses.replace(report, modules={path: compared(adapter.only(model, path)) for path in paths})


def _combination(out: Any) -> Any:
    """A scalar that depends on every float output."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    leaves = [part for x in leaves for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    leaves = [jnp.asarray(x, jnp.float32) for x in leaves]
    parts = [jnp.vdot(jax.random.normal(key, x.shape), x) for key, x in zip(keys, leaves)]
    return sum(parts, jnp.zeros(()))


def _counted(out: Any, where: Any) -> Any:
    """Outputs with 0 where they do not count."""
    if where is None:
        return out
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"where is {where.dtype}; expected bool, true for the outputs that count")
    shapes = [jnp.shape(x) for x in jax.tree.leaves(out)]
    if where.shape not in [shape[: where.ndim] for shape in shapes]:
        raise ValueError(f"where has shape {where.shape}; expected the first axes of an output, of shapes {shapes}")

    def counted(x):
        fits = jnp.shape(x)[: where.ndim] == where.shape
        return jnp.where(where.reshape(where.shape + (1,) * (jnp.ndim(x) - where.ndim)), x, 0) if fits else x

    return jax.tree.map(counted, out)


def value_and_grads(call: Any, params: Any, inputs: tuple, kwargs: dict, where: Any = None) -> tuple[Any, Any]:
    """Outputs of `call(params, inputs, kwargs)`, and gradients of a combination of them by parameters and inputs."""
    leaves, treedef = jax.tree.flatten((inputs, kwargs))
    arrays = (jax.Array, np.ndarray)
    floats = [i for i, x in enumerate(leaves) if isinstance(x, arrays) and jnp.issubdtype(x.dtype, jnp.floating)]

    @jax.jit
    def run(params, given):
        def loss(params, given):
            filled = [given[floats.index(i)] if i in floats else x for i, x in enumerate(leaves)]
            out = _counted(call(params, *jax.tree.unflatten(treedef, filled)), where)
            return _combination(out), out

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, given)
        return out, grads

    return run(params, [leaves[i] for i in floats])


def _difference(first: Any, second: Any) -> tuple[float, float]:
    """Largest absolute difference of two trees, and the same relative to the largest entry of the first.

    The largest of all, not of each leaf: some gradients, such as that of a key's bias, are exactly 0 but for rounding.
    """
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (first, second)]
    if shapes[0] != shapes[1]:  # what their structures are does not matter: gradients have the classes of the layers
        raise ValueError(f"the models have outputs, or gradients, of different shapes: {shapes[0]} and {shapes[1]}")
    pairs = [[_wide(x) for x in pair] for pair in zip(jax.tree.leaves(first), jax.tree.leaves(second))]
    worst = np.max([0.0, *(_worst(a, b) for a, b in pairs)])
    largest = np.max([0.0, *(np.abs(a[np.isfinite(a)]).max(initial=0.0) for a, _ in pairs)])
    return float(worst), float(worst / max(largest, 1e-30))


def _wide(x: Any) -> np.ndarray:
    """An array in the widest type of its kind."""
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def _worst(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference; equal infinities and NaNs on both sides are equal, on one side infinitely far."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))
