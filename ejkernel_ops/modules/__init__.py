"""The ops under the path that the guide of the framework uses."""

from ..kernels import flash_attention as flash_attention
