"""The layers for Flax NNX, under the names of those they replace."""

from ..frameworks import require as _require

_require("flax", __name__)  # first: it says what to install

from .attention import Attention as Attention
from .embed import Embed as Embed
from .head import LMHead as LMHead
from .kernel_attention import KernelAttention as KernelAttention
from .linear import Einsum as Einsum
from .linear import Linear as Linear
from .linear import LinearGeneral as LinearGeneral
from .mlp import GatedMLP as GatedMLP
from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
