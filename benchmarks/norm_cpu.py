"""`rms_norm` and `layer_norm` on this CPU after tuning, against the plain expression under the same `jit`.

    python benchmarks/norm_cpu.py

Forward and backward, gradients of all arrays. Writes `docs/benchmarks/norm_cpu.csv`.
"""

import jax
import jax.numpy as jnp
from against_plain import Case, main, normal

from ejkernel_ops import layer_norm, rms_norm

SIZES = ((4096, 1024), (16384, 256), (1024, 4096))


def plain_rms_norm(x, scale):
    """RMS norm as it is defined."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def plain_layer_norm(x, scale, bias):
    """Layer norm as it is defined."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6) * scale + bias


OPS = {"rms_norm": (rms_norm, plain_rms_norm, 1), "layer_norm": (layer_norm, plain_layer_norm, 2)}


def case(op, rows, features):
    ours, plain, vectors = OPS[op]
    arrays = [normal(0, rows, features), *(normal(1 + i, features) for i in range(vectors))]
    return Case({"op": op, "rows": rows, "features": features}, ours, plain, arrays)


if __name__ == "__main__":
    main(__doc__, [case(op, *size) for op in OPS for size in SIZES], "norm_cpu")
