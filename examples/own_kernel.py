"""A kernel of one's own: two back ends, candidates, a backward, tuned inside a train step.

python examples/own_kernel.py
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_ops import AutotuningResult, ConfigSelectorChain, Invocation, Kernel, autotune_lowered


@dataclasses.dataclass(frozen=True)
class SwigluConfig:
    """Back end, and rows that are computed at a time."""

    backend: str | None = None
    block_rows: int | None = None


class SwigluBackward(Kernel):
    """Gradients of `silu(gate) * up`; it has a label, a key and a config of its own."""

    name, config_cls = "swiglu_bwd", SwigluConfig

    def heuristic_cfg(self, inv: Invocation) -> SwigluConfig:
        return SwigluConfig("xla", inv.args[0].shape[0])

    def run_xla(self, gate, up, out, dout, *, cfg, needs):
        _, pull = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
        return pull(dout)


class Swiglu(Kernel):
    """`silu(gate) * up` of two `(rows, features)` arrays; vmapped axes join the rows."""

    name, config_cls, backward = "swiglu", SwigluConfig, SwigluBackward()
    rows, out_rows = (True, True), (True,)

    def heuristic_cfg(self, inv: Invocation) -> SwigluConfig:
        return SwigluConfig("xla", inv.args[0].shape[0])

    def candidate_cfgs(self, inv: Invocation) -> list[SwigluConfig]:
        blocks = [n for n in (16, 64, 256, 1024) if inv.args[0].shape[0] % n == 0]
        return [SwigluConfig(backend, n) for backend in ("xla", "pallas") for n in blocks]

    def run_xla(self, gate, up, *, cfg):
        pairs = [x.reshape(-1, cfg.block_rows, x.shape[1]) for x in (gate, up)]
        return jax.lax.map(lambda pair: jax.nn.silu(pair[0]) * pair[1], pairs).reshape(gate.shape)

    def run_pallas(self, gate, up, *, cfg):
        def body(gate, up, out):
            out[...] = jax.nn.silu(gate[...]) * up[...]

        spec = pl.BlockSpec((cfg.block_rows, gate.shape[1]), lambda row: (row, 0))
        grid = (gate.shape[0] // cfg.block_rows,)
        return pl.pallas_call(body, grid=grid, in_specs=[spec, spec], out_specs=spec, out_shape=gate)(gate, up)


swiglu = Swiglu()


@jax.jit
def train_step(weights, x):
    """Plain gradient descent on a toy target; the kernel is called like any function."""
    loss, grads = jax.value_and_grad(lambda w: jnp.square(swiglu(x @ w[0], x @ w[1]) - 1).mean())(weights)
    return loss, jax.tree.map(lambda w, g: w - 10 * g, weights, grads)


def main() -> AutotuningResult:
    """Tunes the step and trains inside the result."""
    shapes = [(1024, 64), (64, 128), (64, 128)]
    x, *weights = (jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate(shapes))
    result = autotune_lowered(ConfigSelectorChain(), train_step.lower(weights, x))
    print(result)
    for trial in result.entries[0].trials:
        print(trial.status, trial.cfg, trial.ms, trial.reason)
    with result:
        for _ in range(3):
            loss, weights = train_step(weights, x)
            print(float(loss))
    return result


if __name__ == "__main__":
    main()
