"""Layers over a mesh of 2 x 4: partition metadata stays, and swapped models are split, and compute, as stock ones."""

import contextlib
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejlayers
import ejlayers.linen
import ejlayers.nnx

from .partitioned_blocks import KINDS, LENGTH, MADE, MESHES, SPLITS, WIDTH, X


def moved(compiled):
    """The shapes of what a compiled program gathers or moves between devices."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    return {tuple(map(int, shape.split(","))) for shape in found if shape}


def stepped(framework, mesh, split, swap):
    """Parameters before and after a step, their gradient, its loss, and what its program moves between devices."""
    params, loss = MADE[framework](mesh, *split, swap)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads, value

    with contextlib.nullcontext() if framework == "linen" else jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        compiled = jax.jit(step).lower(params, x).compile()
        after, grads, value = compiled(params, x)
    return *(jax.tree.leaves(tree) for tree in (params, after, grads)), float(value), moved(compiled)


@functools.cache
def stock(framework, kind, split):
    return stepped(framework, MESHES[kind], SPLITS[split], lambda model: model)


@functools.cache
def alone(framework):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return stepped(framework, mesh, ("data", "model"), lambda model: model)


def same_sharding(found, wanted):
    return [a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("framework", "kind"), KINDS)
def test_a_swapped_block_computes_as_one_device_and_is_split_as_the_stock_one(framework, kind, split):
    params, after, grads, loss, gathered = stepped(framework, MESHES[kind], SPLITS[split], ejlayers.swap)
    stock_params, stock_after, *_ = stock(framework, kind, split)
    _, _, wanted, wanted_loss, _ = alone(framework)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for found, one in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(found, one, rtol=2e-5, atol=2e-6)
    assert all(same_sharding(params, stock_params))
    assert all(same_sharding(after, stock_after))
    assert all(same_sharding(after, params))
    rows = {LENGTH, 2 * LENGTH, 4 * LENGTH}  # of a device's part, or of the whole: no weight has such a size
    assert [shape for shape in gathered if rows & {*shape}] == []


# Metadata


def described(model):
    """The partition spec and the metadata of each variable of an NNX model, by path."""
    specs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(model)))
    kept = {path: dict(v.get_metadata()) for path, v in nnx.to_flat_state(nnx.state(model))}
    return {path: (spec.get_value(), kept[path]) for path, spec in specs}


def nnx_layers(linear, attention, embed, norm):
    def named(*names):
        return nnx.with_partitioning(nnx.initializers.ones, names)

    rngs, ruled = nnx.Rngs(0), {"out_sharding": ("embed", "mlp"), "sharding_rules": (("mlp", "model"),)}
    return nnx.List([
        linear(4, 8, kernel_init=named("embed", "mlp"), rngs=rngs),
        linear(4, 8, kernel_metadata=ruled, rngs=rngs),
        attention(2, 8, decode=False, rngs=rngs, kernel_metadata={"out_sharding": ("data", "model", None), "note": 1}),
        embed(5, 4, embedding_init=named("vocab", None), rngs=rngs),
        norm(4, scale_init=named("embed"), rngs=rngs),
    ])  # fmt: skip


STOCK_NNX = (nnx.Linear, nnx.MultiHeadAttention, nnx.Embed, nnx.RMSNorm)


def test_swapped_and_own_nnx_layers_keep_the_metadata_of_stock_ones():
    ours = ejlayers.nnx
    with nnx.use_eager_sharding(False):  # names alone: there is no mesh
        wanted = described(nnx_layers(*STOCK_NNX))
        assert wanted[(0, "kernel")][0] == P("embed", "mlp")
        assert wanted[(1, "kernel")][0] == P("embed", "model")
        assert wanted[(2, "query", "kernel")][1]["note"] == 1
        assert described(ejlayers.swap(nnx_layers(*STOCK_NNX))) == wanted
        assert described(nnx_layers(ours.Linear, ours.MultiHeadAttention, ours.Embed, ours.RMSNorm)) == wanted


def columns_and_rows(partitioned, module, **more):
    """Layers that other frameworks lack, their first kernels split by columns and their last ones by rows."""

    def init(*names):
        return partitioned(jax.nn.initializers.lecun_normal(), names)

    first, wide = init("data", "model"), {} if module is ejlayers.linen else {"in_features": WIDTH}
    heads, out = init("data", "model", None), init("model", None, "data")
    return [
        module.Attention(num_heads=4, kernel_init=heads, out_kernel_init=out, **wide, **more),
        module.GatedMLP(hidden_features=8, kernel_init=first, down_kernel_init=init("model", "data"), **wide, **more),
        module.LMHead(features=WIDTH, vocab_size=24, kernel_init=first, **more),
    ]


OWN = {  # the spec of each of their kernels
    ("query", "kernel"): P("data", "model", None), ("key", "kernel"): P("data", "model", None),
    ("value", "kernel"): P("data", "model", None), ("out", "kernel"): P("model", None, "data"),
    ("gate", "kernel"): P("data", "model"), ("up", "kernel"): P("data", "model"),
    ("down", "kernel"): P("model", "data"), ("kernel",): P("data", "model"),
}  # fmt: skip


def test_own_nnx_layers_say_how_each_kernel_is_split():
    with jax.set_mesh(MESHES["auto"]):
        layers = columns_and_rows(nnx.with_partitioning, ejlayers.nnx, rngs=nnx.Rngs(0))
    found = {path: value for layer in layers for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert {path: nnx.get_partition_spec(value).get_value() for path, value in found.items()} == OWN
    assert {path: value[...].sharding.spec for path, value in found.items()} == OWN


def test_own_linen_layers_say_how_each_kernel_is_split():
    found = {}
    with jax.set_mesh(MESHES["auto"]):
        for layer in columns_and_rows(nn.with_partitioning, ejlayers.linen):
            params = nn.get_partition_spec(layer.init(jax.random.key(0), X))["params"]
            found |= flatten_dict(params)
    assert found == OWN


@pytest.mark.parametrize("boxed", [nn.with_partitioning, nn.with_logical_partitioning])
def test_swapped_linen_models_keep_the_boxes_of_stock_ones(boxed):
    def init(*names):
        return boxed(nn.initializers.lecun_normal(), names)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.MultiHeadDotProductAttention(
                2, kernel_init=init("data", "model", None), out_kernel_init=init("model", None, "data")
            )(x)
            return nn.Dense(8, kernel_init=init("data", "model"), bias_init=boxed(nn.initializers.zeros, ("model",)))(x)

    stock, swapped = (model.init(jax.random.key(0), X) for model in (Model(), ejlayers.swap(Model())))
    assert jax.tree.structure(swapped) == jax.tree.structure(stock)  # boxes are a part of it
    assert nn.get_partition_spec(swapped) == nn.get_partition_spec(stock)
    for a, b in zip(jax.tree.leaves(swapped), jax.tree.leaves(stock)):
        np.testing.assert_array_equal(a, b)


def test_a_linen_layer_is_made_inside_a_mesh_whatever_axes_its_names_have():
    layer = ejlayers.linen.DenseGeneral(
        (8, 2), kernel_init=nn.with_partitioning(nn.initializers.ones, ("data", "model", None))
    )
    with jax.set_mesh(MESHES["auto"]):
        kernel = layer.init(jax.random.key(0), jnp.ones((4, 16)))["params"]["kernel"]
    assert (kernel.names, kernel.value.shape) == (("data", "model", None), (16, 8, 2))


# out_sharding


LAYERS = {  # a stock layer, the method that is called, the shape of its input, how the result is to be spread
    "Linear": (lambda rngs: nnx.Linear(16, 32, rngs=rngs), "__call__", (4, 16), P("data", "model")),
    "LinearGeneral": (
        lambda rngs: nnx.LinearGeneral(16, (8, 2), rngs=rngs), "__call__", (4, 16), P("data", "model", None),
    ),
    "LinearGeneral of split axes": (
        lambda rngs: nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs), "__call__", (4, 2, 8), P(None, "data"),
    ),
    "Einsum": (
        lambda rngs: nnx.Einsum("nta,ab->ntb", (16, 8), (8,), rngs=rngs), "__call__", (4, 3, 16),
        P(None, None, "model"),
    ),
    "Embed": (lambda rngs: nnx.Embed(24, 16, rngs=rngs), "attend", (4, 16), P("data")),
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_a_kernel_gives_its_result_the_out_sharding_of_the_call(layer):
    make, method, shape, spec = LAYERS[layer]
    stock, swapped = make(nnx.Rngs(0)), ejlayers.swap(make(nnx.Rngs(0)))
    split = P("data", None, "model") if len(shape) == 3 else P("data")
    mesh = MESHES["explicit"]
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, split))
        run = nnx.jit(lambda model, x: getattr(model, method)(x, out_sharding=spec))
        wanted, found = run(stock, x), run(swapped, x)
        backends = [row.backend for row in ejlayers.explain(run, swapped, x).rows]
    assert backends == (["stock"] if "split axes" in layer else ["xla"])
    assert found.sharding == wanted.sharding
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_an_out_sharding_over_auto_axes_is_refused_as_by_the_stock_layer():
    for layer in (nnx.Linear, ejlayers.nnx.Linear):
        with jax.set_mesh(MESHES["auto"]), pytest.raises(ValueError, match="Auto or Manual"):
            layer(16, 32, rngs=nnx.Rngs(0))(jnp.ones((4, 16)), out_sharding=P("data"))
