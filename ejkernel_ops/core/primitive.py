"""The two primitives behind every call: `kernel_p` runs a kernel, `tangent_p` is its derivative.

Config and label come from a call's own operands where it is lowered, so shapes are final: vmapped axes
are folded in, shapes inside `shard_map` are local, and nothing is recorded that does not run.
`tangent_p` is linear in the tangents and transposes into a `kernel_p` of the backward kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..config.cache import generation
from ..config.choice import describe
from ..config.selection import choose, heuristic, tunes_on_call
from ..errors import ConfigError, UnsupportedError
from ..registry import SharedCall, record, record_shared
from ..utils.fingerprint import device_of
from ..utils.labelled import marked, scope_name
from ..utils.meta import SHARED, label
from ..utils.values import short_hash, stable_json
from ..utils.varying import equally_varying
from ..utils.versions import tuned_with
from . import partition
from .batching import fold_or_loop
from .call import Call, backward_call, flatten_gradients, gradient_types, make_call, num_cotangents
from .dims import Arrays, arrays_of, lacking, summed_axes
from .gradient_methods import plain_gradients
from .kernel import BACKENDS, is_float
from .shards import Plan, Tools, on_shards
from .spread import spread

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_OPAQUE = ("triton", "pallas", "cudnn")  # back ends that JAX cannot differentiate


def call_kernel(kernel, args: tuple, kwargs: dict, explicit: tuple, snapshot, generation: int, axes: tuple = ()) -> Any:
    """Binds one call; returns the kernel's output."""
    args, kwargs = kernel.prepare(*args, **kwargs)
    call, operands = make_call(kernel, args, kwargs, explicit, snapshot, generation, axes=axes)
    operands = equally_varying(operands)  # so that a weight's gradient inside shard_map gets its psum
    outs = kernel_p.bind(*operands, call=call)
    return jax.tree.unflatten(output_tree(call, operands), outs)


# What a call computes


def execute(call: Call, cfg: Any, operands: Sequence[Any], platform: str | None = None) -> list[Any]:
    """Runs the kernel of a call with a given config; returns flat outputs."""
    bound = call.arguments(operands)
    method = call.method(cfg, operands, platform)
    extra = {} if call.forward is None else {"needs": call.needs_tree}
    with _mixing_types():
        out = method(*bound.args, **bound.kwargs, cfg=cfg, **extra)
    if call.forward is None:
        return jax.tree.leaves(out)
    wanted = gradient_types(call, operands)
    return [_gradient(call, g, like) for g, like in zip(flatten_gradients(call, out), wanted)]


def _mixing_types() -> contextlib.AbstractContextManager:
    """Kernels add up in other types than those of operands, also where a user's code must not mix any."""
    return jax.numpy_dtype_promotion("standard")


def _gradient(call: Call, gradient: Any, like: Any) -> Any:
    if gradient is None:
        return jnp.zeros_like(like)
    gradient = jnp.asarray(gradient)
    if gradient.shape != like.shape:
        raise ConfigError(f"{call.kernel.op_id_v} returned a gradient {gradient.shape} for an operand {like.shape}")
    return gradient.astype(like.dtype)


def _run(*operands: Any, call: Call, platform: str | None = None) -> list[Any]:
    """The call as plain JAX code, config chosen."""
    if call.axes:
        return _among_others(*operands, call=call, platform=platform)
    cfg = choose(call.invocation(operands, platform), call.snapshot, call.generation).cfg
    return _on_auto_axes(lambda *operands: execute(call, cfg, operands, platform), operands, call)


def output_tree(call: Call, operands: Sequence[Any]) -> Any:
    """The structure of a call's output."""
    return _output(call, tuple(map(jax.typeof, operands)))[0]


