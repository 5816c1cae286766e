"""`triton_call`: a Triton kernel as a JAX call, the same on a GPU, on a CPU and with each version of jax-triton.

On a GPU jax-triton compiles the kernel; on a CPU, for tests, Triton's interpreter runs it. Nothing of Triton is
imported before a kernel is lowered, or asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .environment import unchanged
from .triton_target import record_in_graphs
from .utils.varying import equally_varying

_HOPPER = 90  # what code is compiled for where no GPU can be asked


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot be used in this process, and what to do about it.

    Returns:
        The reason, with the command that removes it; `None` where they can be used.

    Example:
        >>> reason = unavailable()
        >>> reason is None or "pip install" in reason or "unset" in reason
        True
    """
    return _wrong_triton() or _wrong_jax_triton() or _wrong_plugin() or _broken()


def triton_call(
    kernel: Any,
    *operands: jax.Array,
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array]:
    """Launches a Triton kernel.

    Args:
        kernel: a `@triton.jit` function; its parameters are the operands, then the outputs, then constants.
        operands: arrays; what is a number is a constant.
        out_types: shape and dtype of each output. The kernel has to write all of it.
        grid: number of programs in one to three dimensions.
        num_warps: warps of a program.
        num_stages: loop iterations in flight.
        name: what the call is named in profiles.
        input_output_aliases: operands whose memory outputs may take, both by number. The operand is copied first where
            it is needed later, and not all versions do it: a kernel must be right either way.
        constants: values of the `tl.constexpr` parameters, by name.

    Returns:
        The outputs.

    Raises:
        TypeError: something that is no `@triton.jit` function, or arguments that do not fit its parameters.
        ValueError: an alias of arrays of which there is none, or that differ in shape or type.

    Example:
        `triton_call(add, x, y, out_types=[jax.typeof(x)], grid=(4,), num_warps=4, num_stages=2, name="add", BLOCK=64)`
    """
    _check(kernel, len(operands) + len(out_types), constants)
    types = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out_types)
    aliases = tuple((input_output_aliases or {}).items())
    _check_aliases(aliases, operands, types)
    values = tuple((key, type(value), value) for key, value in constants.items())
    launch = _Launch(kernel.fn, kernel, types, tuple(grid), num_warps, num_stages, name, aliases, values)
    outs = triton_call_p.bind(*operands, launch=launch)
    return equally_varying(outs, *operands)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """All of a call but its operands."""

    function: Any
    kernel: Any = dataclasses.field(compare=False)  # its own hash reads all sources that it depends on
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    name: str
    aliases: tuple[tuple[int, int], ...]  # operand and output
    values: tuple[tuple[str, type, Any], ...]  # 1, 1.0 and True are different constants

    @property
    def constants(self) -> dict[str, Any]:
        return {key: value for key, _, value in self.values}


def _check(kernel: Any, num_arrays: int, constants: dict[str, Any]) -> None:
    if not hasattr(kernel, "params"):
        raise TypeError(f"kernel is {kernel!r}; expected a @triton.jit function")
    arrays = [p.name for p in kernel.params if not p.is_constexpr]
    if len(arrays) != num_arrays:
        raise TypeError(f"{kernel.__name__} takes {len(arrays)} arrays {arrays}; got {num_arrays} operands and outputs")
    wanted = {p.name for p in kernel.params if p.is_constexpr}
    if wanted != set(constants):
        raise TypeError(f"{kernel.__name__} takes the constants {sorted(wanted)}; got {sorted(constants)}")


def _check_aliases(aliases: Any, operands: Sequence[Any], types: Sequence[Any]) -> None:
    if len({out for _, out in aliases}) < len(aliases):
        raise ValueError(f"input_output_aliases is {dict(aliases)}; two operands cannot share the memory of one output")
    for operand, out in aliases:
        if not (0 <= operand < len(operands) and 0 <= out < len(types)):
            there = f"{len(operands)} operands and {len(types)} outputs"
            raise ValueError(f"input_output_aliases has {operand}: {out}; there are {there}, counted from 0")
        given, made = ((x.shape, x.dtype) for x in (operands[operand], types[out]))
        if given != made:
            raise ValueError(f"input_output_aliases has {operand}: {out}; operand {given} and output {made} differ")


# The primitive


@functools.lru_cache(maxsize=1024)
def _jitted(launch: _Launch) -> Any:
    return jax.jit(functools.partial(triton_call_p.bind, launch=launch))


def _eager(*operands: Any, launch: _Launch) -> Any:
    with jax.disable_jit(False):
        return _jitted(launch)(*operands)


def _compiled(*operands: Any, launch: _Launch) -> list[jax.Array]:
    library = _jax_triton()
    types = list(launch.out_types)
    if hasattr(library, "TritonFunction"):
        # 0.4 has but one parameter for operand and output, and XLA drops the alias of calls that it fuses with slices
        outs = {"out_type": types}
    else:
        outs = {"out_shape": types, "input_output_aliases": dict(launch.aliases)}
    return library.triton_call(
        *operands, kernel=launch.kernel, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages,
        name=launch.name, compute_capability=_compute_capability(), **outs, **launch.constants,
    )  # fmt: skip


