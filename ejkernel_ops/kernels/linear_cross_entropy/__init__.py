"""Cross-entropy of a linear map's logits, which are never all held: the op, its config and its kernels."""

from .kernels import LINEAR_CROSS_ENTROPY as LINEAR_CROSS_ENTROPY
from .kernels import LINEAR_CROSS_ENTROPY_BWD as LINEAR_CROSS_ENTROPY_BWD
from .kernels import LinearCrossEntropyConfig as LinearCrossEntropyConfig
from .op import linear_cross_entropy as linear_cross_entropy
