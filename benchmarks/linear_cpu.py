"""`linear` with bias and activation on this CPU after tuning, against the plain expression under the same `jit`.

    python benchmarks/linear_cpu.py

Forward and backward, gradients of all arrays. Writes `docs/benchmarks/linear_cpu.csv`.
"""

import functools

import jax
from against_plain import Case, main, normal

from ejkernel_ops import linear

SIZES = ((4096, 256, 1024), (1024, 1024, 2048), (16384, 128, 512))


def plain(x, weight, bias):
    """The definition, with GELU (tanh)."""
    return jax.nn.gelu(x @ weight + bias)


def case(rows, features, out_features):
    arrays = normal(0, rows, features), normal(1, features, out_features, scale=features**-0.5), normal(2, out_features)
    about = {"rows": rows, "in_features": features, "out_features": out_features}
    return Case(about, functools.partial(linear, activation="gelu"), plain, arrays)


if __name__ == "__main__":
    main(__doc__, [case(*size) for size in SIZES], "linear_cpu")
