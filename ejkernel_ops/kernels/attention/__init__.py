"""Attention: the op, its config and its kernels."""

from .config import AttentionConfig as AttentionConfig
from .op import ATTENTION as ATTENTION
from .op import ATTENTION_BWD as ATTENTION_BWD
from .op import flash_attention as flash_attention
