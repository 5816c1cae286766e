"""Rotary position embedding: the op, its config, the scaling of its frequencies and its kernels."""

from .kernels import ROTARY as ROTARY
from .kernels import ROTARY_BWD as ROTARY_BWD
from .kernels import RotaryConfig as RotaryConfig
from .op import rotary_embedding as rotary_embedding
from .scaling import RotaryScaling as RotaryScaling
