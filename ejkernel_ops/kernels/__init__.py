"""The built-in ops."""

from .attention import ATTENTION as ATTENTION
from .attention import ATTENTION_BWD as ATTENTION_BWD
from .attention import AttentionConfig as AttentionConfig
from .attention import flash_attention as flash_attention
from .linear import LINEAR as LINEAR
from .linear import LINEAR_BWD as LINEAR_BWD
from .linear import LinearConfig as LinearConfig
from .linear import linear as linear
from .rotary import ROTARY as ROTARY
from .rotary import ROTARY_BWD as ROTARY_BWD
from .rotary import RotaryConfig as RotaryConfig
from .rotary import RotaryScaling as RotaryScaling
from .rotary import rotary_embedding as rotary_embedding