def _output(call: Call, avals: tuple) -> tuple[Any, list[Any]]:
    """Structure and types of the output."""
    return _cached_output(call, avals, jax.sharding.get_abstract_mesh(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(maxsize=4096)
def _cached_output(call: Call, avals: tuple, mesh: Any, x64: bool) -> tuple[Any, list[Any]]:
    structure = []

    def traced(*operands):
        if call.forward is not None:  # those of the operands; a sum has their shardings too
            return [x + jnp.zeros_like(x) for x in gradient_types(call, operands)]
        bound = call.arguments(operands)
        out = None if call.residuals else call.kernel.out_like(*bound.args, **bound.kwargs)
        if out is None:
            cfg = _config_for_types(call, operands)
            out = call.method(cfg, operands)(*bound.args, **bound.kwargs, cfg=cfg)
            if call.residuals and not (isinstance(out, tuple) and len(out) == 2):
                name = f"{call.kernel.op_id_v}.fwd_with_residuals"
                raise ConfigError(f"{name} returned {out!r}; expected a pair (out, residuals)")
        structure.append(jax.tree.structure(out))
        return jax.tree.leaves(out)

    named = call.forward is None and partition.is_explicit(avals) and call.kernel.has_dims
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals] if named else avals
    with _mixing_types(), partition.without_mesh() if named else contextlib.nullcontext():
        types = jax.make_jaxpr(traced)(*given).out_avals
    if named:  # what is split of the operands says how outputs are, also where JAX would ask
        arrays = arrays_of(call, avals, types, structure[0], ())
        assert arrays is not None
        types = partition.explicit_types(call.kernel.op_id, arrays, avals, types)
    return structure[0] if structure else None, types


def _config_for_types(call: Call, operands: Sequence[Any]) -> Any:
    """A config to trace with where types alone are wanted: such a call need not run, so it need not be pinned."""
    inv = call.invocation(operands)
    try:
        return choose(inv, call.snapshot, call.generation).cfg
    except ConfigError:
        with contextlib.suppress(ConfigError):
            return heuristic(inv)
        raise


def _out_kinds(call: Call, tree: Any, count: int) -> tuple:
    """The row kind of each output array."""
    if call.forward is not None:
        return tuple(k for k, needed in zip(call.forward.kinds, call.needs or ()) if needed)
    kinds = call.kernel.out_rows
    if kinds is None:
        return (None,) * count
    out = jax.tree.unflatten(tree, range(count))
    if call.residuals:
        out, residuals = out
        if (rows := call.kernel.residual_rows) is None:
            return (*_kinds_of(call, kinds, out), *[None] * len(jax.tree.leaves(residuals)))
        return (*_kinds_of(call, kinds, out), *_kinds_of(call, rows, residuals, "residual_rows", "residuals"))
    return _kinds_of(call, kinds, out)


def _kinds_of(call: Call, kinds: Sequence[Any], out: Any, name: str = "out_rows", what: str = "outputs") -> tuple:
    parts = out if isinstance(out, (tuple, list)) else (out,)
    if len(kinds) != len(parts):
        raise ConfigError(f"{call.kernel.op_id_v}.{name} has {len(kinds)} entries for {len(parts)} {what}")
    return tuple(kind for kind, part in zip(kinds, parts) for _ in jax.tree.leaves(part))


# Lowering


def _lowered(*operands: Any, call: Call, platform: str) -> list[Any]:
    """A call in the program: chosen, run, recorded, labelled."""
    inv = call.invocation(operands, platform)
    choice = choose(inv, call.snapshot, call.generation)
    text = label(inv.op_id_v, inv.call_key)
    with jax.named_scope(scope_name(text)):
        outs = _on_auto_axes(lambda *operands: execute(call, choice.cfg, operands, platform), operands, call)
    record(inv)
    marks = {} if call.snapshot.path is None else {"ejkernel_path": call.snapshot.path}
    return marked(outs, operands, text, ejkernel_cfg=describe(choice), **marks)


def _rule(ctx: mlir.LoweringRuleContext, *values: Any, call: Call, platform: str) -> Any:
    """A call as it runs on the devices of its program: on one, or shared out by its types, or by XLA."""
    if call.axes:
        run = functools.partial(_among_others, call=call, platform=platform)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)
    devices, avals = partition.devices_of(ctx), ctx.avals_in
    by_types, by_xla = partition.is_explicit(avals), devices.shared > 1
    arrays = _shareable(call, tuple(avals)) if by_types or (by_xla and partition.is_supported(ctx, platform)) else None
    run = functools.partial(_lowered, call=call, platform=platform)
    if arrays is not None and by_types:
        run = functools.partial(_mapped, call=call, platform=platform, arrays=arrays)
    elif arrays is not None:
        ctx = partition.in_context(ctx, devices)
        run = functools.partial(_partitioned, call=call, platform=platform, arrays=arrays, devices=devices)
    with spread(by_xla and arrays is None):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def _shareable(call: Call, avals: tuple) -> Arrays | None:
    """How the arrays of a call may be split, if anything is known of that."""
    tree, types = _output(call, avals)
    return arrays_of(call, avals, types, tree, _out_kinds(call, tree, len(types)))


