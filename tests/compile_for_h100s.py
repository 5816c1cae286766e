"""Compiles ops for several H100s that need not be there, and prints what moves between them, as JSON.

Run by `test_sharded_h100.py`, in a process of its own: XLA's compiler for GPUs comes with `jax-cuda13-pjrt`.
"""

import json
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
BATCH, LENGTH, WIDTH, VOCAB = 8, 512, 512, 8192
ROWS, HEADS, COLUMNS = P("data"), P("data", None, "model"), P(None, "model")
RING = P(None, ("data", "model"))


def attention(*x):
    return ej.flash_attention(*x, causal=True, backend="triton")


def heads(kv_heads, spec=HEADS, kv_spec=HEADS):
    shapes = [(BATCH, LENGTH, n, 64) for n in (8, kv_heads, kv_heads)]
    return list(zip(shapes, (spec, kv_spec, kv_spec)))


X, UP, DOWN = ((BATCH, LENGTH, WIDTH), ROWS), ((WIDTH, 2048), COLUMNS), ((2048, WIDTH), P("model"))
CASES = {
    "attention": (attention, heads(4)),
    "attention, one key head": (attention, heads(1, kv_spec=ROWS)),
    "ring attention": (attention, heads(4, RING, RING)),
    "rms_norm": (ej.rms_norm, [X, ((WIDTH,), P())]),
    "linear": (lambda x, w: ej.linear(x, w, activation="gelu"), [X, UP]),
    "mlp": (lambda x, up, down: ej.mlp(x, up, down, activation="gelu"), [X, UP, DOWN]),
    "gated_linear": (ej.gated_linear, [X, UP, UP]),
    "rotary_embedding": (lambda x: ej.rotary_embedding(x, jnp.arange(LENGTH)), heads(4)[:1]),
    "cross-entropy": (
        lambda h, w: ej.linear_cross_entropy(h, w, jnp.zeros(h.shape[:1], int)),
        [((4096, WIDTH), ROWS), ((WIDTH, VOCAB), COLUMNS)],
    ),
}


def collectives(fn, operands, mesh):
    """How often the gradient of an op has each collective, and its custom calls."""

    def loss(*x):
        return (fn(*x).astype(jnp.float32) ** 2).sum()

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape, spec in operands]
    step = jax.jit(jax.grad(loss, tuple(range(len(operands)))))
    text = step.lower(*types).compile().as_text()
    found = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    calls = re.findall(r'custom_call_target="([^"]*triton[^"]*)"', text)
    return {"collectives": Counter(found), "triton": len(calls)}


def main(count):
    topology = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=f"1x1x{count}")
    devices = np.array(topology.devices).reshape(count // 2, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    print(json.dumps({name: collectives(*case, mesh) for name, case in CASES.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
