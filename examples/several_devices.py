"""A block of stock layers, swapped, on a mesh of devices: parameters in parts, attention as a ring over the length.

    python examples/several_devices.py --mesh 2 2

On a CPU it makes itself as many devices as it takes. Nothing but the mesh and where arrays are put differs from one
device: each runs its own part of every kernel, and of a split length no device ever has all keys.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from gpt.nnx_model import Block
from gpt.sizes import SIZES
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejlayers

SIZE = SIZES["smoke"]
COLLECTIVES = r"= .*? (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("


def mesh_of(fsdp: int, context: int) -> Mesh:
    """So many devices; where JAX has not looked for any yet, a CPU has as many.

    Raises:
        SystemExit: there are fewer.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", fsdp * context)
    if (there := jax.device_count()) < fsdp * context:
        raise SystemExit(
            f"--mesh {fsdp} {context} takes {fsdp * context} devices; there are {there}: set JAX_PLATFORMS=cpu"
        )
    devices = jax.devices()[: fsdp * context]
    return jax.make_mesh((fsdp, context), ("fsdp", "context"), (AxisType.Auto,) * 2, devices=devices)


def in_parts(tree: Any, mesh: Mesh) -> Any:
    """Arrays of which each device has a part of the first axis, where that can be divided."""

    def put(x: jax.Array) -> jax.Array:
        spec = P("fsdp") if x.shape[0] % mesh.shape["fsdp"] == 0 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


@nnx.jit
def step(model: Block, x: jax.Array) -> tuple[jax.Array, nnx.State]:
    """A loss and its gradients; nothing here knows of devices."""
    return nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(model)


def collectives(compiled: Any) -> str:
    """How often devices talk to each other in a program, by kind."""
    counts = collections.Counter(re.findall(COLLECTIVES, compiled.as_text()))
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def main(arguments: list[str] | None = None) -> float:
    """Prints what each device has and runs; returns the largest difference from one device, relative."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=int, nargs=2, default=[2, 2], metavar=("FSDP", "CONTEXT"), help="its sizes")
    options = parser.parse_args(arguments)
    fsdp, context = options.mesh
    if min(options.mesh) < 1 or SIZE.batch % fsdp or SIZE.width % fsdp or SIZE.context % (2 * context):
        parser.error(f"--mesh {fsdp} {context} does not divide {SIZE.batch} examples of {SIZE.context} numbers")
    mesh = mesh_of(*options.mesh)
    model = ejlayers.swap(Block(SIZE, jnp.dtype("float32"), nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (SIZE.batch, SIZE.context, SIZE.width))
    alone = jax.device_get(step(model, x))
    nnx.update(model, in_parts(nnx.state(model), mesh))
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp", "context")))
    together = jax.device_get(step(model, x))

    print(f"{mesh.size} devices: fsdp {fsdp} splits examples and parameters, context {context} the length")
    for name, array in {"query kernel": model.attention.query.kernel[...], "inputs": x}.items():
        print(f"{name:13}{array.shape!s:14}of which a device has {array.addressable_shards[0].data.shape}")
    print("they tell each other:", collectives(step.lower(model, x).compile()))
    print(ejlayers.explain(step, model, x))
    differences = jax.tree.map(lambda a, b: float(abs(a - b).max() / abs(a).max()), alone, together)
    largest = max(jax.tree.leaves(differences))
    print(f"largest difference of loss and gradients from one device, relative: {largest:.1e}")
    return largest


if __name__ == "__main__":
    main()
