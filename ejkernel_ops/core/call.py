"""`Call`: all that is static about one call, as the parameter that both primitives carry."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError
from ..utils.fingerprint import is_array
from ..utils.values import stable_json
from .invocation import Invocation, bind_arguments, static_text
from .kernel import KERNELS, Kernel, row_kinds
from .snapshot import Snapshot


class _Array:
    """Stands for an array among the static leaves of a call."""

    def __repr__(self):
        return "array"


ARRAY = _Array()
_ARRAY_FORM = jax.ShapeDtypeStruct((), bool)  # its text is that of no static value


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call without its arrays: compared by value, so that equal calls share traces and programs.

    Args:
        kernel: what runs.
        names: the parameters that have a value, in signature order.
        treedef: structure of their values.
        leaves: static leaves, `ARRAY` where an array goes.
        kinds: row kind of each array (see `Kernel.rows`).
        explicit: explicit configs as `(op_id, config)` pairs, of either direction.
        snapshot: what the choice depends on besides.
        generation: count of cache writes when the call was made.
        residuals: whether the output is a pair of the kernel's output and what its gradient needs.
        forward: for a backward call, the call that it differentiates.
        needs: for a backward call, which of the forward's arrays want a gradient.
        axes: mesh axes of a `shard_map` around the call that split names of the kernel's `dims`, as pairs: the arrays
            are parts.
    """

    kernel: Kernel
    names: tuple[str, ...]
    treedef: Any
    leaves: tuple
    kinds: tuple
    explicit: tuple
    snapshot: Snapshot
    generation: int
    text: str
    residuals: bool = False
    forward: Call | None = None
    needs: tuple[bool, ...] | None = None
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @functools.cached_property
    def _identity(self) -> tuple:
        explicit = stable_json(self.explicit, where="config") if self.explicit else ""  # 1, 1.0 and True differ
        return (
            type(self.kernel), self.kernel.op_id_v, self.kernel.state(), self.text, self.treedef, self.kinds, explicit,
            self.snapshot, self.generation, self.residuals, self.needs, self.forward, self.axes,
        )  # fmt: skip

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        if self is other:
            return True
        return isinstance(other, Call) and self._hash == other._hash and self._identity == other._identity

    def __repr__(self):
        return self.kernel.op_id_v

    def arguments(self, operands: Sequence[Any]) -> inspect.BoundArguments:
        """The arguments of the call with these arrays in their places."""
        # JAX hands scalar constants to derivatives as Python numbers, which would look static.
        arrays = iter([jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x for x in operands])
        leaves = [next(arrays) if leaf is ARRAY else leaf for leaf in self.leaves]
        values = jax.tree.unflatten(self.treedef, leaves)
        return inspect.BoundArguments(self.kernel.signature, dict(zip(self.names, values)))  # type: ignore[arg-type]

    def by_rows(self, operands: Sequence[Any]) -> Call | None:
        """The call that gives for each row what this one's output is the sum of, if there is one."""
        if self.residuals or self.forward is not None:
            return None
        bound = self.arguments([jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in operands])
        changed = self.kernel.by_rows(bound.kwargs, dict(self.explicit).get(self.kernel.op_id))
        if changed is None:
            return None
        kwargs = {**bound.kwargs, **changed}
        more = self.explicit, self.snapshot, self.generation
        return make_call(self.kernel, bound.args, kwargs, *more, axes=self.axes)[0]

    def method(self, cfg: Any, operands: Sequence[Any], platform: str | None = None) -> Any:
        """The method of the kernel that computes the output with a config."""
        name = "fwd_with_residuals" if self.residuals else "run"
        if (backend := getattr(cfg, "backend", None)) is not None:
            return self.kernel.variant(name, backend, platform)
        return self.kernel.variant(name, None, platform, self.invocation(operands, platform))

    @functools.cached_property
    def needs_tree(self) -> Any:
        """`needs` in the structure of the forward's positional arguments, `False` for what is no array."""
        if self.forward is None or self.needs is None:
            return None
        wanted = iter(self.needs)
        leaves = [next(wanted) if leaf is ARRAY else False for leaf in self.forward.leaves]
        values = dict(zip(self.forward.names, jax.tree.unflatten(self.forward.treedef, leaves)))
        bound = inspect.BoundArguments(self.forward.kernel.signature, values)  # type: ignore[arg-type]
        return tuple(False if x is None else x for x in bound.args)

    def like(self, inv: Invocation) -> Call:
        """The static part of a call that differs from this one in the shapes of its arrays alone."""
        backward_of = None if self.forward is None else self.forward.kernel
        return dataclasses.replace(call_like(inv, backward_of)[0], needs=self.needs)

    def invocation(self, operands: Sequence[Any], platform: str | None = None) -> Invocation:
        """The abstract call, local shapes in place of arrays."""
        bound = self.arguments([_local(x) for x in operands])
        changed = self.kernel.alone(bound.kwargs)
        inv = Invocation(
            self.kernel, bound.args, {**bound.kwargs, **changed}, needs=self.needs_tree, residuals=self.residuals,
            platform=platform,
        )  # fmt: skip
        inv.override_cfg = dict(self.explicit).get(self.kernel.op_id)
        inv.call = self._with(inv) if changed else self
        return inv

    def _with(self, inv: Invocation) -> Call:
        """The same call with the static values of an abstract one."""
        more = {"residuals": self.residuals, "forward": self.forward, "needs": self.needs, "kinds": self.kinds}
        return make_call(
            self.kernel, inv.args, inv.kwargs, self.explicit, self.snapshot, self.generation, **more
        )[0]  # fmt: skip


