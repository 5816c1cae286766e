"""A kernel that a user writes is right under JAX's transforms, whatever it declares, takes and returns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    ConfigError,
    ConfigSelectorChain,
    Invocation,
    Kernel,
    clear_invocations,
    find_labels_in_lowered,
    set_default_selector,
)
from ejkernel_ops.utils.meta import call_sites, split_label

from .ops import close, jitted, normal, recorded


class Own(Kernel):
    """What all kernels of this file have: a heuristic."""

    def heuristic_cfg(self, inv):
        return 1


class Centred(Own):
    """Mixes its rows, so folding more of them in would be wrong; has no backward."""

    name = "test_centred"

    def run(self, x, *, cfg):
        return jnp.sin(x - x.mean(0))


class ScaledBackward(Own):
    name = "test_scaled_bwd"

    def run(self, x, scale, out, dout, *, cfg, needs):
        assert needs in ((True, True), (True, False), (False, True))
        return dout * scale, jnp.sum(dout * x).reshape(scale.shape) if needs[1] else None


class Scaled(Own):
    """Rows that fold, a shared operand, and a backward of its own."""

    name, rows, out_rows = "test_scaled", (True, False), (True,)
    backward = ScaledBackward()

    def run(self, x, scale, *, cfg):
        return x * scale


class AffineBackward(Own):
    name = "test_affine_bwd"

    def run(self, params, x, mask, out, dout, *, cfg, needs):
        assert needs[0]["options"]["flag"] is False
        d = dout if mask is None else jnp.where(mask, dout, 0)
        bias = None if params["bias"] is None else d.sum(0)
        return {"bias": bias, "options": None, "weight": x.T @ d}, d @ params["weight"].T, None


class Affine(Own):
    """A dict with a static part and `None` before the array, and an optional operand."""

    name = "test_affine"
    backward = AffineBackward()

    def run(self, params, x, mask=None, *, cfg):
        out = x @ params["weight"] * (2.0 if params["options"]["flag"] else 1.0)
        out = out if params["bias"] is None else out + params["bias"]
        return out if mask is None else jnp.where(mask, out, 0)


class NamedBackward(Own):
    name = "test_named_bwd"

    def run(self, x, out, dout, *, cfg, needs, shift, factor, power):
        d = power * (x * factor + shift[:, None]) ** (power - 1) * dout
        return d * factor, {"factor": jnp.sum(d * x), "shift": d.sum(1)}


class Named(Own):
    """Keyword arrays of different shapes, in an order that is not that of the alphabet."""

    name = "test_named"
    backward = NamedBackward()

    def run(self, x, *, cfg, shift, factor, power):
        return (x * factor + shift[:, None]) ** power


class TopBackward(Own):
    name = "test_top_bwd"

    def run(self, x, top, index, dtop, dindex, *, cfg, needs):
        assert dindex is None
        return (jnp.where(jnp.arange(x.shape[1]) == index[:, None], dtop[:, None], 0),)


class Top(Own):
    """Two outputs, one of them of an integer type."""

    name, rows, out_rows = "test_top", (True,), (True, True)
    backward = TopBackward()

    def run(self, x, *, cfg):
        return x.max(1), x.argmax(1)


class OffsetBackward(Own):
    name = "test_offset_bwd"

    def run(self, x, offset, out, dout, *, cfg, needs):
        d = dout * jnp.cos(x * offset)
        return d * offset, jnp.sum(d * x, [i for i in range(2) if offset.shape[i] == 1], keepdims=True)


class Offset(Own):
    """An operand that has one row for each row of the other, or one for all."""

    name, rows, out_rows = "test_offset", (True, "broadcast"), (True,)
    backward = OffsetBackward()

    def run(self, x, offset, *, cfg):
        return jnp.sin(x * offset)


class OneSidedBackward(Own):
    name = "test_one_sided_bwd"

    def run(self, x, y, out, dout, *, cfg, needs):
        return dout * jnp.cos(x), None


class OneSided(Own):
    """A backward that has no gradient for one of its operands."""

    name, rows, out_rows = "test_one_sided", (True, True), (True,)
    backward = OneSidedBackward()

    def run(self, x, y, *, cfg):
        return jnp.sin(x) + y


centred, scaled, affine, named, top, one_sided = (cls() for cls in (Centred, Scaled, Affine, Named, Top, OneSided))
offset = Offset()
X, SCALE = normal(0, 5, 3, 3), normal(1, 1)
WEIGHT, BIAS, SHIFT, FACTOR, MASK = normal(2, 3, 3), normal(3, 3), normal(4, 3), normal(5) ** 2, normal(6, 3, 3) > 0


def params(weight, bias, flag=False):
    return {"bias": bias, "options": {"flag": flag}, "weight": weight}


# name: kernel, reference, operands (the first is vmapped), all as functions of arrays
USERS = {
    "no rows, no backward": (centred, lambda x: jnp.sin(x - x.mean(0)), ()),
    "rows and backward": (scaled, lambda x, scale: x * scale, (SCALE,)),
    "dict, None": (
        lambda x, weight: affine(params(weight, None), x),
        lambda x, weight: x @ weight,
        (WEIGHT,),
    ),
    "dict, optional": (
        lambda x, weight, bias, mask: affine(params(weight, bias), x, mask),
        lambda x, weight, bias, mask: jnp.where(mask, x @ weight + bias, 0),
        (WEIGHT, BIAS, MASK),
    ),
    "keyword arrays": (
        lambda x, shift, factor: named(x, shift=shift, factor=factor, power=3),
        lambda x, shift, factor: (x * factor + shift[:, None]) ** 3,
        (SHIFT, FACTOR),
    ),
    "int output": (
        lambda x: (lambda out: out[0] + 0 * out[1])(top(x)),
        lambda x: x.max(1),
        (),
    ),
    "gradient None": (one_sided, lambda x, y: jnp.sin(x) + jax.lax.stop_gradient(y), (X[0],)),
}


def gradients(fn):
    def wrapped(*args):
        floats = tuple(i for i, x in enumerate(args) if x.dtype != bool)
        return jax.grad(lambda *args: (fn(*args) ** 2).sum(), argnums=floats)(*args)

    return wrapped


def axes(rest):
    return (0, *[None] * len(rest))


def in_a_scan(fn):
    def layers(x, *rest):
        def layer(carry, _):
            return carry + fn(carry, *rest).sum() / 9, None

        return jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]

    return layers


TRANSFORMS = {  # of the function of all operands, given the axes to map over
    "jit": lambda f, axes: f,
    "grad": lambda f, axes: gradients(f),
    "vmap": lambda f, axes: jax.vmap(f, axes),
    "vmap(grad)": lambda f, axes: jax.vmap(gradients(f), axes),
    "grad(vmap)": lambda f, axes: gradients(jax.vmap(f, axes)),
    "grad(scan)": lambda f, axes: gradients(in_a_scan(f)),
    "jvp(vmap)": lambda f, axes: lambda x, *r: jax.jvp(lambda x: jax.vmap(f, axes)(x, *r), (x,), (jnp.cos(x),)),
}


@pytest.fixture(scope="module", autouse=True)
def own_selector():
    """One selector for all tests of this file: eager calls stay compiled."""
    before = set_default_selector(ConfigSelectorChain())
    yield
    set_default_selector(before)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("user", USERS)
def test_user_kernel_is_right_under(user, transform):
    fn, reference, rest = USERS[user]
    mapped = "vmap" in transform
    arrays = (X if mapped else X[0], *rest)
    make = functools.partial(TRANSFORMS[transform], axes=axes(rest))
    clear_invocations()
    lowered = jax.jit(make(fn)).lower(*arrays)
    labels = find_labels_in_lowered(lowered)
    assert recorded() == set(labels)
    assert labels or user == "no rows, no backward"  # a derivative without a backward is plain code
    close(lowered.compile()(*arrays), jitted(make(reference), *arrays))


@pytest.mark.parametrize("user", ["no rows, no backward", "keyword arrays", "int output"])
def test_user_kernel_is_right_without_jit(user):
    fn, reference, rest = USERS[user]
    for make in (jax.vmap, TRANSFORMS["vmap(grad)"]):
        close(make(fn, axes(rest))(X, *rest), jitted(make(reference, axes(rest)), X, *rest))


def test_vmap_of_a_kernel_without_rows_loops_and_with_rows_folds():
    def sites(fn, *arrays):
        lowered = jax.jit(jax.vmap(fn, axes(arrays[1:]))).lower(*arrays)
        return [(split_label(s.label)[0], s.executions) for s in call_sites(lowered)]

    assert sites(centred, X) == [("test_centred@v1", 5)]
    assert sites(scaled, X, SCALE) == [("test_scaled@v1", 1)]
    assert sites(top, X) == [("test_top@v1", 1)]


@pytest.mark.parametrize(("rows", "shape", "axis", "forward", "backward"), [
    # One that all examples and rows share folds; its gradient for each example needs a loop.
    (3, (1, 3), None, 1, 5),
    (3, (1, 1), None, 1, 5),
    (3, (3, 1), None, 1, 1),  # one for each row
    (1, (1, 3), None, 1, 1),
    (1, (5, 1, 3), 0, 1, 1),  # one for each example, which has one row
    (3, (5, 1, 3), 0, 5, 5),  # one for each example, shared by its rows
    (3, (3, 1, 5), -1, 1, 1),
])  # fmt: skip
def test_operand_that_broadcasts_over_rows_folds_where_rows_may_join_and_loops_where_not(
    rows, shape, axis, forward, backward
):
    arrays, axes = (X[:, :rows], normal(8, *shape)), (0, axis)

    def plain(x, offset):
        return jnp.sin(x * offset)

    lowered = jax.jit(jax.vmap(gradients(offset), axes)).lower(*arrays)
    counts = {split_label(site.label)[0]: site.executions for site in call_sites(lowered)}
    assert counts == {"test_offset@v1": forward, "test_offset_bwd@v1": backward}
    close(lowered.compile()(*arrays), jitted(jax.vmap(gradients(plain), axes), *arrays))
    close(jitted(gradients(jax.vmap(offset, axes)), *arrays), jitted(gradients(jax.vmap(plain, axes)), *arrays))

    def directional(fn):  # of the operand that broadcasts only: its tangent has an axis where it may have none
        def one(x, offset, tangent):
            return jax.jvp(lambda offset: fn(x, offset), (offset,), (tangent,))

        return jitted(jax.vmap(one, (0, axis, 0)), *arrays, normal(9, 5, *np.shape(arrays[1])[-2:]))

    if axis is None:
        close(directional(offset), directional(plain))


def test_gradients_of_unequal_keyword_arrays_keep_their_types():
    def loss(x, shift, factor):
        return jnp.sum(named(x, shift=shift, factor=factor, power=2))

    grads = jax.grad(loss, (0, 1, 2))(X[0], jnp.asarray(SHIFT, jnp.bfloat16), jnp.asarray(FACTOR, jnp.float16))
    assert [(g.shape, g.dtype.name) for g in grads] == [((3, 3), "float32"), ((3,), "bfloat16"), ((), "float16")]


def test_static_arguments_reach_the_backward():
    grads = jax.grad(lambda w, power: jnp.sum(named(w, shift=SHIFT, factor=1.0, power=power)))(X[0], 4)
    close(grads, 4 * (X[0] + SHIFT[:, None]) ** 3)


def test_outputs_of_any_structure_come_back_as_they_were():
    class Structured(Own):
        rows, out_rows = (True,), (True, True)

        def run(self, x, *, cfg):
            return {"a": None, "b": [x, 2 * x]}, x.sum(1)

    kernel = Structured("test_structured")
    out = jax.jit(jax.vmap(kernel))(X)
    close(out, ({"a": None, "b": [X, 2 * X]}, X.sum(2)))
    assert isinstance(kernel(X[0])[0]["b"], list)


def test_outputs_that_are_missing_do_not_shift_the_gradients_of_others():
    class HalfBackward(Own):
        def run(self, x, nothing, out, dnothing, dout, *, cfg, needs):
            assert nothing is None
            assert dnothing is None
            return 3 * dout

    class Half(Own):
        rows, out_rows = (True,), (False, True)
        backward = HalfBackward("test_half_bwd")

        def run(self, x, *, cfg):
            return None, 3 * x

    kernel = Half("test_half")
    close(jitted(jax.vmap(jax.grad(lambda x: kernel(x)[1].sum())), X), np.full_like(X, 3))


def test_out_rows_that_do_not_fit_the_outputs_are_an_error():
    class Misdeclared(Own):
        rows, out_rows = (True,), (True, True, True)

        def run(self, x, *, cfg):
            return x, x

    with pytest.raises(ConfigError, match=r"out_rows has 3 entries for 2 outputs"):
        jax.vmap(Misdeclared("test_misdeclared"))(X)


@pytest.mark.parametrize(("name", "gradient", "message"), [
    ("count", lambda g: (g,), r"returned 1 gradients; expected one for each of the 2 positional"),
    ("names", lambda g: ({"w": g, "more": g}, g), r"argument 'params'.*structure"),
    ("leaf", lambda g: (g, g), r"argument 'params'.*structure"),
    ("shape", lambda g: ({"w": g[:1]}, g), r"gradient \(1, 3\) for an operand \(3, 3\)"),
])  # fmt: skip
def test_gradients_that_do_not_fit_their_arguments_are_errors_that_name_them(name, gradient, message):
    class WrongBackward(Own):
        def run(self, params, x, out, dout, *, cfg, needs):
            return gradient(dout)

    class Wrong(Own):
        backward = WrongBackward(f"test_wrong_{name}_bwd")

        def run(self, params, x, *, cfg):
            return x @ params["w"]

    kernel = Wrong(f"test_wrong_{name}")
    with pytest.raises(ConfigError, match=message):
        jax.grad(lambda p: kernel(p, X[0]).sum())({"w": WEIGHT})


def test_random_keys_are_operands():
    class Noisy(Own):
        def run(self, rng, x, *, cfg):
            return x + jax.random.normal(rng, x.shape)

    kernel, rng = Noisy("test_noisy"), jax.random.key(7)
    close(jax.vmap(kernel, (None, 0))(rng, X), X + jax.random.normal(rng, X.shape[1:]))


def test_programs_of_a_kernel_export_with_symbolic_shapes():
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(jax.jit(scaled))(
        jax.ShapeDtypeStruct((rows, 3), np.float32), jax.ShapeDtypeStruct((1,), np.float32)
    )
    assert len(find_labels_in_lowered(exported)) == 1
    close(exported.call(X[0], SCALE), X[0] * SCALE)


def test_prepare_makes_equal_calls_of_different_spellings():
    class Prepared(Own):
        def prepare(self, x, factor=None):
            return (x,), {"factor": 1.0 if factor is None else float(factor)}

        def run(self, x, *, factor, cfg):
            return x * factor

    kernel = Prepared("test_prepared")
    lowered = jax.jit(lambda x: kernel(x) + kernel(x, 1) + kernel(x, factor=1.0)).lower(X)
    assert len(find_labels_in_lowered(lowered)) == 1


@pytest.mark.parametrize(("methods", "wanted"), [
    ("triton cudnn pallas xla gpu tpu cpu", "triton pallas xla"),
    ("cudnn xla gpu tpu cpu", "cudnn tpu xla"),
    ("gpu tpu cpu", "gpu tpu cpu"),
    ("cudnn xla", "cudnn xla xla"),
    ("pallas xla", "xla pallas xla"),
    ("xla", "xla xla xla"),
])  # fmt: skip
def test_without_a_back_end_in_the_config_the_device_picks_the_method(methods, wanted):
    kernel = type("Picked", (Own,), {f"run_{m}": lambda self, x, *, cfg: x for m in methods.split()})
    kernel = kernel("test_picked_" + methods.replace(" ", "_"))
    for platform, name in zip(("cuda", "tpu", "cpu"), wanted.split()):
        assert kernel.variant("run", None, platform) == getattr(kernel, f"run_{name}")


def test_what_cannot_be_called_says_so():
    with pytest.raises(TypeError, match=r"test_scaled@v1: missing a required argument: 'scale'.*\(x, scale"):
        scaled(X)
    assert Invocation(scaled, (X[0], SCALE)).operands[0].shape == (3, 3)