def tools(platform: str | None, bind: Callable[..., list[Any]] | None = None, avals: Sequence[Any] = ()) -> Tools:
    """What runs the calls of one device's parts on a platform.

    Args:
        platform: the platform.
        bind: what runs a call; default that it is bound, and may be shared out further.
        avals: where it is bound, the types of the operands of the whole.
    """
    is_last = not partition.is_shared_further(avals)

    def chosen(call: Call, operands: Sequence[Any]) -> Any:
        if not is_last:
            return None
        return choose(call.invocation(operands, platform), call.snapshot, call.generation).cfg

    return Tools(bind or kernel_p.bind, output_tree, chosen)


def _body(call: Call, tools: Tools) -> Callable[..., list[Any]]:
    """What gives the outputs of one device, from a plan and its parts of the operands."""
    return lambda plan, *parts: on_shards(tools, call, plan, parts)


def _among_others(*operands: Any, call: Call, platform: str | None) -> list[Any]:
    """A call inside `shard_map` that devices do together: each has its parts, and all of what has no part.

    Of an output that all have, JAX sums the cotangents of all; of an operand that all have, it sums the gradients.
    """
    avals = tuple(map(jax.typeof, operands))
    arrays, axes = _shareable(call, avals), dict(call.axes)
    assert arrays is not None
    for name, over in axes.items():
        if arrays.sizes.get(name, 1) < 2:
            sizes = {n: size for n, size in arrays.sizes.items() if size > 1}
            raise ConfigError(
                f"mesh_axes splits {name!r} of {call.kernel.op_id_v} over {over[0]!r}, and no array of this device has "
                f"more than 1 of it; expected a name that has: {sizes}"
            )
    sums = tuple(summed_axes(array, axes) for array in arrays.outputs)
    if call.forward is not None:
        first = len(operands) - num_cotangents(call)
        pairs = zip(operands[first:], arrays.operands[first:])
        operands = (*operands[:first], *(_psum(x, lacking(array, axes)) for x, array in pairs))
    mesh_axes = tuple(axis for over in axes.values() for axis in over)
    found = Plan(axes, (), (), sums, ((),) * len(sums), mesh_axes)
    outs = on_shards(tools(platform, avals=avals), call, found, operands)
    if call.forward is None:
        return outs
    shares = [lacking(array, axes) for array in arrays.outputs]
    return [out / jax.lax.axis_size(share) if share else out for out, share in zip(outs, shares)]


def _psum(x: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.psum(x, axes) if axes else x


def _mapped(*operands: Any, call: Call, platform: str, arrays: Arrays) -> list[Any]:
    avals = tuple(map(jax.typeof, operands))
    body = _body(call, tools(platform, avals=avals))
    return partition.mapped(body, arrays, operands, _output(call, avals)[1])


def _partitioned(*operands: Any, call: Call, platform: str, arrays: Arrays, devices: partition.Devices) -> list[Any]:
    """A call that XLA shares out when it compiles, labelled by its whole shapes; its parts' labels are in its body."""
    inv = call.invocation(operands, platform)
    text = label(inv.op_id_v, inv.call_key)
    record_shared(text, SharedCall(call, arrays, platform, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]))
    marks = {} if call.snapshot.path is None else {"ejkernel_path": call.snapshot.path}
    # JAX caches programs by their text; drivers of hosts may differ, and their programs must not.
    versions = {name: version for name, version in tuned_with().items() if name != "driver"}
    known = [call.snapshot.overlay.digest, call.explicit, versions]
    marks |= {SHARED: text, "ejkernel_choice": short_hash(stable_json(known, where="config"))}
    here = functools.partial(_lowered, platform=platform)  # now, while the settings of the caller hold
    whole, body = functools.partial(kernel_p.bind, call=call), _body(call, tools(platform, here))
    with jax.named_scope(scope_name(text)), set_xla_metadata(**marks):
        return partition.partitioned(call.kernel.op_id, whole, body, arrays, devices)(*operands)


