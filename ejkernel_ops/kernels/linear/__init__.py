"""Linear maps with bias and activation: the op, its config and its kernels."""

from .kernels import LINEAR as LINEAR
from .kernels import LINEAR_BWD as LINEAR_BWD
from .kernels import LinearConfig as LinearConfig
from .op import linear as linear
