"""The layers for Flax Linen, under the names of those they replace.

`ejlayers.swap(model)` gives a new module of a subclass of the model's class, equal to another one of an equal swap.
While a method of it runs, layers inside of it run as ours, in `setup`, in compact methods and under every transform of
Flax. Paths are those of the parameters, with dots: `blocks_0.attention.query`. Which layers there are is known when the
model runs: a rule that matches none is an error in `init` (without a `method`) and in `report(model, variables,
*inputs)`. Two things are not seen: a submodule that is taken out of a bound model and called by itself, and how
modules under `nn.jit` differ whose fields are equal, for they share a trace: what rules say of the first holds for all.
"""

from ..frameworks import require as _require

_require("flax", __name__)  # first: it says what to install

from .attention import Attention as Attention
from .embed import Embed as Embed
from .head import LMHead as LMHead
from .kernel_attention import KernelAttention as KernelAttention
from .linear import Dense as Dense
from .linear import DenseGeneral as DenseGeneral
from .linear import Einsum as Einsum
from .mlp import GatedMLP as GatedMLP
from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .multi_head_attention import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from .multi_head_attention import SelfAttention as SelfAttention
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