def _on_auto_axes(run: Callable, operands: Sequence[Any], call: Call) -> list[Any]:
    """Runs with Explicit mesh axes turned to Auto ones: inside a kernel XLA, not the types, follows the shards."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = [] if mesh.empty else mesh.axis_types
    explicit = tuple(a for a, t in zip(mesh.axis_names, kinds) if t == jax.sharding.AxisType.Explicit)
    if not explicit:
        return list(run(*operands))
    types = _output(call, tuple(map(jax.typeof, operands)))[1]
    specs = tuple(t.sharding.spec for t in types)
    local: Callable = jax.sharding.auto_axes(lambda *x: tuple(run(*x)), axes=explicit, out_sharding=specs)
    return list(local(*operands))


# Differentiation


def _plain(call: Call, operands: Sequence[Any], mode: str) -> None:
    """Refuses what JAX cannot differentiate: code that is not JAX's own."""
    cfg = choose(call.invocation(operands), call.snapshot, call.generation).cfg
    backend = call.method(cfg, operands).__name__.rpartition("_")[2]
    if backend in BACKENDS:  # not a method for all of them; of `run_triton = run_xla` the name is the other's
        backend = getattr(cfg, "backend", None) or backend
    if backend in _OPAQUE:
        raise UnsupportedError(
            f"{call.kernel.op_id_v} runs on the {backend!r} back end, which has no {mode} derivative; "
            f"pass backend='xla' for calls that need one"
        )


def _kernel_jvp(primals, tangents, *, call: Call):
    if call.kernel.backward is None:  # a backward kernel, or one without: its own plain JAX code is differentiated
        _plain(call, primals, "second or forward-mode" if call.forward is not None else "reverse- or forward-mode")
        return _plain_jvp(functools.partial(_run, call=call), primals, tangents)
    live = tuple(is_float(x) and type(t) is not ad.Zero for x, t in zip(primals, tangents))
    asked = None
    if any(live) and not call.residuals and call.kernel.defines("fwd_with_residuals"):
        call, asked = _with_residuals(call, tuple(map(jax.typeof, primals)))
    outs = [checkpoint_name(out, call.kernel.op_id) for out in kernel_p.bind(*primals, call=call)]
    out_tangents = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if any(live) and any(map(is_float, outs)):
        given = [t for t, alive in zip(tangents, live) if alive]
        found = iter(tangent_p.bind(*given, *primals, *outs, call=call, live=live))
        out_tangents = [next(found) if is_float(out) else zero for out, zero in zip(outs, out_tangents)]
    return outs[:asked], out_tangents[:asked]


def _with_residuals(call: Call, avals: tuple) -> tuple[Call, int]:
    """The call that also returns residuals, after the arrays of the output; and how many those are."""
    tree, types = _output(call, avals)
    call = dataclasses.replace(call, residuals=True)
    pair, found = _output(call, avals)
    plain, saved = ([(t.shape, t.dtype.name) for t in ts] for ts in (types, found[: len(types)]))
    if pair.children()[0] != tree or saved != plain:
        raise ConfigError(
            f"{call.kernel.op_id_v}: run returns {tree} of {plain}, and fwd_with_residuals {pair.children()[0]} of "
            f"{saved} and then residuals; expected (what run returns, residuals)"
        )
    return call, len(types)


def _split(args: Sequence[Any], live: tuple[bool, ...]) -> tuple[list, list, list]:
    """The arguments of `tangent_p`: tangents, operands, outputs."""
    first, second = sum(live), sum(live) + len(live)
    return list(args[:first]), list(args[first:second]), list(args[second:])


def _tangents(*args, call: Call, live: tuple[bool, ...]):
    """Forward mode, through plain JAX code."""
    tangents, operands, _ = _split(args, live)
    _plain(call, operands, "forward-mode")

    def run(*wanted):
        given = iter(wanted)
        outs = _run(*[next(given) if alive else x for x, alive in zip(operands, live)], call=call)
        return [out for out in outs if is_float(out)]

    return jax.jvp(run, [x for x, alive in zip(operands, live) if alive], tangents)[1]


def _tangents_jvp(primals, tangents, **params):
    return _plain_jvp(functools.partial(_tangents, **params), primals, tangents)


