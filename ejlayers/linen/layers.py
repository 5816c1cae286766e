"""Which of our layers replaces which stock layer of Flax Linen."""

from __future__ import annotations

from flax import linen as nn

from .attention import Attention
from .embed import Embed
from .head import LMHead
from .linear import Dense, DenseGeneral, Einsum
from .mlp import GatedMLP
from .multi_head_attention import MultiHeadAttention, MultiHeadDotProductAttention, SelfAttention
from .norm import LayerNorm, RMSNorm

REPLACEMENTS: dict[type, type] = {
    nn.MultiHeadDotProductAttention: MultiHeadDotProductAttention,
    nn.MultiHeadAttention: MultiHeadAttention,
    nn.SelfAttention: SelfAttention,
    nn.Dense: Dense,
    nn.DenseGeneral: DenseGeneral,
    nn.Einsum: Einsum,
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    nn.Embed: Embed,
}
STOCK = {ours: stock for stock, ours in REPLACEMENTS.items()}
LAYERS = (*STOCK, Attention, GatedMLP, LMHead)
METHODS = ("__call__", "attend", "loss")  # those that run kernels
