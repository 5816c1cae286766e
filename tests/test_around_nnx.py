"""What is done around a Flax NNX model: swap, report, tune, explain, check, set_config."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from flax import linen as nn
from flax import nnx
from nnx_models import WIDTH, Block, X, adam, model, states_equal, step

import ejkernel_ops as ek
import ejlayers

# swap and report


def test_swap_keeps_object_variables_ties_and_optimizer():
    m = model()
    optimizer, variables = adam(m), [v for _, v in nnx.to_flat_state(nnx.state(m))]
    before = nnx.state(m)
    assert ejlayers.swap(m) is m
    assert m.tied is m.head
    assert type(m.head) is ejlayers.nnx.Linear
    assert isinstance(m.head, nnx.Linear)
    states_equal(before, nnx.state(m))
    assert m.head.kernel is next(v for v in variables if v is m.head.kernel)
    twin = model()
    stock_losses = [float(step(twin, o, X)) for o in [adam(twin)] for _ in range(5)]
    losses = [float(step(m, optimizer, X)) for _ in range(5)]
    assert np.allclose(losses, stock_losses, atol=1e-5)


def test_swapping_twice_is_swapping_once():
    m = ejlayers.swap(model())
    config = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))
    ejlayers.set_config(m, {"head": config})
    ejlayers.swap(m)
    assert m.head.config == config
    assert all(row.replaced for row in ejlayers.report(m).rows)


def test_revert_and_original_are_stock_again():
    m = model()
    definition = nnx.graphdef(m)
    ejlayers.swap(m, config=ek.LinearConfig(backend="xla"))
    stock = ejlayers.report(m).original()
    assert type(stock.head) is nnx.Linear
    assert stock.head.kernel is m.head.kernel  # the same parameters
    assert stock.tied is stock.head
    assert type(m.head) is ejlayers.nnx.Linear
    assert ejlayers.report(m).revert() is m
    assert nnx.graphdef(m) == definition


def test_layers_with_their_own_functions_and_subclasses_are_skipped_with_a_reason():
    class Special(nnx.Linear):
        pass

    m = model()
    m.head = Special(WIDTH, 8, rngs=nnx.Rngs(0))
    m.blocks[0].up.dot_general = lambda *a, **k: jax.lax.dot_general(*a, **k)
    m.blocks[1].attention.attention_fn = lambda q, k, v, **kw: v
    report = {row.path: row for row in ejlayers.report(ejlayers.swap(m)).rows}
    assert report["blocks.0.up"].note == "custom dot_general"
    assert report["blocks.1.attention"].note == "custom attention_fn"
    assert "subclass" in report["head"].note
    assert report["blocks.0.down"].replaced
    assert "custom dot_general" in str(ejlayers.report(m))


def test_rules_choose_by_path_and_type_and_the_first_wins():
    config = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))
    rules = {"blocks.*.up": config, "blocks.1.**": False, nnx.MultiHeadAttention: True, "head": False}
    m = ejlayers.swap(model(), rules=rules)
    found = {row.path: (row.replaced, row.note) for row in ejlayers.report(m).rows}
    assert found["blocks.0.up"][1] == "pinned: fwd.blocksize_m=4"
    assert found["blocks.1.up"][0]
    assert found["blocks.1.attention"] == (False, "a rule says so, or it came after the swap")
    assert found["head"] == (False, "a rule says so, or it came after the swap")
    assert found["blocks.0.attention"] == (True, "")
    with pytest.raises(ek.ConfigError, match=r"'blocks\.0\.upp' matches no layer.*did you mean 'blocks\.0\.up'"):
        ejlayers.swap(model(), rules={"blocks.0.upp": True})
    with pytest.raises(ek.ConfigError, match=r"rule 'head' has no effect: rule '\*\*' before it"):
        ejlayers.swap(model(), rules={"**": True, "head": False})
    with pytest.raises(ek.ConfigError, match="expected a AttentionConfig"):
        ejlayers.swap(model(), rules={"**.attention": config})
    for rules, message in (({"**": 3}, "expected True, False or"), ({0: True}, "the key 0; expected a path"),
                           (["**"], "rules is a list; expected a mapping")):  # fmt: skip
        with pytest.raises(ek.ConfigError, match=message):
            ejlayers.swap(model(), rules=rules)


def test_a_config_that_no_layer_takes_is_refused():
    m = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ek.ConfigError, match="config has a NormConfig, which no layer takes"):
        ejlayers.swap(m, config=[ek.NormConfig(), ek.LinearConfig(backend="xla")])
    assert type(m) is nnx.Linear


def test_abstract_stacked_and_vmapped_models_swap():
    abstract = ejlayers.swap(nnx.eval_shape(lambda: model()))
    assert type(abstract.head) is ejlayers.nnx.Linear

    @nnx.vmap
    def stack(key):
        return Block(nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 3)
    stacked, plain = ejlayers.swap(stack(keys)), stack(keys)

    def run(blocks):
        def layer(x, block):
            return block(x)

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, blocks)

    assert jnp.allclose(run(stacked), run(plain), atol=1e-5)
    rows = ejlayers.explain(nnx.jit(run), stacked).rows
    assert {(r.path, r.op, r.executions) for r in rows} == {
        ("attention", "flash_attention@v1", 3),
        *(
            (path, "linear@v1", 3)
            for path in ("up", "down", *(f"attention.{n}" for n in ("query", "key", "value", "out")))
        ),
    }


def test_what_is_no_model_is_refused():
    with pytest.raises(ek.ConfigError, match=r"expected a flax\.nnx\.Module"):
        ejlayers.swap({"a": 1})


# check, explain, set_config, tune


def test_check_sees_a_difference():
    a, b = model(), ejlayers.swap(model())
    assert ejlayers.check(b, X).output_abs < 1e-5
    b.head.bias[...] += 0.5
    report = ejlayers.check(a, b, X)
    assert 0.4 < report.output_abs < 0.6
    assert "outputs differ" in str(report)


def test_check_refuses_a_model_that_was_not_swapped():
    with pytest.raises(ek.ConfigError, match="no layer of model is one of ours"):
        ejlayers.check(model(), X)


@pytest.mark.parametrize("framework", ["nnx", "linen", "equinox"])
def test_check_leaves_out_the_outputs_of_padding(framework):
    x, lengths = jax.random.normal(jax.random.key(0), (2, 6, WIDTH)), jnp.array([6, 3])
    real = jnp.arange(6) < lengths[:, None]
    mask = real[:, None, :, None] & real[:, None, None, :]
    key = jax.random.key(1)
    args = {
        "nnx": lambda: (nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0)), x),
        "linen": lambda: (nn.MultiHeadDotProductAttention(4), nn.MultiHeadDotProductAttention(4).init(key, x), x),
        "equinox": lambda: (eqx.nn.MultiheadAttention(4, WIDTH, key=key), *[x[1]] * 3),
    }[framework]()
    call, where = ({"mask": mask}, real) if framework != "equinox" else ({"mask": mask[1, 0]}, real[1])
    model, *inputs = ejlayers.swap(args[0]), *args[1:]
    assert ejlayers.check(model, *inputs, **call).output_abs > 1e-2
    report = ejlayers.check(model, *inputs, where=where, **call)
    assert report.output_abs < 1e-5
    assert report.grad_rel < 1e-4
    with pytest.raises(ValueError, match=r"where has shape \(7,\); expected the first axes of an output"):
        ejlayers.check(model, *inputs, where=jnp.ones(7, bool), **call)
    with pytest.raises(TypeError, match="where is float32; expected bool"):
        ejlayers.check(model, *inputs, where=jnp.ones(7), **call)


def test_check_refuses_outputs_of_other_shapes():
    class Twice(nnx.Module):
        def __init__(self, count):
            self.count, self.head = count, nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return (self.head(x),) * self.count + (1,)

    assert ejlayers.check(Twice(1), ejlayers.swap(Twice(1)), jnp.ones((2, 4))).output_abs < 1e-5
    with pytest.raises(ValueError, match="of different shapes"):
        ejlayers.check(Twice(2), Twice(1), jnp.ones((2, 4)))


@pytest.mark.cpu
def test_check_says_which_layer_differs():
    m = ejlayers.swap(nnx.Sequential(*(nnx.LayerNorm(512, rngs=nnx.Rngs(0)) for _ in range(2))))
    m.layers[0].bias[...] += 2000  # what comes next has a great mean, at which the stock norm is wrong
    report = ejlayers.check(m, jax.random.normal(jax.random.key(0), (4, 512)), per_module=True)
    assert list(report.modules) == ["layers.0", "layers.1"]
    assert report.modules["layers.0"].output_abs < 1e-2 < 0.1 < report.modules["layers.1"].output_abs
    assert report.modules["layers.1"].output_abs == pytest.approx(report.output_abs, rel=1e-2)
    assert "layers.1" in str(report)
    assert report.to_dict()["modules"]["layers.0"]["grad_abs"] == report.modules["layers.0"].grad_abs


def test_explain_has_paths_and_sources_and_leaves_labels_and_model_alone():
    m = ejlayers.swap(model())
    pinned = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4), bwd=ek.BwdParams(blocksize_m=8))
    ejlayers.set_config(m, {"blocks.0.up": pinned})
    definition, optimizer = nnx.graphdef(m), adam(m)
    report = ejlayers.explain(step, m, optimizer, X)
    assert nnx.graphdef(m) == definition
    rows = {(r.path, r.op): r for r in report.rows}
    assert len(rows) == len(report.rows) == 30  # fifteen layers, forward and backward
    assert rows["blocks.0.up", "linear@v1"].config == "fwd.blocksize_m=4"
    assert rows["blocks.0.up", "linear@v1"].source == "heuristic+pinned"  # the back end was not pinned
    assert rows["blocks.0.up", "linear_bwd@v1"].config == "bwd.blocksize_m=8"
    assert rows["blocks.1.up", "linear@v1"].source == "heuristic"
    assert {r.label for r in report.rows} == set(ek.find_labels_in_lowered(step.lower(m, optimizer, X)))
    assert report.to_markdown().count("\n") == 31
    assert report.to_dict()[0]["count"] == 1
    assert "blocks.0.up" in str(report)


def test_pinned_config_beats_a_result_and_does_not_leak():
    m = ejlayers.swap(model())
    ejlayers.set_config(m, {"blocks.0.up": ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))})
    result = ejlayers.tune(nnx.jit(lambda m, x: m(x)), m, X, selector=quick(), whole_step=False)
    tuned = {
        e.call_key: ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=5))
        for e in result.entries
        if e.op_id_v == "linear@v1"
    }
    overlay = {ek.Key(result.device, "linear@v1", key): cfg for key, cfg in tuned.items()}
    with ek.overlay_cache(overlay):
        rows = {r.path: r for r in ejlayers.explain(nnx.jit(lambda m, x: m(x)), m, X).rows}
    assert rows["blocks.0.up"].config == "fwd.blocksize_m=4"
    assert rows["blocks.1.up"].config == "fwd.blocksize_m=5"


def test_changing_a_config_retraces_once_and_the_optimizer_goes_on():
    m, traces = ejlayers.swap(model()), []
    optimizer = adam(m)

    @nnx.jit
    def counted(m, optimizer, x):
        traces.append(1)
        return step(m, optimizer, x)

    counted(m, optimizer, X)
    config = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))
    for tree in (m, (m, optimizer), {"model": m}):  # equal content: no further trace
        ejlayers.set_config(tree, {"**.head" if tree is not m else "head": config})
        counted(m, optimizer, X)
    assert len(traces) == 2
    ejlayers.set_config(m, {"head": None})
    assert m.head.config is None


def quick():
    return ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))


def test_tune_takes_every_kind_of_step_and_changes_no_argument():
    m = ejlayers.swap(model())
    optimizer, before = adam(m), nnx.clone(nnx.state(m))
    chain = quick()
    result = ejlayers.tune(step, m, optimizer, X, selector=chain)
    states_equal(before, nnx.state(m))
    assert sorted({e.op_id_v for e in result.entries}) == [
        "flash_attention@v1", "flash_attention_bwd@v1", "linear@v1", "linear_bwd@v1",
    ]  # fmt: skip
    assert sum(e.count for e in result.entries if e.op_id_v == "linear@v1") == 13
    assert result.step_ms is not None
    assert "whole step" in str(result)

    def plain(model, optimizer, x):
        return step(model, optimizer, x)

    kept = [ejlayers.tune(s, m, optimizer, X, selector=chain, whole_step=False) for s in (step, plain)]
    assert kept[0].digest == kept[1].digest
    with result:
        assert np.isfinite(step(m, optimizer, X))


def test_whole_step_waits_for_steps_that_return_nothing_and_survives_those_that_raise():
    m = ejlayers.swap(model())

    @nnx.jit
    def silent(m, x):
        for _ in range(20):
            x = m.blocks[0](x)
        m.head.bias[...] += x.mean()

    @nnx.jit
    def loud(m, x):
        return silent(m, x), m(x)

    chain, x = quick(), jnp.ones((4, 64, WIDTH))
    times = [ejlayers.tune(step, m, x, selector=chain).step_ms[0] for step in (silent, loud)]
    assert times[0] > times[1] / 3

    def broken(m, x):
        return jax.pure_callback(lambda x: 1 / 0, x, m(x))

    result = ejlayers.tune(nnx.jit(broken), m, x, selector=chain)
    assert len(result.entries) > 0
    assert "could not be timed" in result.notes[0]


def test_swap_takes_unhashable_models_and_a_rule_puts_a_stock_layer_back():
    @dataclasses.dataclass
    class Plain(nnx.Module):
        head: nnx.Linear

    m = ejlayers.swap(Plain(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))
    assert ejlayers.report(m).rows[0].replaced
    ejlayers.swap(m, rules={"head": False})
    assert type(m.head) is nnx.Linear
    assert ejlayers.report(m).rows[0].note == "not swapped"


def test_check_does_not_pass_over_nan():
    a, b = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ejlayers.nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    b.bias[...] = b.bias[...].at[2].set(jnp.nan)
    assert ejlayers.check(a, b, jnp.ones((2, 4))).output_abs == float("inf")


def test_tune_takes_abstract_arguments_and_functions_of_arrays():
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    result = ejlayers.tune(jax.grad(lambda w: ek.linear(w, w).sum()), w, selector=quick())
    assert sorted(e.op_id_v for e in result.entries) == ["linear@v1", "linear_bwd@v1"]
    assert result.step_ms is None


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # treescope walks all of NumPy
def test_a_module_shows_what_it_pins():
    m = ejlayers.swap(model(), config=[ek.LinearConfig(backend="xla"), ek.AttentionConfig(backend="xla")])
    for text in (repr(m), treescope.render_to_text(m, ignore_exceptions=False)):
        assert text.count("LinearConfig(") in (13, 14)  # one has two paths
        assert text.count("AttentionConfig(") == 2


def test_frozen_weights_cost_no_gradient_of_theirs():
    base = ejlayers.nnx.Linear(WIDTH, 24, rngs=nnx.Rngs(0))
    m = nnx.LoRA(WIDTH, 2, 24, base_module=base, rngs=nnx.Rngs(1))

    def products(wrt):  # of the sizes of the kernel: its gradient's
        step = nnx.jit(lambda m, x: nnx.grad(lambda m: jnp.sum(m(x) ** 2), argnums=nnx.DiffState(0, wrt))(m))
        return len(re.findall(r"dot_general.*-> tensor<16x24xf32>", step.lower(m, X).as_text()))

    assert products(nnx.Param) == 1
    assert products(nnx.LoRAParam) == 0


def test_check_compares_both_parts_of_complex_numbers():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            wrong = isinstance(self.layer, ejlayers.nnx.Linear)
            return jax.lax.complex(self.layer(x), jnp.full((2, 4), 1.0 if wrong else 0.0))

    assert ejlayers.check(ejlayers.swap(Model()), jnp.ones((2, 4))).output_abs == 1.0
