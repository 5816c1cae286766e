"""The errors of the framework: each names the argument, what came, what was expected and what to do."""

from __future__ import annotations


class EjkernelError(Exception):
    """Base class of every error that this package raises on its own account."""


class ConfigError(EjkernelError, ValueError):
    """A config, a config key or a static argument that cannot be used."""


class CacheFormatError(EjkernelError, ValueError):
    """A stored config, call or result that cannot be read, or that was made for another device."""


class LabelError(EjkernelError, ValueError):
    """A label that is malformed, or that names a call nobody recorded."""


class TuningError(EjkernelError, RuntimeError):
    """A tuning run that gives no config, such as one in which the heuristic config does not run."""


class DeviceLostError(TuningError):
    """A candidate broke the device for this process: nothing more can be run, let alone tuned, before a restart."""


class UnsupportedError(EjkernelError, NotImplementedError):
    """A back end that cannot do what was asked of it, or an option that nothing supports yet."""
