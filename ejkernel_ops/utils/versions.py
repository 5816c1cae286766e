"""Versions that timings depend on besides the device."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from pathlib import Path

_PACKAGES = ("ejlayers", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton", "jax-triton")
_DRIVER = Path("/proc/driver/nvidia/version")


@functools.cache
def tuned_with() -> dict[str, str]:
    """The installed packages that compile or run kernels, and NVIDIA's driver, each with its version.

    No device is touched.
    """
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if driver := _driver():
        found["driver"] = driver
    return found


def _driver() -> str | None:
    try:
        text = _DRIVER.read_text()
    except OSError:  # no NVIDIA GPU, or another operating system
        return None
    number = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return number and number[0]
