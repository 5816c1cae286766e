"""`AutotuningResult`: what was tuned, as a value that is shown, stored, merged, and entered around training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from ..config.cache import Key
from ..core.snapshot import Overlay, Reentrant, Snapshot, current, entered, with_overlay
from ..errors import CacheFormatError, ConfigError
from ..utils.files import read_file, replace_file
from .entry import Entry, conflict
from .hosts import compare_once

if TYPE_CHECKING:
    from .result_diff import ResultDiff

F = TypeVar("F", bound=Callable)


def versions() -> dict[str, str]:
    """What the timings depend on besides the device."""
    return {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}


@dataclasses.dataclass(frozen=True)
class AutotuningResult(Reentrant):
    """Tuned configs: inside `with result:` every call that they are for uses them, in jitted functions too.

    A function that is already jitted retraces once when it is first called inside; leaving, and entering
    a result of equal content, never retraces. The context may be nested, repeated and used in threads.

    Where there are several processes all must enter the same results in the same order: digests are compared when one
    is first entered (over the same others, if any), and where they differ all raise a `ConfigError`.

    Args:
        device: fingerprint of the device that was tuned for.
        entries: configs by call.
        skipped: `(label, reason)` of each label that was not tuned.
        versions: versions of what the timings depend on.
        step_ms: time of the whole step with heuristics and with these configs, in milliseconds: as the median of the
            ratios, round by round, which decides.
        notes: what else the reader should know.

    Raises:
        ConfigError: two configs for one call.

    Example:
        >>> from ejkernel_ops import device_fingerprint
        >>> result = AutotuningResult(device_fingerprint(), ())
        >>> with result:
        ...     pass
        >>> AutotuningResult.loads(result.dumps()) == result
        True
    """

    device: str
    entries: tuple[Entry, ...]
    _: dataclasses.KW_ONLY
    skipped: tuple[tuple[str, str], ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=versions, hash=False)
    step_ms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        if (pair := conflict(self.entries)) is not None:
            first, second = (self.entries[i] for i in pair)
            raise ConfigError(
                f"entries has two configs for {first.op_id_v}:{first.call_key}: {first.cfg} and {second.cfg}; expected "
                "one: merge results with `a | b` or a.merge(b)"
            )

    def as_overlay(self) -> dict[Key, Any]:
        """The configs by key, as `overlay_cache` takes them."""
        return {Key(self.device, e.op_id_v, e.call_key): e.cfg for e in self.entries}

    @functools.cached_property
    def _overlay(self) -> Overlay:
        placed = [e for e in self.entries if e.place is not None]
        places = {Key(self.device, e.op_id_v, e.call_key): (e.place, e.heuristic) for e in placed}
        return Overlay(self.as_overlay(), places)

    @property
    def digest(self) -> str:
        """Digest of the configs and of what they are for, near shapes too, equal in every process; not of timings."""
        return self._overlay.digest

    def _open(self) -> contextlib.AbstractContextManager:
        change = functools.partial(with_overlay, overlay=self._overlay)
        if jax.process_count() > 1:
            self._compare(current(), change(current()))
        return entered(change)

    def _compare(self, before: Snapshot, after: Snapshot) -> None:
        """Refuses a result that is not the other processes', before anything is compiled with it."""
        below = before.overlay.digest[:16] if before.overlay.configs else "none"
        text = f"digest {after.overlay.digest[:16]} over {below}"
        compare_once("entering a result", text, "load one file in each, or tune with sync=True")

    def wrap(self, fn: F) -> F:
        """A function that enters the result around each call: other jitted work is not retraced.

        Args:
            fn: a function, jitted or not.

        Returns:
            A function with the same arguments.
        """

        @functools.wraps(fn)
        def wrapped(*args, **kwargs):
            with self:
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    def compile(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Compiles a jitted function ahead of time with these configs.

        Args:
            step: a function, or what `jax.jit`, `nnx.jit` or `eqx.filter_jit` returns.
            *args: its arguments, abstract ones too.
            **kwargs: its keyword arguments.

        Returns:
            What `step.lower(...).compile()` returns: it can be called anywhere.
        """
        step = step if hasattr(step, "lower") else jax.jit(step)
        with self:
            return step.lower(*args, **kwargs).compile()

    # Compared

    def __or__(self, other: AutotuningResult) -> AutotuningResult:
        """Both results; of calls that are in both, the other's config.

        Raises:
            ConfigError: results of two devices.
        """
        return self.merge(other, prefer="other") if isinstance(other, AutotuningResult) else NotImplemented

    def merge(self, other: AutotuningResult, *, prefer: str | None = None) -> AutotuningResult:
        """Both results as one, for which the whole step has not been timed.

        Args:
            other: a result for the same device.
            prefer: whose config is taken where they have two for one call: `"self"` or `"other"`; `None` refuses.

        Returns:
            A result with every call of both.

        Raises:
            ConfigError: results of two devices, two configs for one call, or another `prefer`.
        """
        from .result_diff import merge

        return merge(self, other, prefer)

    def diff(self, other: AutotuningResult) -> ResultDiff:
        """What another result has that this one has not, and the reverse: calls, and their configs.

        Args:
            other: a result, for the same device or another.

        Returns:
            A `ResultDiff`, which is false where both have the same configs for the same calls.
        """
        from .result_diff import diff

        return diff(self, other)

    # Kept

    def dumps(self) -> str:
        """The result as JSON text.

        Raises:
            ConfigError: a config without a JSON form, or whose type its kernel does not declare.
        """
        from .result_json import dumps

        return dumps(self)

    @classmethod
    def loads(
        cls, text: str | bytes, *, allow_other_device: bool = False, allow_unknown_ops: bool = False
    ) -> AutotuningResult:
        """Reads JSON text; runs no code of it and imports nothing.

        Errors name the line. A config that the file has for a call is also checked when the call is traced.

        Args:
            text: what `dumps` returned.
            allow_other_device: use configs that were tuned for another device here.
            allow_unknown_ops: leave out ops that are not known in this process, and name them in `skipped`.

        Returns:
            The result.

        Raises:
            CacheFormatError: not a result, damaged, of another device, with an illegal config or with two for one call.
            ConfigError: an op that is not known in this process.
        """
        from .result_json import loads

        return loads(cls, text, allow_other_device, allow_unknown_ops)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the result to a file, which is replaced as a whole.

        Raises:
            FileNotFoundError: the folder does not exist.
            ConfigError: as `dumps`.
        """
        replace_file(path, self.dumps())

    @classmethod
    def load(
        cls, path: str | os.PathLike, *, allow_other_device: bool = False, allow_unknown_ops: bool = False
    ) -> AutotuningResult:
        """Reads a file that `save` wrote; see `loads`."""
        try:
            return cls.loads(
                read_file(path), allow_other_device=allow_other_device, allow_unknown_ops=allow_unknown_ops
            )
        except (CacheFormatError, ConfigError) as error:
            raise type(error)(f"{path}: {error}") from None

    # Seen

    def __str__(self) -> str:
        from .result_text import to_text

        return to_text(self)

    def to_markdown(self) -> str:
        """What `print` shows, as Markdown: a table, and a list of the lines below it."""
        from .result_text import to_markdown

        return to_markdown(self)

    def plot(self, path: str | os.PathLike) -> None:
        """Draws each call's gain, and the times of its candidates, into a picture.

        Args:
            path: the file; its suffix says the format: `.png`, `.svg` or `.pdf`.

        Raises:
            ConfigError: another suffix.
            FileNotFoundError: the folder does not exist.
            UnsupportedError: matplotlib is not installed.
        """
        from .plot import plot

        plot(self, path)