def _local(x: Any) -> jax.ShapeDtypeStruct:
    """Shape of the part of an operand that one device holds, as far as its type tells (Explicit axes)."""
    aval = jax.typeof(x)
    sharding = getattr(aval, "sharding", None)
    shape = aval.shape
    if sharding is not None and not sharding.mesh.empty and any(s is not None for s in sharding.spec):
        shape = sharding.shard_shape(shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def explicit_pairs(kernel: Kernel, cfg: Any) -> tuple:
    """A caller's config as `(op_id, config)` pairs for a kernel and its backward."""
    if cfg is None:
        return ()
    kernels = [kernel, *([kernel.backward] if kernel.backward is not None else [])]
    if isinstance(cfg, dict):
        unknown = set(cfg) - {k.op_id for k in kernels}
        if unknown:
            expected = "a config" if kernel.config_cls is None else f"a {kernel.config_cls.__name__}"
            names = [k.op_id for k in kernels]
            raise ConfigError(f"cfg names {sorted(unknown, key=str)}; expected {expected}, or configs by {names}")
        pairs = tuple((k.op_id, cfg[k.op_id]) for k in kernels if k.op_id in cfg)
    else:
        fits = [k for k in kernels if k is kernel or k.config_cls is None or isinstance(cfg, k.config_cls)]
        pairs = tuple((k.op_id, k.narrow(cfg)) for k in fits)
    if kernel.config_cls is not None and not isinstance(cfg, (kernel.config_cls, dict)):
        expected = kernel.config_cls.__name__
        raise ConfigError(f"config of {kernel.op_id} is {cfg!r}; expected a {expected} or a dict by op name")
    try:
        hash(pairs)
    except TypeError:
        raise ConfigError(
            f"config of {kernel.op_id} is {cfg!r}, which cannot be hashed; make it a frozen dataclass"
        ) from None
    return pairs


def make_call(
    kernel: Kernel,
    args: tuple,
    kwargs: dict,
    explicit: tuple = (),
    snapshot: Snapshot | None = None,
    generation: int = 0,
    **more: Any,
) -> tuple[Call, list[Any]]:
    """Splits a call into its static part and its arrays.

    Raises:
        ConfigError: a static argument has no value-based form.
        TypeError: the arguments do not fit the kernel's signature.
    """
    bound = bind_arguments(kernel, args, kwargs)
    names, values = tuple(bound.arguments), tuple(bound.arguments.values())
    leaves, treedef = jax.tree.flatten(values)
    operands = [x for x in leaves if is_array(x)]
    text = stable_json([[n, static_text(kernel, n, _without_arrays(v))] for n, v in zip(names, values)])
    call = Call(
        kernel, names, treedef, tuple(ARRAY if is_array(x) else x for x in leaves),
        more.pop("kinds", None) or _kinds(kernel, bound), explicit, snapshot or Snapshot(), generation, text, **more,
    )  # fmt: skip
    return call, operands


def _without_arrays(value: Any) -> Any:
    if type(value) in (bool, int, float, str, type(None)):
        return value
    return jax.tree.map(lambda x: _ARRAY_FORM if is_array(x) else x, value)


def _kinds(kernel: Kernel, bound: inspect.BoundArguments) -> tuple:
    """The row kind of each array: that of its positional parameter; keyword arrays are shared."""
    kinds = row_kinds(kernel, len(bound.args))
    per_array = [k for k, value in zip(kinds, bound.args) for x in jax.tree.leaves(value) if is_array(x)]
    rest = [x for x in jax.tree.leaves(bound.kwargs) if is_array(x)]
    return (*per_array, *[None if kernel.rows is None else False for _ in rest])


def flatten_gradients(call: Call, gradients: Any) -> list[Any]:
    """The gradients that were asked for, in the order of the forward's arrays; zeros where `None` came.

    Args:
        call: a backward call.
        gradients: one entry for each positional argument of the forward, `None` allowed, and where the
            forward has keyword arrays a dict of theirs at the end.

    Raises:
        ConfigError: the count or a shape is wrong; the text names the argument.
    """
    forward = call.forward
    assert forward is not None
    assert call.needs is not None
    arrays = iter(range(len(call.needs)))
    places = jax.tree.unflatten(forward.treedef, [next(arrays) if x is ARRAY else None for x in forward.leaves])
    signature = forward.kernel.signature
    bound = inspect.BoundArguments(signature, dict(zip(forward.names, places)))  # type: ignore[arg-type]
    gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    given = list(gradients)
    by_name = given.pop() if len(given) == len(bound.args) + 1 and isinstance(given[-1], dict) else {}
    if len(given) != len(bound.args):
        raise ConfigError(
            f"{call.kernel.op_id_v} returned {len(given)} gradients; expected one for each of the "
            f"{len(bound.args)} positional arguments of {forward.kernel.op_id} (None where there is none)"
        )
    if unknown := sorted(set(by_name) - set(bound.kwargs)):
        raise ConfigError(
            f"{call.kernel.op_id_v} returned gradients for {unknown}, which are no keyword arguments of "
            f"{forward.kernel.op_id}; it has {sorted(bound.kwargs)}"
        )
    wanted = [
        name for name, place in bound.kwargs.items()
        if name not in by_name and any(call.needs[i] for i in jax.tree.leaves(place))
    ]  # fmt: skip
    if wanted:
        raise ConfigError(
            f"{call.kernel.op_id_v} returned no gradient for {wanted}, keyword arguments of {forward.kernel.op_id} "
            f"that want one; return it in a dict after the others, {{{wanted[0]!r}: gradient}} (None: none)"
        )
    found: dict[int, Any] = {}

    def keep(gradient, place):
        if gradient is None or place is None:
            return
        if not isinstance(place, int):
            raise ValueError("one array for several")
        found[place] = gradient

    named = [
        *zip(_positional_names(bound), bound.args, given),
        *((n, bound.kwargs.get(n), g) for n, g in by_name.items()),
    ]
    for name, place, gradient in named:
        try:
            jax.tree.map(keep, gradient, place, is_leaf=lambda x: x is None)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{call.kernel.op_id_v} returned a gradient for argument {name!r} of {forward.kernel.op_id} that does "
                f"not have the argument's structure: {error}"
            ) from None
    return [found.get(i) for i, needed in enumerate(call.needs) if needed]


