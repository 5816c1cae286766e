"""Kernels and their calls."""

from .dims import Dims as Dims
from .invocation import Invocation as Invocation
from .kernel import Kernel as Kernel
from .types import Cfg as Cfg
from .types import Out as Out
