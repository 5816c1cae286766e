"""RMS and layer norm: the ops, their config and their kernels."""

from .kernels import LAYER_NORM as LAYER_NORM
from .kernels import LAYER_NORM_BWD as LAYER_NORM_BWD
from .kernels import RMS_NORM as RMS_NORM
from .kernels import RMS_NORM_BWD as RMS_NORM_BWD
from .kernels import NormConfig as NormConfig
from .op import layer_norm as layer_norm
from .op import rms_norm as rms_norm
