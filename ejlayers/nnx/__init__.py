"""The layers for Flax NNX, under the names of those they replace."""

from .attention import KernelAttention as KernelAttention
from .attention import MultiHeadAttention as MultiHeadAttention
from .embed import Embed as Embed
from .linear import Einsum as Einsum
from .linear import Linear as Linear
from .linear import LinearGeneral as LinearGeneral
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
