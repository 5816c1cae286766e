"""The layers for Equinox, under the names of those they replace."""

from ..frameworks import require as _require

_require("equinox", __name__)  # first: it says what to install

from .attention import Attention as Attention
from .attention import Cache as Cache
from .head import LMHead as LMHead
from .linear import Linear as Linear
from .mlp import GatedMLP as GatedMLP
from .multihead_attention import MultiheadAttention as MultiheadAttention
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
from .rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
