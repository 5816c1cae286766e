"""Gradients written as methods, `vjp` with residuals or `custom_vjp`, are right whatever a call's arguments are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    Autotuner,
    ConfigError,
    ConfigSelectorChain,
    Invocation,
    Kernel,
    UnsupportedError,
    autotune_lowered,
    find_labels_in_lowered,
    overlay_cache,
    policy_override,
    record_invocation,
)
from ejkernel_ops.utils.meta import split_label

from .ops import close, jitted, normal, runs
from .told import key_of

X, W, B, IDS = normal(0, 3, 4), normal(1, 4, 5), normal(2, 5), np.array([2, 0, 1], np.int32)


class Gradients(Kernel):
    """The heuristic of all kernels here."""

    def heuristic_cfg(self, inv):
        return 1


def reference(x, params, ids, scale, bias=None, power=2.0):
    """The function that both kernels below compute."""
    hidden = jnp.tanh(x[ids] @ params["weight"] * scale + (0.0 if bias is None else bias))
    return hidden**power, hidden.sum(1)


def gradients(x, params, ids, scale, bias, power, hidden, cotangents):
    """By hand: positional ones, with `None` for what has none, and those of keyword arrays by name."""
    d = (cotangents[0] * power * hidden ** (power - 1) + cotangents[1][:, None]) * (1 - hidden**2)
    product = x[ids] @ params["weight"]
    dx = jnp.zeros_like(x).at[ids].add(d @ params["weight"].T * scale)
    dweight = x[ids].T @ d * scale
    named = {"bias": None if bias is None else d.sum(0)}
    return dx, {"weight": dweight, "name": None}, None, jnp.sum(d * product), named


class Residual(Gradients):
    """The style of `fwd_with_residuals` and `vjp`."""

    name = "test_residual"

    def run(self, x, params, ids, scale, *, cfg, bias=None, power=2.0):
        return reference(x, params, ids, scale, bias, power)

    def fwd_with_residuals(self, x, params, ids, scale, *, cfg, bias=None, power=2.0):
        hidden = jnp.tanh(x[ids] @ params["weight"] * scale + (0.0 if bias is None else bias))
        return (hidden**power, hidden.sum(1)), {"hidden": hidden, "nothing": None, "ids": ids}

    def vjp(self, residuals, out, cotangent, x, params, ids, scale, *, cfg, bias=None, power=2.0):
        assert [o.shape for o in out] == [c.shape for c in cotangent]
        return gradients(x, params, residuals["ids"], scale, bias, power, residuals["hidden"], cotangent)


class Custom(Gradients):
    """The style of `custom_vjp`; keywords come as they are."""

    name = "test_custom"

    def run(self, x, params, ids, scale, *, cfg, **kwargs):
        return reference(x, params, ids, scale, **kwargs)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, params, ids, scale = primals
        bias, power = kwargs.get("bias"), kwargs.get("power", 2.0)
        hidden = jnp.tanh(x[ids] @ params["weight"] * scale + (0.0 if bias is None else bias))
        *found, named = gradients(x, params, ids, scale, bias, power, hidden, cotangents)
        return (*found, named if "bias" in kwargs else {})


RESIDUAL, CUSTOM = Residual(), Custom()
KERNELS = {"vjp": RESIDUAL, "custom_vjp": CUSTOM}

CALLS = {  # a function of a kernel and float arrays, and those arrays
    "float argument": (lambda f, x, w: f(x, {"weight": w, "name": "a"}, IDS, 0.5, power=3.0), (X, W)),
    "traced float": (lambda f, x, w, s: f(x, {"weight": w, "name": "a"}, IDS, s), (X, W, 0.5)),
    "None keyword": (lambda f, x, w: f(x, {"weight": w, "name": "a"}, IDS, 0.5, bias=None), (X, W)),
    "array keyword": (lambda f, x, w, b: f(x, {"weight": w, "name": "a"}, IDS, 0.5, bias=b, power=3.0), (X, W, B)),
    "only a keyword": (lambda f, b: f(X, {"weight": W, "name": "a"}, IDS, 0.5, bias=b), (B,)),
    "by name": (lambda f, x, w: f(ids=IDS, scale=0.5, params={"weight": w, "name": "a"}, x=x), (X, W)),
}


def loss(call, fn):
    """Of both outputs, so that both cotangents count."""
    return lambda *arrays: sum(jnp.sum(jnp.sin(out)) for out in call(fn, *arrays))


def twice(fn, count):
    """The gradient of the squared norm of the gradient."""
    argnums = tuple(range(count))
    return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in jax.grad(fn, argnums)(*a)), argnums)


def all_of(arrays):
    return tuple(range(len(arrays)))


def mapped(fn, arrays):
    return jax.vmap(fn, (0, *[None] * (len(arrays) - 1)))


TRANSFORMS = {  # of a scalar function of arrays; those with `vmap` map over the first one
    "grad": lambda f, a: jax.value_and_grad(f, all_of(a)),
    "grad(grad)": lambda f, a: twice(f, len(a)),
    "vmap(grad)": lambda f, a: mapped(jax.grad(f, all_of(a)), a),
    "grad(vmap)": lambda f, a: jax.grad(lambda *x: mapped(f, a)(*x).sum(), all_of(a)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("style", KERNELS)
def test_gradients_are_right_for(style, call, transform):
    fn, arrays = CALLS[call]
    if "vmap" in transform:
        arrays = (np.stack([arrays[0], np.flip(arrays[0])]), *arrays[1:])
    ours, plain = (TRANSFORMS[transform](loss(fn, f), arrays) for f in (KERNELS[style], reference))
    close(jitted(ours, *arrays), jitted(plain, *arrays), 2e-4)


@pytest.mark.parametrize("style", KERNELS)
def test_gradients_are_right_without_jit_and_in_forward_mode(style):
    fn, arrays = CALLS["array keyword"]
    ours, plain = loss(fn, KERNELS[style]), loss(fn, reference)
    close(jax.grad(ours, (0, 1, 2))(*arrays), jax.grad(plain, (0, 1, 2))(*arrays), 2e-4)
    tangents = tuple(np.cos(a) for a in arrays)
    close(jax.jvp(ours, arrays, tangents), jax.jvp(plain, arrays, tangents), 2e-4)
    close(jitted(jax.hessian(ours, 2), *arrays), jitted(jax.hessian(plain, 2), *arrays), 2e-4)


def test_third_derivatives_go_through_residuals():
    class Sine(Gradients):
        name = "test_sine"

        def run(self, x, *, cfg):
            return jnp.sin(x)

        def fwd_with_residuals(self, x, *, cfg):
            return jnp.sin(x), jnp.cos(x)

        def vjp(self, cosine, out, cotangent, x, *, cfg):
            return (cotangent * cosine,)

    fn = Sine()
    for order in range(1, 5):
        fn = jax.grad(fn)
        np.testing.assert_allclose(fn(0.7), np.sin(0.7 + order * np.pi / 2), rtol=1e-5)


@pytest.mark.parametrize("style", KERNELS)
def test_each_direction_has_its_own_label_and_both_are_tuned(style):
    fn, arrays = CALLS["array keyword"]
    lowered = jax.jit(jax.grad(loss(fn, KERNELS[style]), (0, 1, 2))).lower(*arrays)
    name = KERNELS[style].op_id_v
    assert runs(lowered) == {name: 1, name.replace("@", "_bwd@"): 1}
    selector = ConfigSelectorChain(tuner=Autotuner(num_iters=1))
    result = autotune_lowered(selector, lowered, strict=True)
    assert [e.op_id_v for e in result.entries] == list(runs(lowered))


def test_a_call_that_is_not_differentiated_saves_no_residuals():
    fn, arrays = CALLS["float argument"]
    forward = find_labels_in_lowered(jax.jit(loss(fn, RESIDUAL)).lower(*arrays))
    training = find_labels_in_lowered(jax.jit(jax.grad(loss(fn, RESIDUAL))).lower(*arrays))
    assert len(forward) == 1
    assert forward[0] not in training
    assert [split_label(text)[0] for text in training] == ["test_residual@v1", "test_residual_bwd@v1"]


class Telling(Kernel):
    """The output is the config of the forward, and the gradient that of the backward."""

    name = "test_telling"

    def run(self, x, *, cfg):
        return x * 0 + cfg

    def heuristic_cfg(self, inv):
        assert inv.args[0].shape == ()  # of both directions: the forward's arguments
        return 1

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * cfg,)


TELLING = Telling()


def test_each_direction_takes_its_own_config():
    one = np.float32(1)
    found = jax.jit(jax.grad(TELLING)).lower(one)
    (label,) = [text for text in find_labels_in_lowered(found) if "_bwd@" in text]
    key = key_of(TELLING, one)
    with overlay_cache({key: 3, key._replace(op_id_v="test_telling_bwd@v1", call_key=split_label(label)[1]): 5}):
        assert jax.value_and_grad(TELLING)(one) == (3, 5)
    assert jax.value_and_grad(TELLING)(one) == (1, 1)
    assert jax.value_and_grad(lambda x: TELLING(x, cfg=7))(one) == (7, 7)
    pinned = {"test_telling": 2, "test_telling_bwd": 4}
    assert jax.value_and_grad(lambda x: TELLING(x, cfg=pinned))(one) == (2, 4)


@pytest.mark.cpu
def test_variants_of_gradient_methods_follow_the_device():
    class Variants(Gradients):
        def run_xla(self, x, *, cfg):
            return x

        def fwd_with_residuals_cpu(self, x, *, cfg):
            return x, None

        def fwd_with_residuals_gpu(self, x, *, cfg):
            raise AssertionError("this is no GPU")

        def vjp_cpu(self, residuals, out, cotangent, x, *, cfg):
            return (3 * cotangent,)

        def vjp_triton(self, residuals, out, cotangent, x, *, cfg):
            raise AssertionError("this is no GPU")

    assert jax.grad(Variants("test_variants"))(1.0) == 3

    class OnlyThere(Gradients):
        def run_xla(self, x, *, cfg):
            return x

        def custom_vjp_triton(self, primals, cfg, kwargs, cotangents):
            return cotangents

    with pytest.raises(UnsupportedError, match=r"test_only_there@v1 has no custom_vjp for xla; define custom_vjp"):
        jax.grad(OnlyThere("test_only_there"))(1.0)


def test_outputs_that_are_no_floats_have_no_cotangent_and_unused_ones_have_zeros():
    class Mixed(Gradients):
        def run(self, x, *, cfg):
            return {"value": 2 * x, "rank": jnp.argsort(x), "other": x**2}

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            (cotangent,) = cotangents
            assert cotangent["rank"] is None
            return (2 * cotangent["value"] + 2 * primals[0] * cotangent["other"],)

    kernel = Mixed("test_mixed")
    close(jax.grad(lambda x: kernel(x)["value"].sum())(B), np.full_like(B, 2))
    close(jax.grad(lambda x: kernel(x)["other"].sum())(B), 2 * B)


def test_one_output_in_a_tuple_is_a_tuple_for_vjp():
    class One(Gradients):
        def run(self, x, *, cfg):
            return (2 * x,)

        def fwd_with_residuals(self, x, *, cfg):
            return (2 * x,), None

        def vjp(self, residuals, out, cotangent, x, *, cfg):
            ((out,), (cotangent,)) = out, cotangent
            return (2 * cotangent,)

    kernel = One("test_one_in_tuple")
    assert jax.grad(lambda x: kernel(x)[0])(1.0) == 2


def test_methods_that_do_not_fit_are_errors_that_say_how():
    class Half(Gradients):
        def run(self, x, *, cfg):
            return x

        def vjp(self, residuals, out, cotangent, x, *, cfg):
            return (cotangent,)

    with pytest.raises(ConfigError, match=r"Half defines only one of fwd_with_residuals and vjp; define both"):
        Half("test_half_a_gradient")

    class Both(Half):
        fwd_with_residuals = vars(Half)["run"]

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return cotangents

    with pytest.raises(ConfigError, match=r"Both defines vjp and custom_vjp; a gradient has one definition"):
        Both("test_both_gradients")

    class Other(Half):
        def fwd_with_residuals(self, x, *, cfg):
            return x, None

        def vjp(self, residuals, cotangent, x, *, cfg):  # no `out`
            return (cotangent,)

    with pytest.raises(ConfigError, match=r"test_other_order@v1: vjp\(residuals, cotangent, x, \*, cfg\) cannot be"):
        jax.grad(Other("test_other_order"))(1.0)

    class Unpaired(Half):
        def fwd_with_residuals(self, x, *, cfg):
            return x

    with pytest.raises(ConfigError, match=r"fwd_with_residuals returned .*; expected a pair"):
        jax.grad(Unpaired("test_unpaired"))(1.0)


def test_a_keyword_array_without_a_gradient_is_an_error_and_never_zero():
    class Forgotten(Gradients):
        def run(self, x, *, cfg, bias):
            return x + bias

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return cotangents

    kernel = Forgotten("test_forgotten")
    assert jax.grad(lambda x: kernel(x, bias=1.0))(1.0) == 1
    with pytest.raises(ConfigError, match=r"no gradient for \['bias'\].*in a dict after the others, \{'bias'"):
        jax.grad(lambda b: kernel(1.0, bias=b))(1.0)


def test_back_ends_that_jax_cannot_differentiate_refuse_a_second_derivative():
    class Opaque(Gradients):
        def run(self, x, *, cfg):
            return x**2

        def custom_vjp_xla(self, primals, cfg, kwargs, cotangents):
            return (2 * primals[0] * cotangents[0],)

    kernel = Opaque("test_opaque")
    assert jax.grad(jax.grad(kernel))(1.0) == 2
    kernel.custom_vjp_triton = None  # not there: nothing changes

    class Hidden(Opaque):
        def variant(self, name, backend, platform, inv=None):
            method = super().variant(name, backend, platform, inv)
            if name != "custom_vjp":
                return method

            def custom_vjp_triton(*args):
                return method(*args)

            return custom_vjp_triton

    with pytest.raises(UnsupportedError, match=r"test_hidden_bwd@v1 runs on the 'triton' back end"):
        jax.grad(jax.grad(Hidden("test_hidden")))(1.0)


@pytest.mark.parametrize(("residual", "message"), [
    (lambda x: (x, 7 * x), r"run returns .* of \[\(\(2,\), 'float32'\), \(\(2,\), 'float32'\)\], and fwd_with"),
    (lambda x: ((x.sum(), x), None), r"expected \(what run returns, residuals\)"),
    (lambda x: ((x.astype(jnp.bfloat16), x), None), r"bfloat16"),
    (lambda x: ((x,), None), r"expected \(what run returns"),
])  # fmt: skip
def test_the_output_beside_residuals_is_that_of_run(residual, message):
    class Unlike(Gradients):
        def run(self, x, *, cfg):
            return x, 2 * x

        def fwd_with_residuals(self, x, *, cfg):
            return residual(x)

        def vjp(self, residuals, out, cotangent, x, *, cfg):
            return (cotangent[0] + 2 * cotangent[1],)

    Unlike.__qualname__ += str(id(residual))  # another class for each case
    with pytest.raises(ConfigError, match=message):
        jax.grad(lambda x: Unlike("test_unlike_" + message[:3].strip(r"\(["), version=str(id(residual)))(x)[1].sum())(
            B[:2]
        )


@pytest.mark.parametrize("rows", [None, (True,)])
def test_rows_of_residuals_fold_where_they_are_declared(rows):
    class Folding(Gradients):
        rows = out_rows = (True,)

        def run(self, x, *, cfg):
            return jnp.sin(x)

        def fwd_with_residuals(self, x, *, cfg):
            return jnp.sin(x), (jnp.cos(x),)

        def vjp(self, residuals, out, cotangent, x, *, cfg):
            return (cotangent * residuals[0],)

    Folding.residual_rows = rows
    kernel = Folding("test_folding" + ("" if rows is None else "_declared"))
    lowered = jax.jit(jax.vmap(jax.grad(lambda x: kernel(x).sum()))).lower(X)
    assert set(runs(lowered).values()) == {3 if rows is None else 1}
    close(lowered.compile()(X), np.cos(X))


def test_gradients_may_be_plain_numbers_and_unknown_names_are_refused():
    class Plain(Gradients):
        named: dict = {}

        def run(self, x, *, cfg, operands=1.0):
            return 2 * x * operands

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return 2.0, type(self).named

    kernel = Plain("test_plain_number")
    assert jax.grad(kernel)(1.0) == 2
    Plain.named = {"operands": 3.0}
    assert jax.jit(jax.grad(lambda s: kernel(1.0, operands=s)))(1.0) == 3
    Plain.named = {"operand": 3.0}
    with pytest.raises(
        ConfigError, match=r"gradients for \['operand'\], which are no keyword arguments .* \['operands'\]"
    ):
        jax.jit(jax.grad(kernel))(2.0)


def test_a_back_end_without_the_gradient_method_is_not_chosen_for_it():
    class Two(Gradients):
        def run_xla(self, x, *, cfg):
            return x

        def run_triton(self, x, *, cfg):
            return x

        def custom_vjp_xla(self, primals, cfg, kwargs, cotangents):
            return cotangents

    kernel = Two("test_two_back_ends")
    assert (kernel.backends, kernel.backward.backends) == (("triton", "xla"), ("xla",))


def test_long_names_leave_room_for_the_backward():
    assert Telling("test_" + "x" * 55).backward.op_id.endswith("_bwd")
    with pytest.raises(ConfigError, match="expected at most 60 characters: its gradient is <name>_bwd"):
        Telling("test_" + "x" * 56)


def test_a_backward_call_that_is_made_by_hand_is_tuned():
    x, out = np.ones(3, np.float32), np.ones(3, np.float32)
    inv = Invocation(Sines().backward, (x, out, {"slope": x}, out), needs=(True,))
    record_invocation(inv.kernel, inv)
    tuned = Autotuner(num_iters=1).tune(inv)
    assert (tuned.cfg, len(tuned.trials)) == (1, 1)


class Sines(Gradients):
    """For calls that are made by hand."""

    name = "test_sines"

    def run(self, x, *, cfg):
        return jnp.sin(x)

    def fwd_with_residuals(self, x, *, cfg):
        return jnp.sin(x), {"slope": jnp.cos(x)}

    def vjp(self, residuals, out, cotangent, x, *, cfg):
        return (cotangent * residuals["slope"],)


def test_a_pinned_result_of_the_gradient_is_enough_for_the_gradient():
    x = np.ones(3, np.float32)
    step = jax.jit(jax.grad(lambda x: Sines()(x).sum()))
    result = autotune_lowered(ConfigSelectorChain(tuner=Autotuner(num_iters=1)), step.lower(x), strict=True)
    with policy_override(mode="pinned"), result:
        close(step(x), np.cos(x))
    with policy_override(mode="pinned"), pytest.raises(ConfigError, match="policy is pinned"):
        step(x)


def test_custom_vjp_of_another_signature_is_an_error_that_says_how():
    class Short(Gradients):
        def run(self, x, *, cfg):
            return x

        def custom_vjp(self, primals, cotangents):
            return cotangents

    with pytest.raises(ConfigError, match=r"\(primals, cotangents\) cannot be called as custom_vjp\(primals, cfg"):
        jax.grad(Short("test_short_custom_vjp"))(1.0)


def test_a_backward_kernel_may_take_residuals_too():
    class TakesBackward(Gradients):
        name = "test_takes_bwd"

        def run(self, x, scale, out, residuals, dout, *, cfg, needs):
            assert [o.shape for o in out] == [d.shape for d in dout]
            d = (dout[0] + 2 * dout[1]) * residuals["slope"]
            return d * scale, jnp.sum(d * x)

    class Takes(Gradients):
        name, backward = "test_takes", TakesBackward()

        def run(self, x, scale, *, cfg):
            out = jnp.sin(x * scale)
            return out, 2 * out

        def fwd_with_residuals(self, x, scale, *, cfg):
            out = jnp.sin(x * scale)
            return (out, 2 * out), {"slope": jnp.cos(x * scale)}

    kernel = Takes()

    def ours(x, scale):
        return sum(jnp.sum(out**2) for out in kernel(x, scale))

    def plain(x, scale):
        return 5 * jnp.sum(jnp.sin(x * scale) ** 2)

    close(jax.grad(ours, (0, 1))(B, 0.7), jax.grad(plain, (0, 1))(B, 0.7))
    close(jitted(twice(ours, 2), B, 0.7), jitted(twice(plain, 2), B, 0.7), 2e-4)
    assert runs(jax.jit(jax.grad(ours)).lower(B, 0.7)) == {"test_takes@v1": 1, "test_takes_bwd@v1": 1}


# Derivatives of gradients that are plain JAX, of a forward that is not


@dataclasses.dataclass(frozen=True)
class BackendConfig:
    backend: str | None = None


class PlainGradient(Kernel[BackendConfig, jax.Array]):
    name = "test_plain_gradient"

    def run_triton(self, x, *, cfg):
        return jnp.sin(x)

    run_xla = run_triton

    def heuristic_cfg(self, inv):
        return BackendConfig("xla")

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (jnp.cos(primals[0]) * cotangents[0],)


def test_a_gradient_in_plain_jax_has_derivatives_whatever_back_end_its_forward_runs_on(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_INTERPRET", "1")
    kernel = PlainGradient()

    def first(x):
        return jax.grad(lambda x: kernel(x, cfg=BackendConfig("triton")))(x)

    np.testing.assert_allclose(jax.grad(first)(jnp.float32(0.3)), -np.sin(0.3), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="test_plain_gradient@v1 runs on the 'triton' back end"):
        jax.jvp(lambda x: kernel(x, cfg=BackendConfig("triton")), (jnp.float32(0.3),), (jnp.float32(1.0),))