def _positional_names(bound: inspect.BoundArguments) -> list[str]:
    """A name for each entry of `bound.args`."""
    names = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(value))]
        elif kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    return names


def backward_call(
    call: Call, operands: Sequence[Any], outputs: Any, cotangents: Any, live: tuple[bool, ...], kinds: tuple
) -> tuple[Call, list[Any]]:
    """The call of the backward kernel: operands, outputs, cotangents; keyword arguments as the forward's.

    With residuals, `outputs` is the pair of output and residuals, and both directions keep its structure.
    `kinds` are the row kinds of the output arrays and of the cotangent arrays.
    """
    kernel, bound = call.kernel.backward, call.arguments(operands)
    assert kernel is not None
    outs = outputs if isinstance(outputs, tuple) else (outputs,)
    cts = cotangents if isinstance(cotangents, tuple) else (cotangents,)
    if call.residuals:
        cts = cts[:1]  # a gradient method takes none of residuals
    split = sum(is_array(x) for x in jax.tree.leaves(bound.args))  # keyword arrays come last
    kinds = (*call.kinds[:split], *kinds, *call.kinds[split:])
    return make_call(
        kernel, (*bound.args, *outs, *cts), bound.kwargs, call.explicit, call.snapshot, call.generation,
        forward=call, needs=live, kinds=kinds, axes=call.axes,
    )  # fmt: skip


