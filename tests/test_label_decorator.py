"""`@label("name")` labels the calls of any function in programs, and leaves the function as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ejlayers
from ejkernel_ops import (
    ConfigSelectorChain,
    Kernel,
    LabelError,
    autotune_lowered,
    find_labels_in_lowered,
    label,
    linear,
)
from ejkernel_ops.utils.meta import count_labels

from .ops import close, normal

X = normal(0, 3, 4)


@label("my_norm")
def norm(x, scale=1.0, *, mode="l2", anything=None):
    """Divides by a norm."""
    size = jnp.sqrt((x**2).sum()) if mode == "l2" else jnp.abs(x).max()
    return {"out": x / size * scale, "size": size, "mode": mode}


def plain(x):
    return x / jnp.sqrt((x**2).sum())


def labels(fn, *args):
    return find_labels_in_lowered(jax.jit(fn).lower(*args))


def test_calls_are_labelled_by_shape_and_static_values_and_counted():
    def program(x):
        a, b = norm(x)["out"], norm(x + 1)["out"]
        return a + b + norm(x, mode="max")["out"] + norm(x.T)["out"].T

    lowered = jax.jit(program).lower(X)
    found = find_labels_in_lowered(lowered)
    assert len(found) == 3
    assert all(text.startswith("ejkernel_ops#my_norm@v1:") for text in found)
    assert sorted(count_labels(lowered).values()) == [1, 1, 2]
    assert labels(program, X) == found
    assert any("my_norm" in text for text in find_labels_in_lowered(lowered.compile()))


def test_the_function_computes_and_looks_as_before():
    assert norm.__name__ == "norm"
    assert norm.__doc__ == "Divides by a norm."
    out = norm(X)
    assert isinstance(out["out"], np.ndarray | jax.Array)
    close(out["out"], plain(X))
    assert jax.jit(lambda x: norm(x, anything=object())["size"])(X) == pytest.approx(np.linalg.norm(X))


def scanned(fn, x):
    return jax.lax.scan(lambda carry, _: (fn(carry), None), x, None, length=3)[0]


@pytest.mark.parametrize("transform", [
    lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum()),
    lambda f: jax.vmap(f),
    lambda f: jax.vmap(jax.grad(lambda x: jnp.sin(f(x)).sum())),
    lambda f: jax.hessian(lambda x: jnp.sin(f(x)).sum()),
    lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    lambda f: jax.grad(lambda x: scanned(jax.checkpoint(f), x)[0].sum()),
], ids=["grad", "vmap", "vmap(grad)", "hessian", "jvp", "remat in scan"])  # fmt: skip
def test_transforms_are_right_and_the_label_stays(transform):
    ours = transform(lambda x: norm(x)["out"])
    assert any("my_norm@v1" in text for text in labels(ours, X))
    close(jax.jit(ours)(X), jax.jit(transform(plain))(X), 1e-4)


def test_tuning_and_explain_list_it_as_a_label_only():
    def program(x):
        return linear(norm(x)["out"], jnp.ones((4, 2)))

    lowered = jax.jit(program).lower(X)
    result = autotune_lowered(ConfigSelectorChain(), lowered, strict=True)
    assert [e.op_id_v for e in result.entries] == ["linear@v1"]
    assert [(text.partition("@")[0], reason) for text, reason in result.skipped] == [
        ("ejkernel_ops#my_norm", "label only")
    ]
    assert "my_norm" in str(result)
    assert "label only" in str(ejlayers.explain(jax.jit(program), X))


def test_versions_and_prefixes_are_taken_and_bad_ones_refused_at_once(monkeypatch):
    @label("ours@v3", prefix="mine#")
    def ours(x):
        return x

    lowered = jax.jit(ours).lower(X)
    assert find_labels_in_lowered(lowered) == []
    (text,) = find_labels_in_lowered(lowered, prefix="mine#")
    assert text.startswith("mine#ours@v3:")
    for bad in ("a b", "", "a@b", "a#b"):
        with pytest.raises(LabelError, match="expected name@vN"):
            label(bad)
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "env#")
    assert labels(lambda x: norm(x)["out"], X)[0].startswith("env#my_norm@v1:")


def test_functions_without_arrays_run():
    assert label("nothing")(lambda: None)() is None
    assert jax.jit(lambda: label("constant")(lambda: 3)())() == 3


def test_objects_that_are_not_plain_containers_come_back_themselves():
    class Model(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        @label("me")
        def me(self):
            return self

    @nnx.jit
    def step(model):
        model.me().count[...] += 10

    model = Model()
    step(model)
    model.me().count[...] += 1
    assert model.count[...] == 11
    same = label("same")(lambda x: x)
    for value in ([1, 2], {1: 2, "a": 3}, object()):
        assert same(value) is value
    assert jax.jit(lambda x: label("odd")(lambda d: d)({1: x, "a": x})[1])(1.0) == 1


def test_nested_and_recursive_calls_keep_all_labels():
    inner = label("inner")(lambda x: x * 2)
    outer = label("outer")(inner)
    assert {text.partition("@")[0][13:] for text in labels(outer, X)} == {"inner", "outer"}

    @label("again")
    def again(x, depth):
        return again(x, depth - 1) if depth else x * 2

    assert sum(count_labels(jax.jit(lambda x: again(x, 2)).lower(X)).values()) == 3

    class Labelled(Kernel):
        def run(self, x, *, cfg):
            return inner(x)

        def heuristic_cfg(self, inv):
            return 1

    kernel = Labelled("test_labelled_kernel")
    assert {text.partition("@")[0][13:] for text in labels(kernel, X)} == {"inner", "test_labelled_kernel"}


def test_generators_and_coroutines_are_refused():
    def numbers(x):
        yield x

    async def later(x):
        return x

    for fn in (numbers, later):
        with pytest.raises(LabelError, match="is a generator or coroutine"):
            label("later")(fn)
