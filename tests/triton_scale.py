"""A small Triton kernel through jax-triton: it doubles, and can be told to leave rows out or to write elsewhere."""

import dataclasses

import jax

from ejkernel_ops import Kernel


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
    """Back end and tile; `kind` is what is wrong with a candidate."""

    backend: str = "triton"
    block: int = 1024
    kind: str = "right"


class Scale(Kernel[ScaleConfig, jax.Array]):
    """Doubles."""

    name = "triton_scale"

    def heuristic_cfg(self, inv):
        return ScaleConfig("xla")

    def candidate_cfgs(self, inv):
        return [ScaleConfig(block=2**n) for n in range(6, 14)]

    def run_xla(self, x, *, cfg):
        return x * 2

    def run_triton(self, x, *, cfg):
        import jax_triton

        from .triton_kernels import scale

        stride = 2 if cfg.kind == "half" else 1
        return jax_triton.triton_call(
            x, x.size, kernel=scale, grid=(-(-x.size // (cfg.block * stride)),),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), STRIDE=stride, BLOCK=cfg.block,
            SHIFT=1 << 40 if cfg.kind == "elsewhere" else 0,
        )  # fmt: skip


SCALE = Scale()