def _plain_jvp(run: Callable, primals, tangents):
    return jax.jvp(run, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _transpose(cotangents, *args, call: Call, live: tuple[bool, ...]):
    tangents, operands, outs = _split(args, live)
    undefined = [ad.is_undefined_primal(t) for t in tangents]
    asked = iter(undefined)
    needs = tuple(alive and next(asked) for alive in live)
    lazy = getattr(call.kernel.backward, "lazy_cotangents", False)
    tree = output_tree(call, operands)
    own = tree.children()[0].num_leaves if call.residuals else len(outs)
    given = iter(cotangents)
    raw = [next(given) if is_float(out) else None for out in outs]
    cts = [None if ct is None or (lazy and type(ct) is ad.Zero) else ad.instantiate_zeros(ct) for ct in raw[:own]]
    cts += [None] * (len(outs) - own)
    kinds = _out_kinds(call, tree, len(outs))
    kinds += tuple(kind for kind, ct in zip(kinds, cts) if ct is not None)
    back, arrays = backward_call(
        call, operands, jax.tree.unflatten(tree, outs), jax.tree.unflatten(tree, cts), needs, kinds
    )
    found = kernel_p.bind(*equally_varying(arrays), call=back)
    through = [None if i < own or type(ct) is ad.Zero else ct for i, ct in enumerate(raw)]
    if any(ct is not None for ct in through):  # of a derivative's derivative: residuals depend on the operands, too
        more = plain_gradients(functools.partial(_run, call=call), operands, needs, through)
        found = [a + b for a, b in zip(found, more)]
    grads = iter(found)
    return [*(next(grads) if u else None for u in undefined), *[None] * (len(operands) + len(outs))]


# Batching


def _batch_kernel(args, dims, *, call: Call):
    operands = tuple(_without_axis(x, d) for x, d in zip(args, dims))
    rows_alone = all(kind is True or d is None for kind, d in zip(call.kinds, dims))
    if rows_alone and (each := call.by_rows(operands)) is not None:
        [out], [axis] = _batch_kernel(args, dims, call=each)
        return [out.sum(1 - axis)], [0]
    tree, types = _output(call, operands)
    out_kinds = _out_kinds(call, tree, len(types))
    return fold_or_loop(functools.partial(kernel_p.bind, call=call), args, dims, call.kinds, out_kinds, types)


def _batch_tangent(args, dims, *, call: Call, live: tuple[bool, ...]):
    _, operands, outs = _split(args, live)
    types = [_without_axis(x, d) for x, d in zip(args, dims)]
    tree, _ = _output(call, tuple(_split(types, live)[1]))
    out_kinds = _out_kinds(call, tree, len(outs))
    pairs = {i: n for n, i in enumerate(i for i, alive in enumerate(live) if alive)}  # operand -> its tangent
    groups = [sum(live) + i for i in pairs] + [pairs.get(i, sum(live) + i) for i in range(len(operands))]
    groups += range(len(groups), len(args))
    kinds = (*(call.kinds[i] for i in pairs), *call.kinds, *out_kinds)
    floats = [(k, t) for k, t in zip(out_kinds, _split(types, live)[2]) if is_float(t)]
    bind = functools.partial(tangent_p.bind, call=call, live=live)
    return fold_or_loop(bind, args, dims, kinds, [k for k, _ in floats], [t for _, t in floats], groups)


def _without_axis(x: Any, dim: int | None) -> Any:
    """The type of one example of a batched operand."""
    if dim is None:
        return jax.typeof(x)
    types: list[Any] = []
    jax.vmap(lambda x: types.append(jax.typeof(x)), dim)(x)
    return types[0]


# The primitives


def _on_several_devices(args: Sequence[Any]) -> bool:
    """Whether arrays are split: what each device then runs is known where the call is lowered, and not before."""
    return any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and len(x.sharding.device_set) > 1 for x in args)


def _primitive(name: str, plain: Callable, abstract_eval: Callable, jvp: Callable, batch: Callable) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=4096)
    def jitted(**params):
        def run(*args):
            if args and not any(isinstance(x, Tracer) for x in args):
                return plain(*args, **params)  # op by op: for `disable_jit`, and `debug_nans` in search of the culprit
            return primitive.bind(*args, **params)

        return jax.jit(run)

    def impl(*args, call: Call, **params):
        if tunes_on_call(call.snapshot) and not _on_several_devices(
            args
        ):  # either direction, now: where it is lowered nothing can be timed
            device = device_of(args)
            choose(call.invocation(args, device and device.platform), call.snapshot, call.generation)
            call = dataclasses.replace(call, generation=generation())  # what was found before does not count
        return jitted(call=call, **params)(*args)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


def _kernel_types(*avals, call: Call):
    return _output(call, avals)[1]


def _tangent_types(*avals, call: Call, live: tuple[bool, ...]):
    return [out.to_tangent_aval() for out in _split(avals, live)[2] if is_float(out)]


kernel_p = _primitive("ejkernel", _run, _kernel_types, _kernel_jvp, _batch_kernel)
tangent_p = _primitive("ejkernel_tangent", _tangents, _tangent_types, _tangents_jvp, _batch_tangent)
ad.primitive_transposes[tangent_p] = _transpose
for _platform in _PLATFORMS:
    mlir.register_lowering(kernel_p, functools.partial(_rule, platform=_platform), platform=_platform, inline=False)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangents, multiple_results=True))
