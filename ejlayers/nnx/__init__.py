"""The layers for Flax NNX, under the names of those they replace."""

from .attention import KernelAttention as KernelAttention
from .attention import MultiHeadAttention as MultiHeadAttention
from .linear import Linear as Linear
