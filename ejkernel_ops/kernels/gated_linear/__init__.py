"""Gated linear maps: the op, its config and its kernels."""

from .kernels import GATED_LINEAR as GATED_LINEAR
from .kernels import GATED_LINEAR_BWD as GATED_LINEAR_BWD
from .kernels import GatedLinearConfig as GatedLinearConfig
from .op import gated_linear as gated_linear
