"""Ops inside `shard_map`, under Explicit axes and under Auto axes: right, local, and sharded as their inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_ops import (
    ConfigSelectorChain,
    clear_invocations,
    find_labels_in_lowered,
    flash_attention,
    get_invocations,
    set_default_selector,
)

from .ops import OPS, along_query, attention, close, directional, gradients, jitted, normal, recorded, runs

W, BIAS = normal(5, 4, 3), normal(6, 3)
AUTO = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module", autouse=True)
def own_selector():
    """One selector for all tests of this file, as none of them stores anything: eager calls stay compiled."""
    before = set_default_selector(ConfigSelectorChain())
    yield
    set_default_selector(before)


def qkv(batch, length, heads, kv_heads, width=4):
    return [normal(20 + i, batch, length, n, width) for i, n in enumerate((heads, kv_heads, kv_heads))]


def put(mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_attention_inside_shard_map_is_right_and_recorded_with_local_shapes(checked):
    arrays = qkv(8, 4, 2, 1)

    def mapped(fn):
        return jax.shard_map(fn, mesh=AUTO, in_specs=P("d"), out_specs=P("d"), check_vma=checked)

    clear_invocations()
    wanted = jitted(gradients(attention), *arrays)
    lowered = jax.jit(gradients(mapped(flash_attention))).lower(*arrays)
    assert recorded() == set(find_labels_in_lowered(lowered))
    calls = [args for calls in get_invocations().values() for _, args, _ in calls.values()]
    assert [args[0].shape for args in calls] == [(2, 4, 2, 4)] * 2
    close(lowered.compile()(*arrays), wanted)
    inside = jax.shard_map(
        jax.vmap(gradients(lambda *a: flash_attention(*[x[None] for x in a])[0])),
        mesh=AUTO, in_specs=P("d"), out_specs=P("d"), check_vma=checked,
    )  # fmt: skip
    close(jitted(inside, *arrays), wanted)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_weights_shared_inside_shard_map_get_the_sum_of_all_gradients(checked):
    fn, reference, _ = OPS["linear"]
    arrays = normal(30, 8, 4), W, BIAS
    mapped = jax.shard_map(fn, mesh=AUTO, in_specs=(P("d"), P(), P()), out_specs=P("d"), check_vma=checked)
    wanted = jitted(gradients(reference), *arrays)
    close(jitted(gradients(mapped), *arrays), wanted)
    close(gradients(mapped)(*arrays), wanted)


def test_a_gradient_taken_inside_shard_map_is_summed_where_its_operand_does_not_vary():
    fn, reference, _ = OPS["linear"]
    arrays = normal(30, 8, 4), W, BIAS

    def weight_gradient(x, weight, bias):
        return jax.grad(lambda weight: jnp.sum(fn(x, weight, bias) ** 2))(weight)

    mapped = jax.shard_map(weight_gradient, mesh=AUTO, in_specs=(P("d"), P(), P()), out_specs=P())
    close(jitted(mapped, *arrays), jitted(gradients(reference), *arrays)[1])


@pytest.mark.parametrize("spec", [P("d"), P(None, None, "d")], ids=["batch", "heads"])
def test_attention_under_explicit_axes_keeps_the_sharding_of_its_input(spec):
    arrays = qkv(4, 4, 4, 4)
    with jax.set_mesh(EXPLICIT):
        sharded = put(EXPLICIT, arrays, [spec] * 3)
        clear_invocations()
        out, grads = jitted(lambda *a: (flash_attention(*a), gradients(flash_attention)(*a)), *sharded)
        assert all(jax.typeof(x).sharding.spec == jax.typeof(sharded[0]).sharding.spec for x in (out, *grads))
        close(flash_attention(*sharded), out)
    close((out, grads), jitted(lambda *a: (attention(*a), gradients(attention)(*a)), *arrays))
    shapes = {args[0].shape for calls in get_invocations().values() for _, args, _ in calls.values()}
    assert shapes == {(1, 4, 4, 4) if spec == P("d") else (4, 4, 1, 4)}


@pytest.mark.parametrize("shape", [(8, 4), (4, 2, 4)])
def test_linear_under_explicit_axes_keeps_the_sharding_of_its_rows(shape):
    fn, reference, _ = OPS["linear"]
    arrays = normal(31, *shape), W, BIAS
    with jax.set_mesh(EXPLICIT):
        sharded = put(EXPLICIT, arrays, [P("d"), P(), P()])
        out, grads = jitted(lambda *a: (fn(*a), gradients(fn)(*a)), *sharded)
        assert [jax.typeof(x).sharding.spec[0] for x in (out, *grads)] == ["d", "d", None, None]
    close((out, grads), jitted(lambda *a: (reference(*a), gradients(reference)(*a)), *arrays))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_norm_under_explicit_axes_keeps_the_sharding_of_its_rows(op):
    fn, reference, _ = OPS[op]
    arrays = normal(35, 4, 2, 4), normal(36, 4), normal(37, 4)
    with jax.set_mesh(EXPLICIT):
        sharded = put(EXPLICIT, arrays, [P("d"), P(), P()])
        out, grads = jitted(lambda *a: (fn(*a), gradients(fn)(*a)), *sharded)
        assert [jax.typeof(x).sharding.spec[0] for x in (out, *grads)] == ["d", "d", None, None]
    close((out, grads), jitted(lambda *a: (reference(*a), gradients(reference)(*a)), *arrays))


@pytest.mark.parametrize("op", ["linear", "rms_norm", "layer_norm"])
def test_rows_under_explicit_axes_are_not_gathered(op):
    """A chunk of the rows that one device has, of an array over all, would be a loop over the shards of others."""
    vectors = (W, BIAS) if op == "linear" else (normal(36, 4), normal(37, 4))
    with jax.set_mesh(EXPLICIT):
        sharded = put(EXPLICIT, (normal(31, 8, 4), *vectors), [P("d"), P(), P()])
        text = jax.jit(gradients(OPS[op][0])).lower(*sharded).compile().as_text()
    assert not {"all-gather", "all-to-all", "collective-permute"} & set(text.replace("(", " ").split())


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_norm_inside_shard_map_sums_the_gradients_of_scale_and_bias(op):
    fn, reference, _ = OPS[op]
    arrays = normal(35, 8, 4), normal(36, 4), normal(37, 4)
    mapped = jax.shard_map(fn, mesh=AUTO, in_specs=(P("d"), P(), P()), out_specs=P("d"))
    close(jitted(gradients(mapped), *arrays), jitted(gradients(reference), *arrays))


@pytest.mark.parametrize("specs", [[P("d"), P(), P()], [P(None, "d"), P("d"), P()]], ids=str)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_norm_with_sharded_inputs_under_auto_axes_is_right(op, specs):
    fn, reference, _ = OPS[op]
    arrays = normal(35, 8, 4), normal(36, 4), normal(37, 4)
    close(jitted(gradients(fn), *put(AUTO, arrays, specs)), jitted(gradients(reference), *arrays))


@pytest.mark.parametrize("spec", [P(None, "d"), P("d")], ids=["rows", "mapped axis"])
def test_vmap_under_explicit_axes_folds_without_moving_shards(spec):
    arrays = [np.stack([x + i / 8 for i in range(4)]) for x in qkv(4, 4, 2, 1)]
    with jax.set_mesh(EXPLICIT):
        sharded = put(EXPLICIT, arrays, [spec] * 3)
        lowered = jax.jit(jax.vmap(jax.grad(lambda *a: flash_attention(*a).sum()))).lower(*sharded)
        compiled = lowered.compile()
        grad = compiled(*sharded)
    assert grad.sharding.spec == jax.typeof(sharded[0]).sharding.spec
    assert not {"all-gather", "all-to-all", "collective-permute"} & set(compiled.as_text().replace("(", " ").split())
    assert runs(lowered) == {"flash_attention@v1": 1, "flash_attention_bwd@v1": 1}
    close(grad, jitted(jax.vmap(jax.grad(lambda *a: attention(*a).sum())), *arrays))


def test_forward_mode_works_under_explicit_axes():
    arrays = qkv(4, 4, 2, 1)
    with jax.set_mesh(EXPLICIT):
        found = jitted(along_query(directional)(flash_attention), *put(EXPLICIT, arrays, [P("d")] * 3))
    close(found, jitted(along_query(directional)(attention), *arrays))


@pytest.mark.parametrize("specs", [[P("d")] * 3, [P(None, None, "d")] * 3, [P("d"), P(), P()]], ids=str)
def test_attention_with_sharded_inputs_under_auto_axes_is_right(specs):
    arrays = qkv(4, 4, 4, 4)
    sharded = put(AUTO, arrays, specs)
    close(jitted(gradients(flash_attention), *sharded), jitted(gradients(attention), *arrays))


@pytest.mark.parametrize("specs", [[P("d"), P(), P()], [P(), P(None, "d"), P("d")], [P("d"), P("d"), P()]], ids=str)
def test_linear_with_sharded_inputs_under_auto_axes_is_right(specs):
    fn, reference, _ = OPS["linear"]
    arrays = normal(32, 8, 4), normal(33, 4, 4), normal(34, 4)
    close(jitted(gradients(fn), *put(AUTO, arrays, specs)), jitted(gradients(reference), *arrays))
