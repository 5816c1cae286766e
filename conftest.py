"""Modules of the packages are collected for the examples in their docstrings, but for those that need Triton."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # elsewhere a module that cannot be imported is an error
    collect_ignore_glob += ["ejkernel_ops/triton_*.py", "ejkernel_ops/kernels/*/triton_*.py"]
