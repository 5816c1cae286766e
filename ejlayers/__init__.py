"""Drop-in layers for JAX models, with kernels that are tuned on your own train step.

`ejlayers.nnx` and `ejlayers.linen` have the layers for Flax, `ejlayers.equinox` those for Equinox; importing `ejlayers`
imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel_ops import AttentionConfig as AttentionConfig
from ejkernel_ops import AutotuningResult as AutotuningResult
from ejkernel_ops import BwdParams as BwdParams
from ejkernel_ops import FwdParams as FwdParams
from ejkernel_ops import GatedLinearConfig as GatedLinearConfig
from ejkernel_ops import LinearConfig as LinearConfig
from ejkernel_ops import LinearCrossEntropyConfig as LinearCrossEntropyConfig
from ejkernel_ops import NormConfig as NormConfig
from ejkernel_ops import RotaryConfig as RotaryConfig
from ejkernel_ops import RotaryScaling as RotaryScaling

from .check import check as check
from .explain import ExplainReport as ExplainReport
from .explain import explain as explain
from .frameworks import FRAMEWORKS
from .huggingface import from_huggingface as from_huggingface
from .report import SwapReport as SwapReport
from .report import report as report
from .rotary import Rotary as Rotary
from .set_config import set_config as set_config
from .swap import swap as swap
from .tune import tune as tune

if TYPE_CHECKING:
    from . import equinox as equinox
    from . import linen as linen
    from . import nnx as nnx


def __getattr__(name: str) -> Any:
    if name in FRAMEWORKS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'ejlayers' has no attribute {name!r}")


def __dir__() -> list[str]:
    hidden = {"annotations", "importlib", "Any", "TYPE_CHECKING", "FRAMEWORKS"}
    return sorted({*globals(), *FRAMEWORKS} - hidden)
