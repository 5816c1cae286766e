"""`linear_cross_entropy` on this CPU after tuning, against the plain expression under the same `jit`.

    python benchmarks/linear_cross_entropy_cpu.py

Loss and gradients of hidden states and weight. Writes `docs/benchmarks/linear_cross_entropy_cpu.csv`.
"""

import jax
import jax.numpy as jnp
from against_plain import Case, main, normal

from ejkernel_ops import linear_cross_entropy

SIZES = ((1024, 256, 8000), (2048, 512, 16000), (4096, 256, 32000))


def plain(hidden, weight, labels):
    """The mean loss as it is defined, of all logits at once."""
    logits = hidden @ weight
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def case(rows, features, vocab):
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, vocab)
    arrays = normal(0, rows, features), normal(1, features, vocab, scale=features**-0.5), labels
    return Case({"rows": rows, "features": features, "vocab": vocab}, linear_cross_entropy, plain, arrays)


if __name__ == "__main__":
    main(__doc__, [case(*size) for size in SIZES], "linear_cross_entropy_cpu")
