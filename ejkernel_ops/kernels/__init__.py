"""The built-in ops."""

from .attention import ATTENTION as ATTENTION
from .attention import ATTENTION_BWD as ATTENTION_BWD
from .attention import AttentionConfig as AttentionConfig
from .attention import flash_attention as flash_attention
from .gated_linear import GATED_LINEAR as GATED_LINEAR
from .gated_linear import GATED_LINEAR_BWD as GATED_LINEAR_BWD
from .gated_linear import GatedLinearConfig as GatedLinearConfig
from .gated_linear import gated_linear as gated_linear
from .linear import LINEAR as LINEAR
from .linear import LINEAR_BWD as LINEAR_BWD
from .linear import LinearConfig as LinearConfig
from .linear import linear as linear
from .linear_cross_entropy import LINEAR_CROSS_ENTROPY as LINEAR_CROSS_ENTROPY
from .linear_cross_entropy import LINEAR_CROSS_ENTROPY_BWD as LINEAR_CROSS_ENTROPY_BWD
from .linear_cross_entropy import LinearCrossEntropyConfig as LinearCrossEntropyConfig
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .norm import LAYER_NORM as LAYER_NORM
from .norm import LAYER_NORM_BWD as LAYER_NORM_BWD
from .norm import RMS_NORM as RMS_NORM
from .norm import RMS_NORM_BWD as RMS_NORM_BWD
from .norm import NormConfig as NormConfig
from .norm import layer_norm as layer_norm
from .norm import rms_norm as rms_norm
