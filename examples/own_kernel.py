"""A kernel of one's own: in Triton and in JAX, with candidates and a backward, tuned inside a train step.

    python examples/own_kernel.py
    python examples/own_kernel.py --check

`--check` needs no GPU: it interprets the Triton kernels of `swiglu_triton.py` on the CPU, forward and backward, and
compares them with the JAX code.
"""

import argparse
import dataclasses
import os

import jax
import jax.numpy as jnp

from ejkernel_ops import AutotuningResult, ConfigSelectorChain, Invocation, Kernel, autotune_lowered
from ejkernel_ops.triton_call import triton_call


@dataclasses.dataclass(frozen=True)
class SwigluConfig:
    """Back end, and elements of a block: that a program of Triton has, or that JAX's loop computes at a time."""

    backend: str | None = None
    block: int | None = None


class SwigluKernel(Kernel):
    """What both directions share."""

    config_cls = SwigluConfig

    def heuristic_cfg(self, inv: Invocation) -> SwigluConfig:
        return SwigluConfig("xla", inv.args[0].size)

    def heuristic_cfg_triton(self, inv: Invocation) -> SwigluConfig:
        return SwigluConfig("triton", 1024)

    def candidate_cfgs_triton(self, inv: Invocation) -> list[SwigluConfig]:
        return [SwigluConfig("triton", block) for block in (256, 512, 1024, 2048, 4096)]

    def launch(self, kernel: str, *operands: jax.Array, outputs: int, cfg: SwigluConfig) -> list[jax.Array]:
        """Runs a Triton kernel over all elements."""
        import swiglu_triton

        size, like = operands[0].size, jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)
        return triton_call(
            getattr(swiglu_triton, kernel), *operands, out_types=[like] * outputs, grid=(-(-size // cfg.block),),
            num_warps=4, num_stages=1, name=f"swiglu_{kernel}", SIZE=size, BLOCK=cfg.block,
        )  # fmt: skip


class SwigluBackward(SwigluKernel):
    """Gradients of `silu(gate) * up`; it has a label, a key and a config of its own."""

    name = "swiglu_bwd"

    def run_triton(self, gate, up, out, dout, *, cfg, needs):
        return tuple(self.launch("backward", gate, up, dout, outputs=2, cfg=cfg))

    def run_xla(self, gate, up, out, dout, *, cfg, needs):
        _, pull = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
        return pull(dout)


class Swiglu(SwigluKernel):
    """`silu(gate) * up` of two `(rows, features)` arrays; vmapped axes join the rows."""

    name, backward = "swiglu", SwigluBackward()
    rows, out_rows = (True, True), (True,)

    def candidate_cfgs_xla(self, inv: Invocation) -> list[SwigluConfig]:
        size = inv.args[0].size
        return [SwigluConfig("xla", block) for block in (size // 16, size // 4) if block and size % block == 0]

    def run_triton(self, gate, up, *, cfg):
        return self.launch("forward", gate, up, outputs=1, cfg=cfg)[0]

    def run_xla(self, gate, up, *, cfg):
        pairs = gate.reshape(-1, cfg.block), up.reshape(-1, cfg.block)
        return jax.lax.map(lambda pair: jax.nn.silu(pair[0]) * pair[1], pairs).reshape(gate.shape)


swiglu = Swiglu()


@jax.jit
def train_step(weights, x):
    """Plain gradient descent on a toy target; the kernel is called like any function."""
    loss, grads = jax.value_and_grad(lambda w: jnp.square(swiglu(x @ w[0], x @ w[1]) - 1).mean())(weights)
    return loss, jax.tree.map(lambda w, g: w - 10 * g, weights, grads)


def tuned() -> AutotuningResult:
    """Tunes the step and trains inside the result."""
    shapes = [(1024, 64), (64, 128), (64, 128)]
    x, *weights = (jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate(shapes))
    result = autotune_lowered(ConfigSelectorChain(), train_step.lower(weights, x))
    print(result)
    for entry in result.entries:
        for trial in entry.trials:
            took = trial.reason if trial.ms is None else f"{trial.ms:.3f} ms"
            print(f"{entry.op_id_v:14}{trial.status:8}{trial.cfg}  {took}")
    with result:
        for _ in range(3):
            loss, weights = train_step(weights, x)
            print(f"loss {loss:.4f}")
    return result


def checked() -> dict[str, float]:
    """The largest difference of Triton's output and gradients from those of JAX, interpreted where there is no GPU."""
    os.environ["EJKERNEL_OPS_INTERPRET"] = "1"
    gate, up, dout = (jax.random.normal(jax.random.key(i), (7, 100)) for i in range(3))  # the last block is not full
    found = {}
    for backend in ("triton", "xla"):
        cfg = SwigluConfig(backend, 256 if backend == "triton" else gate.size)
        out, pull = jax.vjp(
            lambda gate, up, cfg=cfg: swiglu(gate, up, cfg={"swiglu": cfg, "swiglu_bwd": cfg}), gate, up
        )
        found[backend] = dict(zip(("out", "dgate", "dup"), (out, *pull(dout))))
    differences = {name: float(abs(x - found["xla"][name]).max()) for name, x in found["triton"].items()}
    for name, difference in differences.items():
        print(f"{name:6} Triton differs from JAX by at most {difference:.1e}")
    return differences


def main(arguments: list[str] | None = None) -> AutotuningResult | dict[str, float]:
    """Tunes and trains, or checks the Triton kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the Triton kernels with JAX, on any machine")
    return checked() if parser.parse_args(arguments).check else tuned()


if __name__ == "__main__":
    main()
