"""Running, measuring and tuning kernels."""
