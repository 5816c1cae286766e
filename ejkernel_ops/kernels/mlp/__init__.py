"""Two linear maps with an activation between, gated or not, that keep little: the op, its config and its kernels."""

from .kernels import MLP as MLP
from .kernels import MLP_BWD as MLP_BWD
from .kernels import MlpConfig as MlpConfig
from .op import mlp as mlp