def num_cotangents(call: Call) -> int:
    """How many of a backward call's arrays are cotangents: the last, but for keyword arrays."""
    forward = call.forward
    assert forward is not None
    names = [name for name in call.names if name not in forward.kernel.signature.parameters]
    own = names[len(names) - (len(names) - forward.residuals) // 2 :]  # as many as outputs, residuals between them
    values = dict(zip(call.names, jax.tree.unflatten(call.treedef, call.leaves)))
    return sum(leaf is ARRAY for name in own for leaf in jax.tree.leaves(values[name]))


def call_like(inv: Invocation, forward: Kernel | None = None) -> tuple[Call, list[Any]]:
    """The static part and the arrays of a call that was recorded, loaded or made by hand.

    Args:
        inv: the call.
        forward: of a backward call, the kernel that it differentiates; default the one here that has it as backward.

    Raises:
        ConfigError: a backward call of a kernel that no kernel here has as its backward.
    """
    if inv.call is not None:
        return inv.call, inv.operands
    if inv.needs is None:
        return make_call(inv.kernel, inv.args, inv.kwargs, residuals=inv.residuals)
    if forward is None:
        forward = next((kernel for kernel in KERNELS.values() if kernel.backward == inv.kernel), None)
    if forward is None:
        raise ConfigError(f"{inv!r} has needs, but no kernel here has {inv.kernel.op_id_v} as its backward")
    args = inv.args[: len(inv.needs)]
    call, operands = make_call(forward, args, inv.kwargs, residuals=forward.defines("fwd_with_residuals"))
    pairs = zip(jax.tree.leaves(args), jax.tree.leaves(inv.needs))
    needs = [bool(needed) for x, needed in pairs if is_array(x)]
    needs += [False] * (len(operands) - len(needs))  # of keyword arrays
    kinds = (None,) * len(jax.tree.leaves((inv.args, inv.kwargs)))
    return make_call(inv.kernel, inv.args, inv.kwargs, forward=call, needs=tuple(needs), kinds=kinds)


def gradient_types(call: Call, operands: Sequence[Any]) -> list[Any]:
    """The forward's arrays that want a gradient, taken out of a backward call's operands."""
    forward = call.forward
    assert forward is not None
    assert call.needs is not None
    bound = call.arguments(operands)
    plain = forward.arguments([None] * sum(x is ARRAY for x in forward.leaves))
    named = {**bound.arguments, **bound.kwargs}
    values = (*bound.args[: len(plain.args)], *(named[name] for name in plain.kwargs))  # in the forward's order
    arrays = [x for x in jax.tree.leaves(values) if is_array(x)]
    return [x for x, needed in zip(arrays, call.needs) if needed]
