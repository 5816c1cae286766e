"""`Kernel`: one direction of one operation, with its back ends, configs and backward kernel."""

from __future__ import annotations

import functools
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import jax
import jax.numpy as jnp
import numpy as np

from ..environment import INTERPRET, interpreting
from ..errors import ConfigError, UnsupportedError
from ..utils.fingerprint import platform_kind
from ..utils.values import stable_json
from .dims import Dims
from .types import Cfg, Out

if TYPE_CHECKING:
    from .invocation import Invocation

BACKENDS = ("triton", "pallas", "cudnn", "xla")
_PLATFORMS = ("gpu", "tpu", "cpu")
_SUFFIXES = tuple(f"_{s}" for s in (*BACKENDS, *_PLATFORMS))
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VERSION = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_AUTOMATIC = {"gpu": ("triton", "cudnn"), "tpu": ("pallas",), "cpu": ("xla",)}
_WHERE = {"triton": ("gpu",), "cudnn": ("gpu",), "pallas": ("tpu", "gpu"), "xla": _PLATFORMS}

KERNELS: dict[str, Kernel] = {}  # op_id_v -> kernel: what results and cache entries may name


class Kernel(Generic[Cfg, Out]):
    """One direction of one operation: what it computes, on which back ends, with which configs.

    A subclass defines `run` or variants of it (`run_triton, run_pallas, run_cudnn, run_xla`, or by
    platform `run_gpu, run_tpu, run_cpu`), and `heuristic_cfg`. The same suffixes work for `heuristic_cfg`,
    `candidate_cfgs` and the methods of a gradient, and for no other. Where the config has a field `backend`,
    that field picks the variant; otherwise the device does: the first back end which `unsupported` lets through, in the
    order above, else the platform's own, which comes first for `heuristic_cfg`. Candidates are those of every back end
    that the device can have.

    Its gradient is one of: a `backward` kernel; the methods `fwd_with_residuals(*args, cfg, **kwargs) -> (out,
    residuals)` and `vjp(residuals, out, cotangent, *args, cfg, **kwargs)`; the method `custom_vjp(primals, cfg,
    kwargs, cotangents)`, with one cotangent for each output; JAX's own derivative of the code of `run`. The methods
    become the kernel `<name>_bwd`, which is labelled and tuned apart. All return one gradient for each positional
    parameter of `run` (`None` where there is none), and where keyword-only ones are arrays a dict of theirs at the
    end. The cotangent of an output that is no float is `None`. Residuals must not depend on the config.

    Args:
        name: the op's name, `[A-Za-z0-9_.-]`, at most 64 characters; default the class attribute
            `name`, else the class name.
        version: raised when the meaning of the kernel or of its config changes.
        op_id: another spelling of `name`.

    Attributes:
        version: text such as `"2"`.
        config_cls: the type of its configs; default the first parameter of `Kernel[Config, Out]`.
        backward: the kernel that computes gradients. Its `run` gets the operands, all outputs, the
            cotangents of all outputs, the keyword arguments, and `needs`, which has the structure of
            the operands with a bool in place of each array. Of a kernel with `fwd_with_residuals` it gets
            the operands, the output, the residuals, and the output's cotangent.
        rows: for each positional parameter, whether its leading axis holds rows that more rows may
            join (`True`), it is shared by all rows (`False`), or it is shared where that axis has
            length 1 (`"broadcast"`). `None`: unknown, so `jax.vmap` loops.
        out_rows: the same for each output.
        residual_rows: the same for each residual; `None`: unknown, so `vmap` of a gradient loops.
        fields: for each back end, the dotted names of the config fields that it reads; `None`: any.
        tune_with_backward: whether a call that is differentiated is tuned with its backward: configs are checked by
            output and gradients, and timed by both, the backward with its heuristic config. For what a forward does in
            the backward's place.

    Raises:
        ConfigError: a malformed name or version, another class that has the same name and version, or a gradient
            that is defined twice or by half.

    Example:
        >>> class Double(Kernel):
        ...     def run(self, x, *, cfg):
        ...         return x * cfg
        ...     def heuristic_cfg(self, inv):
        ...         return 2
        >>> Double(name="double").op_id_v
        'double@v1'
        >>> float(Double(name="double")(3.0 * jnp.ones(())))
        6.0
    """

    name: ClassVar[str] = ""
    version: str = "1"
    config_cls: ClassVar[type | None] = None
    backward: Kernel | None = None
    rows: ClassVar[tuple[bool | str, ...] | None] = None
    out_rows: ClassVar[tuple[bool | str, ...] | None] = None
    residual_rows: ClassVar[tuple[bool | str, ...] | None] = None
    fields: ClassVar[dict[str, tuple[str, ...]] | None] = None
    tune_with_backward: ClassVar[bool] = False

    def __init__(self, name: str | None = None, version: str | None = None, *, op_id: str | None = None):
        if name is not None and op_id is not None and name != op_id:
            raise ConfigError(f"name is {name!r} and op_id is {op_id!r}: two spellings of one thing; give one")
        for given in (name, op_id):
            if not isinstance(given, (str, type(None))):
                raise ConfigError(
                    f"name is a {type(given).__name__}; expected text. A kernel is made first and then called: "
                    f"{type(self).__name__}()(...)"
                )
        own = getattr(type(self), "op_id", None)  # a class attribute, the other spelling of `name`
        self.op_id = name or op_id or type(self).name or own or type(self).__name__
        self.version = str(self.version if version is None else version)
        if not _NAME.fullmatch(self.op_id) or self.op_id.strip(".") == "":
            raise ConfigError(f"name is {self.op_id!r}; expected 1 to 64 of the characters A-Z a-z 0-9 _ . -")
        if not _VERSION.fullmatch(self.version):
            raise ConfigError(f"version is {self.version!r}; expected 1 to 32 of A-Z a-z 0-9 _ . -")
        self.op_id_v = f"{self.op_id}@v{self.version}"
        from .gradient_methods import MethodBackward, gradient_style

        style = gradient_style(self)
        _register(self)
        if style is not None:
            self.backward = MethodBackward(self, style)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):  # class MyKernel(Kernel[MyConfig, Out])
            config = next(iter(typing.get_args(base)), None)
            if isinstance(config, type) and "config_cls" not in vars(cls):
                cls.config_cls = config
        for suffix in ("", *_SUFFIXES):  # the other documented spelling
            if "config_space" + suffix in vars(cls):
                if "candidate_cfgs" + suffix in vars(cls):
                    raise ConfigError(
                        f"{cls.__qualname__} defines candidate_cfgs{suffix} and config_space{suffix}: two spellings of "
                        "one thing; expected one"
                    )
                setattr(cls, "candidate_cfgs" + suffix, vars(cls)["config_space" + suffix])

    # What subclasses define

    def prepare(self, *args, **kwargs) -> tuple[tuple, dict]:
        """Canonical arguments of a call; called once, before the call is keyed."""
        return args, kwargs

    def run(self, *args, cfg: Any, **kwargs) -> Any:
        """Computes the output, where no variant of it fits the config or the device better."""
        raise UnsupportedError(f"{self.op_id_v} has no run method for this device; it has {self.backends or 'none'}")

    def heuristic_cfg(self, inv: Invocation) -> Any:
        """A config that is legal for every call, chosen from its shapes without measuring."""
        raise ConfigError(f"{self.op_id_v} defines no heuristic_cfg; define it, or pass a config to the call")

    def candidate_cfgs(self, inv: Invocation) -> Iterable[Any]:
        """The configs that tuning tries."""
        return (self.variant("heuristic_cfg", None, inv.platform, inv)(inv),)

    def out_like(self, *args, **kwargs) -> Any:
        """Cheap JAX code whose results have the shapes, dtypes and shardings of `run`'s; `None`: ask `run`."""
        return None

    def unsupported(self, inv: Invocation, backend: str) -> str | None:
        """Why a back end cannot do this call; `None` where it can."""
        return None

    def illegal(self, inv: Invocation, cfg: Any) -> str | None:
        """Why a config cannot do this call, from closed formulas (shared memory, say); `None` where it may."""
        return None

    def cost(self, inv: Invocation, cfg: Any) -> float | None:
        """A predicted time of a config, in any unit: tuning tries cheap ones first; `None`: no idea."""
        return None

    def by_rows(self, kwargs: dict[str, Any], cfg: Any) -> dict[str, Any] | None:
        """Keyword arguments with which a call gives for each row what its one output is the sum of; `None`: none are.

        `jax.vmap` then makes one call of all examples' rows, where operands that rows share are shared by them too.
        Given are the keyword arguments of the call, and the config that its caller pins, or `None`.
        """
        return None

    def dims(self, **arguments: Any) -> Dims | None:
        """The names of the axes of a call's arrays, for devices to share it out; `None`: rows alone, if it has `rows`.

        Given are the arguments of a call, arrays as `ShapeDtypeStruct`s.
        """
        return None

    def on_shards(self, run: Callable[..., Any], axes: dict[str, tuple[str, ...]], *args: Any, **kwargs: Any) -> Any:
        """What a device makes of its parts of the arguments; for what is not just the kernel on them.

        Args:
            run: runs the kernel on arguments as its `run` takes them, `cfg` and `needs` left out, and returns its
                output; of a backward kernel a dict of the gradients by the forward's parameters.
            axes: the mesh axes that split each name of `dims`; an output that lacks a name is summed over them later.
            *args: the device's parts of the arguments.
            **kwargs: the same.

        Returns:
            As `run`.
        """
        return run(*args, **kwargs)

    def alone(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments with which one device alone does what it does among others; default: the same.

        A call has the key of that, and is tuned as that.
        """
        return {}

    def odd_calls(self, inv: Invocation) -> Iterable[Invocation]:
        """Calls like this one with odd lengths, at which a winner must be right too; default: a row less."""
        if self.rows is None or len(self.rows) != len(inv.args):
            return ()
        lengths = {x.shape[0] for kind, x in zip(self.rows, inv.args) if kind is True and _has_rows(x)}
        if len(lengths) != 1 or (length := lengths.pop()) < 3:
            return ()
        odd = length - 1 if length % 2 == 0 else length - 2

        def resized(kind: Any, x: Any) -> Any:
            if not _has_rows(x) or kind is False or (kind == "broadcast" and x.shape[0] == 1):
                return x
            return jax.ShapeDtypeStruct((odd, *x.shape[1:]), x.dtype, weak_type=x.weak_type)

        return (inv.like(*map(resized, self.rows, inv.args)),)

    def narrow(self, cfg: Any) -> Any:
        """The part of a caller's config that belongs to this kernel."""
        return cfg

    def make_inputs(self, inv: Invocation, rng: np.random.Generator) -> list[Any]:
        """Operands to tune with, one for each array: random normal floats, zeros for the rest."""
        return [random_array(rng, leaf) for leaf in inv.operands]

    # What the framework asks

    @functools.cached_property
    def backends(self) -> tuple[str, ...]:
        """The back ends that have a `run_<backend>`."""
        return tuple(b for b in BACKENDS if hasattr(self, f"run_{b}"))

    @property
    def has_rule(self) -> bool:
        """Whether `illegal` can say that a config of another shape may be used: only then is one taken."""
        return type(self).illegal is not Kernel.illegal

    @property
    def has_dims(self) -> bool:
        """Whether the axes of its arrays have names."""
        return type(self).dims is not Kernel.dims

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The parameters of a call, `cfg` (and a backward's `needs`) left out."""
        names = [f"run{s}" for s in _SUFFIXES if hasattr(self, f"run{s}")]
        method = self.run if type(self).run is not Kernel.run or not names else getattr(self, names[0])
        found = inspect.signature(method)
        return found.replace(parameters=[p for p in found.parameters.values() if p.name not in ("cfg", "needs")])

    def defines(self, name: str) -> bool:
        """Whether the kernel has a method of that name, or a variant of it."""
        return any(hasattr(self, name + suffix) for suffix in ("", *_SUFFIXES))

    def variant(self, name: str, backend: str | None, platform: str | None, inv: Invocation | None = None) -> Any:
        """The method `name_<suffix>` for a back end, or else for the platform of a call, or else `name` itself."""
        plain = getattr(self, name, None)
        kind = platform_kind(platform)
        suffixes = [backend] if backend else [*_AUTOMATIC[kind], kind]
        if name == "heuristic_cfg":  # a platform's own chooses among the back ends
            suffixes.sort(key=lambda suffix: suffix != kind)
        if backend is None and getattr(type(self), name, None) is getattr(Kernel, name, None):
            suffixes.append("xla")  # every platform compiles it
        for suffix in suffixes:
            if (method := getattr(self, f"{name}_{suffix}", None)) is None:
                continue
            if backend or inv is None or suffix not in BACKENDS or self.unsupported(inv, suffix) is None:
                return method
        if plain is None:
            raise UnsupportedError(f"{self.op_id_v} has no {name} for {suffixes[0]}; define {name}, or {name}_xla")
        return plain

    def all_candidates(self, inv: Invocation) -> Iterable[Any]:
        """The configs that tuning tries on the device of a call: those of the platform, or of its back ends, or all."""
        kind = platform_kind(inv.platform)
        suffixes = [kind] if hasattr(self, f"candidate_cfgs_{kind}") else [b for b in BACKENDS if kind in _WHERE[b]]
        methods = [m for s in suffixes if (m := getattr(self, f"candidate_cfgs_{s}", None)) is not None]
        return [cfg for method in methods or [self.candidate_cfgs] for cfg in method(inv)]

    def why_not(self, inv: Invocation, backend: str) -> str | None:
        """Why a back end is not eligible for a call; `None` where it is."""
        if backend not in BACKENDS:
            return f"unknown back end {backend!r}; known: {', '.join(BACKENDS)}"
        if backend not in self.backends:
            return f"{self.op_id} has no {backend} version; it has {', '.join(self.backends) or 'run alone'}"
        if platform_kind(inv.platform) not in _WHERE[backend] and not (backend == "triton" and interpreting()):
            hint = f" (for tests, {INTERPRET}=1 interprets it on a CPU)" if backend == "triton" else ""
            return f"{backend} needs a {' or '.join(_WHERE[backend])}, this is a {platform_kind(inv.platform)}{hint}"
        return self.unsupported(inv, backend)

    def missed(self, inv: Invocation) -> list[str]:
        """Of the back ends for the platform of a call those that cannot do it, as `backend: why`."""
        kind = platform_kind(inv.platform)
        reasons = ((b, self.why_not(inv, b)) for b in self.backends if kind in _WHERE[b])
        return [f"{backend}: {reason}" for backend, reason in reasons if reason is not None]

    def state(self) -> str:
        """Instance attributes that a subclass added, as text: they are part of what the kernel is."""
        own = {k: v for k, v in vars(self).items() if k not in _OWN and not isinstance(v, Kernel)}
        return stable_json(own, where=f"attributes of {self.op_id_v}") if own else ""

    def __call__(self, *args, cfg: Any = None, **kwargs) -> Any:
        """Runs the kernel through the default executor."""
        from ..execution.executor import default_executor

        return default_executor()(self, *args, cfg=cfg, **kwargs)

    def __eq__(self, other):
        return type(self) is type(other) and self.op_id_v == other.op_id_v and self.state() == other.state()

    def __hash__(self):
        return hash((type(self), self.op_id_v))

    def __repr__(self):
        return f"{type(self).__name__}({self.op_id_v})"


_OWN = {"op_id", "op_id_v", "version", "backends", "signature"}


def _register(kernel: Kernel) -> None:
    cls, known = type(kernel), KERNELS.get(kernel.op_id_v)
    if known is not None and type(known) is not cls:
        where = [f"{c.__module__}.{c.__qualname__}" for c in (type(known), cls)]
        if where[0] != where[1]:
            raise ConfigError(
                f"{kernel.op_id_v} is the name of both {where[0]} and {where[1]}; give one another name or version"
            )
        warnings.warn(f"{where[1]} was defined again: it replaces {kernel.op_id_v}", stacklevel=4)
    KERNELS[kernel.op_id_v] = kernel


def require_kernel(kernel: Any) -> None:
    """Refuses what is no kernel.

    Raises:
        TypeError: not a `Kernel`.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel is {kernel!r}; expected a Kernel: an instance, not its class or a function")


def find_kernel(op_id_v: str) -> Kernel:
    """The kernel of a name; raises `ConfigError` where no such kernel was made in this process."""
    if op_id_v not in KERNELS:
        known = ", ".join(sorted(KERNELS)) or "none"
        raise ConfigError(f"unknown op {op_id_v!r}; known: {known}. Import its module and make the kernel: MyKernel()")
    return KERNELS[op_id_v]


def random_array(rng: np.random.Generator, like: Any) -> Any:
    """A standard normal array of a float type, zeros of any other."""
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.asarray(rng.standard_normal(like.shape, dtype=np.float32)).astype(like.dtype)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        pair = rng.standard_normal((2, *like.shape), dtype=np.float32)
        return jnp.asarray(pair[0] + 1j * pair[1]).astype(like.dtype)
    return jnp.zeros(like.shape, like.dtype)


def _has_rows(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and len(x.shape) > 0


def row_kinds(kernel: Kernel, count: int) -> Sequence[bool | str | None]:
    """The row kind of each of `count` positional parameters."""
    if kernel.rows is None:
        return [None] * count
    if len(kernel.rows) != count:
        raise ConfigError(f"{kernel.op_id_v}.rows has {len(kernel.rows)} entries for {count} positional arguments")
    return kernel.rows


def is_float(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an operand can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def __getattr__(name: str) -> Any:
    """`Invocation` is documented under this module, too; it is made of kernels."""
    if name == "Invocation":
        from .invocation import Invocation

        return Invocation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
