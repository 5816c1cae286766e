"""The environment variables: each is read when it is needed, and checked."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from .errors import ConfigError, LabelError

CACHE_DIR, RECORD, PREFIX = "EJKERNEL_CACHE_DIR", "EJKERNEL_OPS_RECORD", "EJKERNEL_OPS_PREFIX"
INTERPRET = "EJKERNEL_OPS_INTERPRET"
VARIABLES = (CACHE_DIR, RECORD, PREFIX, INTERPRET)
DEFAULT_PREFIX = "ejkernel_ops#"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,63}#")


def cache_dir() -> Path:
    """`EJKERNEL_CACHE_DIR`, else the platform's cache folder for this package.

    Raises:
        ConfigError: a relative path, which would be another folder in each process.
        FileNotFoundError: the user has no home folder.
    """
    given = _read(CACHE_DIR)
    if not given:
        with _at_home():
            return Path(platformdirs.user_cache_dir("ejkernel_ops")) / "configs"
    path = without_tilde(given)
    if not path.is_absolute():
        raise ConfigError(f"{CACHE_DIR} is {given!r}; expected an absolute path, or one that starts with ~")
    return path


def without_tilde(path: str | os.PathLike) -> Path:
    """A path, with the home folder in place of `~`.

    Raises:
        FileNotFoundError: the user has no home folder.
    """
    with _at_home():
        return Path(path).expanduser()


@contextlib.contextmanager
def _at_home() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # as in a container whose user is a number without a name
        raise FileNotFoundError(f"no home folder is known ({error}): set {CACHE_DIR} to an absolute path") from None


def recording() -> bool:
    """Whether lowered calls are recorded: not with `EJKERNEL_OPS_RECORD=0`.

    Raises:
        ConfigError: neither 0 nor 1.
    """
    return _switch(RECORD, "1")


def interpreting() -> bool:
    """Whether Triton kernels may run on a CPU, where they are interpreted: with `EJKERNEL_OPS_INTERPRET=1`.

    Raises:
        ConfigError: neither 0 nor 1.
    """
    return _switch(INTERPRET, "0")


def _switch(name: str, default: str) -> bool:
    given = _read(name) or default
    if given not in ("0", "1"):
        raise ConfigError(f"{name} is {given!r}; expected 0 or 1")
    return given == "1"


def xla_is_deterministic() -> bool:
    """Whether `XLA_FLAGS` asks for GPU kernels that give the same bits in each run."""
    asked = r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=true|=1)?(\s|$)"
    return re.search(asked, os.environ.get("XLA_FLAGS", "")) is not None


def label_prefix(prefix: str | None = None) -> str:
    """The prefix of labels: the argument, else `EJKERNEL_OPS_PREFIX`, else `ejkernel_ops#`.

    Raises:
        LabelError: a malformed prefix.
    """
    found = prefix or _read(PREFIX) or DEFAULT_PREFIX
    if not _PREFIX.fullmatch(found):
        name = "prefix" if prefix else PREFIX
        raise LabelError(f"{name} is {found!r}; expected 1 to 63 of A-Z a-z 0-9 _ . - and then #")
    return found


@contextlib.contextmanager
def unchanged(name: str) -> Iterator[None]:
    """Puts a variable back as it was, an empty one unset: for imports that change the environment."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before:
            os.environ[name] = before


def child_environment() -> dict[str, str]:
    """The environment of a child process that imports what this one can, and shares its device."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process may hold most of the memory already
    }


def _read(name: str) -> str | None:
    _warn_of_unknown()
    return os.environ.get(name)


@functools.cache  # once in a process
def _warn_of_unknown() -> None:
    for name in sorted(os.environ):
        if not name.startswith("EJKERNEL_OPS_") or name in VARIABLES:
            continue
        near = difflib.get_close_matches(name, VARIABLES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(VARIABLES)}"
        warnings.warn(f"the environment variable {name} is not known and has no effect; {hint}", stacklevel=4)
