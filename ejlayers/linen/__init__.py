"""The layers for Flax Linen, under the names of those they replace."""

from .attention import Attention as Attention
from .embed import Embed as Embed
from .head import LMHead as LMHead
from .linear import Dense as Dense
from .linear import DenseGeneral as DenseGeneral
from .mlp import GatedMLP as GatedMLP
from .multi_head_attention import KernelAttention as KernelAttention
from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .multi_head_attention import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from .multi_head_attention import SelfAttention as SelfAttention
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
