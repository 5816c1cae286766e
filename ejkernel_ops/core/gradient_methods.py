"""Gradients written as methods of a kernel, `vjp` or `custom_vjp`, as a backward kernel with a label of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError
from ..utils.fingerprint import is_array
from .kernel import Kernel, is_float, random_array

STYLES = ("vjp", "custom_vjp")


def gradient_style(kernel: Kernel) -> str | None:
    """Which of the two styles a kernel uses, if any.

    Raises:
        ConfigError: two ways to one gradient, or half of one.
    """
    found = [style for style in STYLES if kernel.defines(style)]
    ways = [*(["backward"] if kernel.backward is not None else []), *found]
    if len(ways) > 1:
        raise ConfigError(f"{type(kernel).__qualname__} defines {' and '.join(ways)}; a gradient has one definition")
    if kernel.defines("fwd_with_residuals") != ("vjp" in found) and "backward" not in ways:
        raise ConfigError(
            f"{type(kernel).__qualname__} defines only one of fwd_with_residuals and vjp; define both: "
            "fwd_with_residuals(*args, cfg, **kwargs) -> (out, residuals) and "
            "vjp(residuals, out, cotangent, *args, cfg, **kwargs) -> gradients"
        )
    if found and len(kernel.op_id) > 60:
        raise ConfigError(f"name is {kernel.op_id!r}; expected at most 60 characters: its gradient is <name>_bwd")
    return found[0] if found else None


class MethodBackward(Kernel):
    """The kernel `<name>_bwd` of a kernel that computes its gradients in a method.

    It has the configs, candidates and back ends of its forward, chosen and tuned apart from it.

    Args:
        forward: the kernel with the method.
        style: `"vjp"` or `"custom_vjp"`.
    """

    lazy_cotangents = True  # here they are made zeros where the method wants arrays

    def __init__(self, forward: Kernel, style: str):
        self.forward, self.style = forward, style
        self.config_cls, self.fields = forward.config_cls, forward.fields  # type: ignore[misc]
        super().__init__(f"{forward.op_id}_bwd", forward.version)

    @functools.cached_property
    def backends(self) -> tuple[str, ...]:
        """Those of the forward for which the method is defined."""
        plain = hasattr(self.forward, self.style)
        return tuple(b for b in self.forward.backends if plain or hasattr(self.forward, f"{self.style}_{b}"))

    def illegal(self, inv: Any, cfg: Any) -> str | None:
        """That of the forward."""
        return self.forward.illegal(self._forward_call(inv), cfg)

    @property
    def has_rule(self) -> bool:
        """That of the forward."""
        return self.forward.has_rule

    def cost(self, inv: Any, cfg: Any) -> float | None:
        """That of the forward."""
        return self.forward.cost(self._forward_call(inv), cfg)

    def state(self) -> str:
        """That of the forward."""
        return self.forward.state()

    def __eq__(self, other):
        return isinstance(other, MethodBackward) and self.style == other.style and self.forward == other.forward

    def __hash__(self):
        return hash((MethodBackward, self.forward))

    def run(self, *operands, cfg, needs, **kwargs):
        """Calls the method; operands are the forward's, its outputs (and residuals), and cotangents."""
        return self.variant("run", None, None)(*operands, cfg=cfg, needs=needs, **kwargs)

    def variant(self, name: str, backend: str | None, platform: str | None, inv: Any = None) -> Callable:
        """The forward's method of that name; for `run` its gradient method."""
        forward = None if inv is None else self._forward_call(inv)
        if name != "run":
            method = self.forward.variant(name, backend, platform, forward)
            return lambda inv: method(self._forward_call(inv))
        method = self.forward.variant(self.style, backend, platform, forward)

        @functools.wraps(method)
        def run(*operands, cfg, needs, **kwargs):
            args, rest = operands[: len(needs)], operands[len(needs) :]
            return getattr(self, f"_{self.style}")(method, args, rest, cfg, kwargs)

        return run

    def _vjp(self, method: Callable, args: tuple, rest: tuple, cfg: Any, kwargs: dict) -> Any:
        out, residuals, cotangent = rest
        names = [*list(self.forward.signature.parameters)[: len(args)], *(f"{n}=" for n in ["cfg", *kwargs])]
        form = f"vjp(residuals, out, cotangent, {', '.join(names)})"
        return self._called(method, form, (residuals, out, _filled(out, cotangent), *args), {"cfg": cfg, **kwargs})

    def _custom_vjp(self, method: Callable, args: tuple, rest: tuple, cfg: Any, kwargs: dict) -> Any:
        outs, cotangents = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        given = (args, cfg, kwargs, tuple(map(_filled, outs, cotangents)))
        return self._called(method, "custom_vjp(primals, cfg, kwargs, cotangents)", given, {})

    def _called(self, method: Callable, form: str, args: tuple, kwargs: dict) -> Any:
        signature = inspect.signature(method)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = f"{self.forward.op_id_v}: {self.style}{signature}"
            raise ConfigError(f"{name} cannot be called as {form}: {error}") from None
        return method(*args, **kwargs)

    def all_candidates(self, inv: Any) -> Iterable[Any]:
        """Those of the forward."""
        return self.forward.all_candidates(self._forward_call(inv))

    def unsupported(self, inv: Any, backend: str) -> str | None:
        """As for the forward."""
        return self.forward.unsupported(self._forward_call(inv), backend)

    def make_inputs(self, inv: Any, rng: np.random.Generator) -> list[Any]:
        """Operands of the forward, what it makes of them, and random cotangents."""
        from ..config.selection import heuristic
        from .call import make_call
        from .primitive import execute

        forward = self._forward_call(inv)
        arrays = self.forward.make_inputs(forward, rng)
        call, _ = make_call(self.forward, forward.args, forward.kwargs, (), residuals=self.style == "vjp")
        outs = jax.jit(lambda *x: execute(call, heuristic(forward), x, inv.platform))(*arrays)
        rest = inv.args[len(inv.needs) :]
        cotangents = [
            random_array(rng, x) for x in jax.tree.leaves(rest[2] if call.residuals else rest[len(rest) // 2 :])
        ]
        bound = call.arguments(arrays)
        return [x for x in jax.tree.leaves((bound.args, outs, cotangents, dict(bound.kwargs))) if is_array(x)]

    def _forward_call(self, inv: Any) -> Any:
        """The call that a backward call differentiates."""
        from .invocation import Invocation

        if inv.needs is None:
            raise ConfigError(f"{inv!r} has no needs; pass needs=, a bool for each array of the forward's arguments")
        return Invocation(self.forward, inv.args[: len(inv.needs)], inv.kwargs, platform=inv.platform)


def _filled(out: Any, cotangents: Any) -> Any:
    """Cotangents with zeros where none came; of outputs that are no floats, `None`."""
    return jax.tree.map(lambda x, ct: jnp.zeros_like(x) if ct is None and is_float(x) else ct, out, cotangents)


def plain_gradients(run: Callable, operands: Sequence[Any], needs: Sequence[bool], cotangents: Sequence[Any]) -> list:
    """Gradients of JAX code with respect to the operands that want one, in order.

    Args:
        run: from operands to flat outputs.
        operands: where to differentiate.
        needs: which operands want a gradient.
        cotangents: of the outputs, `None` where there is none.
    """

    def some(*wanted):
        given = iter(wanted)
        outs = run(*[next(given) if needed else x for x, needed in zip(operands, needs)])
        return [out for out, ct in zip(outs, cotangents) if ct is not None]

    _, pullback = jax.vjp(some, *[x for x, needed in zip(operands, needs) if needed])
    return list(pullback([ct for ct in cotangents if ct is not None]))
