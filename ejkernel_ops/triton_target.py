"""The custom call that Triton kernels become: one that XLA may record into CUDA graphs, where jaxlib has what it takes.

jax-triton's own calls are launched one by one, and cut the graph of a step into as many pieces.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.interpreters import mlir
from jaxlib import gpu_triton, xla_client
from jaxlib.mlir import ir

TARGET = "ejkernel_triton_kernel_call"
TARGETS = (TARGET, "triton_kernel_call", "triton_kernel_call_ffi")  # the others as the versions of jax-triton call them
_JAXLIBS = "triton_kernel_call_ffi"
_TYPED = 4  # of XLA's interfaces for custom calls


def record_in_graphs(results: Any) -> Any:
    """Makes the call of jax-triton that has these results one that a CUDA graph can hold.

    Args:
        results: values of one `stablehlo.custom_call`.

    Returns:
        The same values.
    """
    call = results[0].owner
    if registered() and call.attributes["call_target_name"].value in TARGETS:
        config = call.attributes["backend_config"]
        typed = config if isinstance(config, ir.DictAttr) else ir.DictAttr.get({"opaque": config})
        call.attributes["call_target_name"] = ir.StringAttr.get(TARGET)
        call.attributes["api_version"] = mlir.i32_attr(_TYPED)
        call.attributes["backend_config"] = typed
    return results


@functools.cache
def registered() -> bool:
    """Registers the call where it can be, once in a process, and says whether graphs may hold it.

    They may if a kernel is loaded before it is launched: nothing can be loaded while a graph is recorded. Elsewhere it
    is there for programs that were exported with another jaxlib.
    """
    library = getattr(gpu_triton, "_cuda_triton", None)
    handlers = getattr(library, "registrations", dict)().get(_JAXLIBS)
    if not isinstance(handlers, dict) or "execute" not in handlers:
        return False
    traits = xla_client.CustomCallTargetTraits
    trait = traits.COMMAND_BUFFER_COMPATIBLE if "initialize" in handlers else traits.DEFAULT
    jax.ffi.register_ffi_target(TARGET, handlers, platform="CUDA", api_version=1, traits=trait)
    return trait != traits.DEFAULT


registered()  # now: a program that was exported elsewhere names the call, and lowers nothing here
