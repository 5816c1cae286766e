"""`gated_linear` on this CPU after tuning, against the plain expression under the same `jit`.

    python benchmarks/gated_linear_cpu.py

Forward and backward, gradients of all arrays. Writes `docs/benchmarks/gated_linear_cpu.csv`.
"""

import jax
from against_plain import Case, main, normal

from ejkernel_ops import gated_linear

SIZES = ((4096, 256, 1024), (1024, 1024, 2048), (16384, 128, 512))


def plain(x, gate_weight, up_weight):
    """SwiGLU as it is defined."""
    return jax.nn.silu(x @ gate_weight) * (x @ up_weight)


def case(rows, features, out_features):
    weights = [normal(i, features, out_features, scale=features**-0.5) for i in (1, 2)]
    about = {"rows": rows, "in_features": features, "out_features": out_features}
    return Case(about, gated_linear, plain, [normal(0, rows, features), *weights])


if __name__ == "__main__":
    main(__doc__, [case(*size) for size in SIZES], "gated_linear_cpu")
