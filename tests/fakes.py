"""A kernel whose candidates fail, lie or dawdle on demand."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import Kernel


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    """How a candidate behaves, and for how many milliseconds it sleeps."""

    kind: str = "right"
    ms: float = 2.0


def _sleep(x, ms):
    time.sleep(ms / 1e3)
    return x


class Fake(Kernel[FakeConfig, jax.Array]):
    """Computes `tanh(x)`; `candidates` and `default` are set by the test."""

    name = "fake"
    candidates: tuple = ()
    default = FakeConfig()

    def heuristic_cfg(self, inv):
        return type(self).default

    def candidate_cfgs(self, inv):
        return type(self).candidates

    def run(self, x, *, cfg):
        if cfg.kind == "fails":
            raise ValueError("no such tile\nand more")
        if cfg.kind == "crashes":
            return jax.pure_callback(lambda x: 1 / 0, x, x)
        x = jax.pure_callback(lambda x: np.asarray(_sleep(x, cfg.ms)), x, x)
        y = jnp.tanh(x)
        wrong = {
            "zeros": lambda: jnp.zeros_like(y),
            "nan": lambda: y * jnp.nan,
            "scaled": lambda: y * 1.01,
            "tail": lambda: y.at[-1].set(0.0),
            "half": lambda: jnp.where(jnp.arange(y.shape[0])[:, None] % 2 == 0, y, 0.0),
            "infinite": lambda: y.at[0, 0].set(jnp.inf),
        }
        return wrong[cfg.kind]() if cfg.kind in wrong else y


WRONG = ("zeros", "nan", "scaled", "tail", "half", "infinite")
FAKE = Fake()
