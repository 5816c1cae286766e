"""Kernels that tell which config they were run with, and functions that tell how often they were traced."""

import jax
import numpy as np

from ejkernel_ops import Invocation, Kernel, Key
from ejkernel_ops.utils.meta import call_sites


class Told(Kernel):
    """Returns its config, so that it is plain which one was used."""

    name = "test_told"

    def run(self, x, *, cfg):
        return x * 0 + cfg

    def heuristic_cfg(self, inv):
        return 1


class SlopeBackward(Told):
    name = "test_slope_bwd"

    def run(self, x, out, dout, *, cfg, needs):
        return dout * cfg


class Slope(Told):
    """The gradient is the config of the backward."""

    name = "test_slope"
    backward = SlopeBackward()


TOLD, SLOPE = Told(), Slope()
ONE = np.float32(1)


def key_of(kernel, *args, **kwargs):
    inv = Invocation(kernel, args, kwargs)
    return Key(inv.device_fingerprint, inv.op_id_v, inv.call_key)


KEY = key_of(TOLD, ONE)


class Traced:
    """A jitted function that counts how often it is traced."""

    def __init__(self, fn):
        self.traces = 0

        def counted(*args):
            self.traces += 1
            return fn(*args)

        self.jitted = jax.jit(counted)

    def __call__(self, *args):
        return self.jitted(*args)


def told():
    return Traced(TOLD)


def configs_of(lowered):
    """The config of each call, by kernel."""
    return {site.label.partition("#")[2].partition("@")[0]: site.config for site in call_sites(lowered)}