def _lower_compiled(context: Any, *operands: Any, **params: Any) -> Any:
    from .triton_interpreter import LOCK

    with LOCK:
        return mlir.lower_fun(_compiled, multiple_results=True)(context, *operands, **params)


def _lower_for_graphs(context: Any, *operands: Any, **params: Any) -> Any:
    return record_in_graphs(_lower_compiled(context, *operands, **params))


def _lower_interpreted(context: Any, *operands: Any, launch: _Launch) -> Any:
    from .triton_interpreter import interpret

    def run(*arrays):
        return tuple(interpret(launch.kernel, launch.grid, arrays, launch.out_types, launch.constants, launch.aliases))

    # Not `jax.pure_callback`: it hands over JAX arrays, and to wait for one in here may be to wait for ever.
    outs, _, _ = mlir.emit_python_callback(
        context, run, None, operands, context.avals_in, context.avals_out, has_side_effect=False, returns_token=False
    )
    return outs


triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True
triton_call_p.def_impl(_eager)
triton_call_p.def_abstract_eval(lambda *_, launch: [ShapedArray(t.shape, t.dtype) for t in launch.out_types])
mlir.register_lowering(triton_call_p, _lower_interpreted, platform="cpu")
mlir.register_lowering(triton_call_p, _lower_for_graphs, platform="cuda")
mlir.register_lowering(triton_call_p, _lower_compiled, platform="rocm")


def _compute_capability() -> int | None:
    """`None` where jax-triton can ask a GPU."""
    try:
        jax.devices("gpu")
    except RuntimeError:
        return _HOPPER
    return None


# jax-triton


@functools.cache
def _jax_triton() -> Any:
    """The module of jax-triton that launches kernels, fit for this Triton and this JAX."""
    import triton.backends.nvidia.driver as driver

    if not hasattr(driver, "TMA_TF32"):  # jax-triton 0.4 takes a Triton without (3.6) for one without CUDA
        driver.TMA_TF32 = 11  # pyright: ignore[reportAttributeAccessIssue]
    with unchanged("TRITON_CACHE_DIR"):  # jax-triton 0.3 empties it, and Triton then compiles nothing; 0.4 deletes it
        from jax_triton import triton_lib as library
    library.triton_kernel_call_lib = _Launcher(library.triton_kernel_call_lib)
    return library


class _Launcher:
    """`jaxlib.gpu_triton`, but launching with the threads that the compiled kernel asks for."""

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, name: str, num_warps: int, num_ctas: int, shared: int, ptx: str, *rest: Any) -> Any:
        """A warp-specialized kernel has more warps than were asked for."""
        if found := re.search(r"\.reqntid\s+(\d+)", ptx):
            num_warps = int(found[1]) // 32
        return self._library.TritonKernel(name, num_warps, num_ctas, shared, ptx, *rest)


# What may be missing

_INSTALL_TRITON = "pip install 'triton==3.6.*'"


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text or "")[:3])


def _wrong_triton() -> str | None:
    version = _version("triton")
    if version is None:
        return f"triton is not installed: {_INSTALL_TRITON} (Linux only)"
    if not (3, 6) <= version < (3, 9):
        found = ".".join(map(str, version))
        return f"triton {found} does not fit; 3.6 to 3.8 do (XLA cannot assemble what 3.9 emits): {_INSTALL_TRITON}"
    return None


def _wrong_jax_triton() -> str | None:
    version = _version("jax-triton")
    if version is None:
        return "jax-triton is not installed: pip install 'jax-triton>=0.3.1' 'triton==3.6.*'"
    install = "pip install --no-deps jax-triton==0.3.1"
    if version < (0, 3, 1):
        return f"jax-triton {'.'.join(map(str, version))} is too old: {install}"
    if version >= (0, 4) and sys.version_info < (3, 12):
        return f"jax-triton {'.'.join(map(str, version))} needs Python 3.12: {install}"
    return None


def _wrong_plugin() -> str | None:
    try:
        from jaxlib import gpu_triton

        gpu_triton.TritonKernel  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:
        version = importlib.metadata.version("jax")
        return (
            f"JAX has no support for Triton here ({error}): pip install --no-deps jax-cuda13-plugin=={version}, "
            f"or with a GPU pip install 'ejlayers[gpu]'"
        )
    return None


def _broken() -> str | None:
    try:
        _jax_triton()
        from triton import knobs

        from .triton_interpreter import LOCK  # noqa: F401
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return f"jax-triton cannot be imported ({what}): pip install 'jax-triton>=0.3.1' 'triton==3.6.*'"
    if knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, so kernels cannot be compiled: unset it"
    return None
