"""Programs over several devices are tuned for what one device runs, and a result applies to as many as there are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej
import ejlayers
from ejkernel_ops.execution.local_calls import with_local_labels
from ejkernel_ops.utils.meta import call_sites, split_label

from .ops import close, normal

ROWS, COLUMNS = P("data"), P(None, "model")


def mesh_of(data, model):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def layer(x, weight):
    return ej.linear(ej.rms_norm(x), weight, activation="silu")


def step(x, up, down):
    def block(x, _):
        return x + ej.linear(layer(x, up), down), ()

    return (jax.lax.scan(jax.checkpoint(block), x, length=3)[0] ** 2).sum()


GRADIENT = jax.jit(jax.grad(step, (1, 2)))
ARRAYS = normal(0, 16, 4, 8), normal(1, 8, 16) / 4, normal(2, 16, 8) / 4


def placed(mesh, rows=16):
    arrays = ARRAYS[0][:rows], *ARRAYS[1:]
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (ROWS, COLUMNS, P("model")))]


def recorded():
    return {(op, key) for op, calls in ej.get_invocations().items() for key in calls}


def keys_of(result):
    return {(entry.op_id_v, entry.call_key) for entry in result.entries}


def sites_of(lowered):
    return call_sites(with_local_labels(lowered.as_text()))


def test_what_a_device_runs_is_known_without_compiling():
    ej.clear_invocations()
    lowered = GRADIENT.lower(*placed(mesh_of(2, 4)))
    assert not recorded()
    sites = sites_of(lowered)
    assert {split_label(site.label) for site in sites} == recorded()
    shapes = {args[0].shape for calls in ej.get_invocations().values() for _, args, _ in calls.values()}
    assert shapes == {(8, 4, 8), (8, 4, 4)}
    runs = {}
    for site in sites:
        name = split_label(site.label)[0]
        runs[name] = runs.get(name, 0) + site.executions
    assert runs == {"linear@v1": 12, "rms_norm@v1": 6, "linear_bwd@v1": 6, "rms_norm_bwd@v1": 3}
    before = recorded()
    ej.clear_invocations()
    lowered.compile()
    assert recorded() == before


def test_a_program_over_devices_is_tuned_by_what_one_of_them_runs_and_the_result_is_used():
    selector = ej.ConfigSelectorChain()
    result = ej.autotune_lowered(selector, GRADIENT.lower(*placed(mesh_of(2, 4))))
    assert not result.skipped
    assert [entry.shapes for entry in result.entries if entry.op_id_v == "rms_norm@v1"] == ["float32[8,4,8]"]
    pinned = ej.ConfigSelectorChain(policy=ej.AutotunePolicy(mode="pinned"))  # nothing but the result gives a config
    before = ej.set_default_selector(pinned)
    try:
        with result:
            found = GRADIENT(*placed(mesh_of(2, 4)))
    finally:
        ej.set_default_selector(before)
    close(found, GRADIENT(*ARRAYS))


def test_a_result_of_one_part_applies_wherever_the_parts_are_as_large():
    """Of 8 devices each with 8 rows, of 4 with 8, and of one that has no more."""
    ej.clear_invocations()
    result = ej.autotune_lowered(ej.ConfigSelectorChain(), GRADIENT.lower(*placed(mesh_of(2, 4))))
    smaller = ej.autotune_lowered(ej.ConfigSelectorChain(), GRADIENT.lower(*placed(mesh_of(1, 4), rows=8)))
    assert keys_of(result) == keys_of(smaller)


def test_explain_says_what_a_device_runs():
    report = ejlayers.explain(GRADIENT, *placed(mesh_of(2, 4)))
    rows = {row.op: row for row in report.rows}
    assert rows["rms_norm@v1"].shapes == "float32[8,4,8]"
    assert rows["rms_norm@v1"].backend == "xla"
    assert rows["rms_norm@v1"].source == "heuristic"


def test_configs_are_listed_by_the_labels_of_parts():
    selector = ej.ConfigSelectorChain()
    lowered = GRADIENT.lower(*placed(mesh_of(2, 4)))
    ej.autotune_lowered(selector, lowered)
    pairs = ej.labels_to_configs(lowered, selector)
    assert pairs
    assert all(cfg is not None for _, cfg in pairs)


def test_one_call_in_two_places_with_two_shardings_is_two_calls():
    mesh = mesh_of(2, 4)
    x, _, _ = placed(mesh)
    whole = jax.device_put(ARRAYS[0], NamedSharding(mesh, P(None, "model")))
    lowered = jax.jit(lambda a, b: (ej.rms_norm(a), ej.rms_norm(b))).lower(x, whole)
    labels = {site.label for site in sites_of(lowered)}
    assert len(labels) == 2
    ej.clear_invocations()
    lowered.compile()
    assert recorded() == {split_label(label) for label in labels}


def test_the_choice_of_a_program_is_that_of_the_moment_of_its_lowering():
    """It is made while XLA compiles, when the result that was entered is left again."""
    mesh = mesh_of(2, 4)
    lowered = GRADIENT.lower(*placed(mesh))
    sites_of(lowered)
    device = ej.device_fingerprint()
    configs = {
        ej.Key(device, op, key): kernel.config(3)
        for op, calls in ej.get_invocations().items() for key, (kernel, _, _) in calls.items() if op == "rms_norm@v1"
    }  # fmt: skip
    with ej.overlay_cache(configs):
        inside = GRADIENT.lower(*placed(mesh))
    seen = []
    ej.default_selector().on_event = lambda event, **data: seen.append((data.get("op_id_v"), data.get("cfg")))
    inside.compile()
    chosen = [cfg for op, cfg in seen if op == "rms_norm@v1" and isinstance(cfg, ej.NormConfig)]
    assert chosen
    assert {cfg.fwd.blocksize_m for cfg in chosen} == {3}


def test_eager_calls_on_split_arrays_are_not_tuned_whole():
    selector = ej.ConfigSelectorChain(autotune=True)
    before = ej.set_default_selector(selector)
    try:
        out = ej.rms_norm(placed(mesh_of(2, 4))[0])
    finally:
        ej.set_default_selector(before)
    close(out, ej.rms_norm(ARRAYS[0]))
    assert selector.stats["tunings"] == 0


def test_a_call_that_no_one_knows_here_is_told():
    text = GRADIENT.lower(*placed(mesh_of(2, 4))).as_text()
    label = ej.find_labels_in_lowered(text)[0]
    unknown = text.replace(label, label[:-16] + "0" * 16)
    result = ej.autotune_lowered(ej.ConfigSelectorChain(), unknown)
    assert [name for name, _ in result.skipped] == [label[:-16] + "0" * 16]


def test_an_exported_program_of_several_devices_runs_as_xla_shares_it_out():
    exported = jax.export.export(jax.jit(layer))(*placed(mesh_of(2, 4))[:2])
    again = jax.export.deserialize(exported.serialize())
    close(jax.jit(again.call)(*placed(mesh_of(2, 4))[:2]), jax.jit(layer)(*ARRAYS[:2]))


@pytest.mark.parametrize("precision", ["highest", "bfloat16"])
def test_settings_of_the_caller_hold_while_xla_compiles(precision):
    with jax.default_matmul_precision(precision):
        lowered = jax.jit(layer).lower(*placed(mesh_of(2, 4))[:2])
        alone = jax.jit(layer).lower(*ARRAYS[:2]).compile()
    text, names = lowered.compile().as_text(), {"highest": "highest", "bfloat16": "default"}
    assert ("operand_precision={highest,highest}" in text) == (names[precision] == "highest")
    assert ("operand_precision={highest,highest}" in alone.as_text()) == (names[precision] == "highest")


def test_x64_of_the_caller_holds_while_xla_compiles():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in ARRAYS[:2]]
        mesh = mesh_of(2, 4)
        sharded = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (ROWS, COLUMNS))]
        lowered, wanted = jax.jit(layer).lower(*sharded), jax.jit(layer)(*arrays)
    found = lowered.compile()(*sharded)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


class CallingBack(ej.Kernel):
    name, rows, out_rows = "test_calling_back", (True,), (True,)

    def heuristic_cfg(self, inv):
        return 0

    def run(self, x, *, cfg):
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_a_kernel_that_calls_back_to_python_is_refused_where_xla_shares_out_and_works_where_types_do():
    rows = normal(0, 8, 4)
    with pytest.raises(Exception, match=r"test_calling_back calls back to Python \(pure_callback\).*shard_map"):
        jax.jit(CallingBack())(placed_rows(rows, AxisType.Auto))
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
        close(jax.jit(CallingBack())(placed_rows(rows, AxisType.Explicit)), 2 * rows)


def placed_rows(rows, kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    return jax.device_put(rows, NamedSharding(mesh, P("data")))


class Reduced(ej.Kernel):
    name = "test_reduced"

    def heuristic_cfg(self, inv):
        return 0

    def run(self, x, *, cfg, axes=()):
        return x.sum(axes)


def test_a_kernel_may_have_an_argument_of_the_name_axes():
    close(Reduced()(ARRAYS[0], axes=(0, 1)), ARRAYS[0].sum((0, 1)))


def test_what_is_pinned_or_entered_is_part_of_a_program_before_xla_asks():
    """JAX's cache of compiled programs looks at that text, without the address of whom XLA asks."""

    def text_of(cfg=None):
        lowered = jax.jit(lambda x: ej.rms_norm(x, config=cfg)).lower(placed(mesh_of(2, 4))[0])
        return re.sub(r'backend_config = "\d+"', "", lowered.as_text())

    plain, config = text_of(), ej.NormConfig(fwd=ej.FwdParams(blocksize_m=3))
    assert text_of() == plain
    assert text_of(config) != plain
    with ej.overlay_cache({ej.Key(ej.device_fingerprint(), "rms_norm@v1", "0" * 16): config}):
        assert text_of() != plain
