"""Compiles the Triton kernels of a call for a GPU that need not be there, and reads what the compiler made of them."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

_POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "uint32": "*u32",
    "bool": "*i1",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of a call, as it would be launched."""

    kernel: Any
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    name: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of it: registers of a thread, bytes of spills and of shared memory, products on tensor cores."""

    registers: int
    spills: int
    shared: int
    wgmma: bool
    mma: bool


def launches(run: Callable, *operands: Any) -> list[Launch]:
    """The launches of a function of arrays, which is traced only."""
    found = []
    for equation in _equations(jax.make_jaxpr(run)(*operands).jaxpr):
        if equation.primitive.name == "triton_call":
            launch = equation.params["launch"]
            types = tuple(_POINTERS[x.dtype.name] for x in (*(v.aval for v in equation.invars), *launch.out_types))
            constants = tuple(launch.constants.items())
            found.append(Launch(launch.kernel, types, constants, launch.num_warps, launch.num_stages, launch.name))
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


@functools.cache
def compiled(launch: Launch, capability: int = 90) -> Compiled:
    """Compiles a launch for a compute capability, 80 or 90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature = dict(zip(names, launch.types)) | {name: "constexpr" for name, _ in launch.constants}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(launch.types))}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=dict(launch.constants), attrs=attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        finally:
            del os.environ["TRITON_CACHE_DIR"]
        registers, spills = _assembled(
            made.asm["ptx"], f"sm_{capability}{'a' if capability == 90 else ''}", Path(cache)
        )
    text = made.asm["ptx"]
    return Compiled(registers, spills, made.metadata.shared, "wgmma.mma_async" in text, "mma.sync" in text)


def _assembled(text: str, arch: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread and bytes of spill stores."""
    import triton

    path = folder / "kernel.ptx"
    path.write_text(text)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(tool), "-v", f"--gpu-name={arch}", str(path), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return _number(r"Used (\d+) registers", report), _number(r"(\d+) bytes spill stores", report)


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    assert found, report
    return int(found[1])
