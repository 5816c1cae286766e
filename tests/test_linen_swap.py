"""What is done around a Linen model: swap, report, tune, explain, check, set_config."""

import copy
import pickle

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope
from flax import linen as nn
from flax.training.train_state import TrainState

import ejkernel_ops as ek
import ejlayers

WIDTH = 16
KEY = jax.random.key(3)
TOKENS = jnp.arange(18).reshape(2, 9) % 11
X = jax.random.normal(KEY, (2, 9, WIDTH))
SMALL = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(WIDTH, use_bias=False)(nn.gelu(nn.Dense(24)(x)))
        return x if _ is None else (x, None)


class Model(nn.Module):
    depth: int = 2

    def setup(self):
        self.embed = nn.Embed(11, WIDTH)
        self.blocks = [Block() for _ in range(self.depth)]
        self.norm = nn.RMSNorm()

    def encode(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, tokens):
        return self.embed.attend(self.encode(tokens))


def trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_array_equal(x, y)


def rows(model, *inputs, **kwargs):
    return {row.path: row for row in ejlayers.report(model, *inputs, **kwargs).rows}


def calls(fn, *args):
    """What `explain` says, by path and op; a new function, for those that are traced are known."""
    return {(row.path, row.op): row for row in ejlayers.explain(jax.jit(lambda *args: fn(*args)), *args).rows}


@pytest.fixture(scope="module")
def variables():
    return jax.jit(Model().init)(KEY, TOKENS)


# swap


def test_a_swapped_model_has_the_parameters_results_and_gradients_of_the_stock_one(variables):
    model = ejlayers.swap(Model())
    assert isinstance(model, Model)
    assert type(model).__name__ == "Model"
    trees_equal(variables, jax.jit(model.init)(KEY, TOKENS))
    for report in (ejlayers.check(model, variables, TOKENS), ejlayers.check(Model(), model, variables, TOKENS)):
        assert report.output_abs < 1e-5
        assert report.grad_rel < 1e-4
    assert {op for _, op in calls(model.apply, variables, TOKENS)} == {
        "flash_attention@v1", "linear@v1", "layer_norm@v1", "rms_norm@v1",
    }  # fmt: skip
    assert calls(Model().apply, variables, TOKENS) == {}


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(WIDTH)
        return layer(layer(x))


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable)()(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        over = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return over(name="blocks")(x, jnp.zeros(3))[0]


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(5)(x)


class Lifted(nn.Module):
    """Transformed functions of a module instead of classes."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(WIDTH)
        x = nn.remat(lambda module, x: module(x))(dense, x)
        return nn.vmap(lambda module, x: module(x), variable_axes={"params": None}, split_rngs={"params": False})(
            dense, x
        )


class Given(nn.Module):
    layers: tuple

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.jit(Block)()(x))


class Decorated(nn.Module):
    """A model whose own method is transformed."""

    @nn.jit
    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(Block()(x))


class Wrapped(nn.Module):
    """A swapped model inside of a stock one."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(ENCODER.copy(name="encoder")(x))


ENCODER = ejlayers.swap(nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(4)]))
MODELS = {
    "shared": (Shared(), 2), "remat": (Remat(), 8), "scan": (Scanned(), 8), "vmap": (Mapped(), 1),
    "lift": (Lifted(), 2), "fields": (Given((nn.Dense(4), nn.tanh, nn.Dense(5))), 2), "jit": (Jitted(), 9),
    "decorated": (Decorated(), 9), "sequential": (nn.Sequential([nn.Dense(4), nn.Dense(5)]), 2),
    "inside": (Wrapped(), 3), "layer": (nn.Dense(4), 1), "attention": (nn.MultiHeadDotProductAttention(4), 5),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_found_however_a_model_makes_and_transforms_them(name):
    model, count = MODELS[name]
    swapped, params = ejlayers.swap(model), jax.jit(model.init)(KEY, X)
    trees_equal(params, jax.jit(swapped.init)(KEY, X))
    report = ejlayers.check(model, swapped, params, X)
    assert report.output_abs < 1e-5
    assert report.grad_rel < 1e-4
    counts = [sum(r.count for r in ejlayers.explain(jax.jit(m.apply), params, X).rows) for m in (swapped, model)]
    assert counts == [count, 2 if name == "inside" else 0]


def test_a_layer_that_is_swapped_is_one_of_ours():
    for stock, ours in ((nn.Dense(3), ejlayers.linen.Dense), (nn.SelfAttention(2), ejlayers.linen.SelfAttention)):
        model = ejlayers.swap(stock)
        assert isinstance(model, ours)
        assert ejlayers.report(model).revert() == stock
    own = nn.MultiHeadDotProductAttention(2, attention_fn=lambda query, key, value: value)
    assert not isinstance(ejlayers.swap(own), ejlayers.linen.MultiHeadDotProductAttention)


@pytest.mark.parametrize("method", ["encode", Model.encode, lambda model, tokens: model.norm(model.embed(tokens))])
def test_methods_of_every_kind_run_with_the_kernels(method, variables):
    model = ejlayers.swap(Model())
    found = calls(lambda v, x: model.apply(v, x, method=method), variables, TOKENS)
    assert ("norm", "rms_norm@v1") in found
    bound = model.bind(variables)
    np.testing.assert_allclose(bound.encode(TOKENS), Model().bind(variables).encode(TOKENS), atol=1e-5)
    assert len(calls(bound.encode, TOKENS)) == 17


def test_equal_swaps_are_equal_and_are_traced_once(variables):
    traces = []

    def apply(model, variables, tokens):
        traces.append(1)
        return model.apply(variables, tokens)

    run = jax.jit(apply, static_argnums=0)
    models = [ejlayers.swap(Model(), rules={"norm": False}) for _ in range(2)]
    copies = [copy.deepcopy(models[0]), models[0].clone(), models[0].copy(), pickle.loads(pickle.dumps(models[0]))]
    for model in (*models, *copies, ejlayers.swap(models[0], rules={"norm": False})):
        assert model == models[0]
        run(model, variables, TOKENS)
    assert len(traces) == 1
    others = (Model(), ejlayers.swap(Model()), models[0].clone(depth=1))
    assert all(other != models[0] for other in others)
    own = ejlayers.set_config(ejlayers.linen.Dense(3, backend="xla"), {"": SMALL})
    assert copy.deepcopy(own) == own
    assert copy.deepcopy(own).backend == "xla"
    for model in others[:2]:
        run(model, variables, TOKENS)
    assert len(traces) == 3


JittedBlock = nn.jit(Block)


class OfJitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedBlock()(x)


def test_models_that_share_a_jitted_class_do_not_share_its_traces():
    params = OfJitted().init(KEY, X)
    models = [OfJitted(), ejlayers.swap(OfJitted()), ejlayers.swap(OfJitted(), config=SMALL)]
    for _ in range(2):
        for model in models:
            model.apply(params, X)
    found = [calls(model.apply, params, X) for model in models]
    assert [len(rows) for rows in found] == [0, 8, 8]
    assert found[2]["JitBlock_0.Dense_0", "linear@v1"].config == "fwd.blocksize_m=4"


def test_rules_are_not_wrong_for_layers_that_were_traced_before():
    class Other(OfJitted):
        pass

    rules = {"JitBlock_0.Dense_0": SMALL}
    for model in (ejlayers.swap(OfJitted(), rules=rules), ejlayers.swap(Other(), rules=rules)):
        model.apply(OfJitted().init(KEY, X), X)
        for _ in range(2):
            model.init(KEY, X)


def test_what_runs_is_not_swapped():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return ejlayers.swap(nn.Dense(3))(x)

    with pytest.raises(ek.ConfigError, match=r"model is Dense 'Dense_0' of a model that runs; swap it outside"):
        Outer().init(KEY, X)


# report and rules


def test_a_report_names_the_layers_that_a_call_visits(variables):
    model = ejlayers.swap(Model())
    [row] = ejlayers.report(model).rows
    assert (row.replaced, "report(model, variables, *inputs)" in row.note) == (True, True)
    shapes = jax.eval_shape(lambda: (variables, TOKENS))
    found = rows(model, *shapes)
    assert len(found) == 18
    assert found["blocks_1.attention.query"] == ejlayers.plan.Row("blocks_1.attention.query", "DenseGeneral", True, "")
    assert list(rows(model, *shapes, method="encode")) == list(found)
    assert {row.note for row in rows(Model(), *shapes).values()} == {"not swapped"}
    assert "blocks_0.attention" in str(ejlayers.report(model, *shapes))
    with pytest.raises(TypeError, match="first input of a Linen model is ShapeDtypeStruct; expected its variables"):
        ejlayers.report(model, shapes[1])
    with pytest.raises(TypeError, match="first input of a Linen model is nothing"):
        ejlayers.check(model)


class Special(nn.Dense):
    pass


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Special(WIDTH)(x)
        x = nn.Dense(WIDTH, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), name="own")(x)
        x = nn.MultiHeadDotProductAttention(4, attention_fn=lambda query, key, value: value, name="attention")(x)
        x = nn.LayerNorm(reduction_axes=(-2, -1), name="wide")(x)
        return ejlayers.linen.Dense(WIDTH, backend="xla", name="ours")(x)


def test_layers_with_their_own_functions_and_subclasses_are_skipped_with_a_reason():
    model = ejlayers.swap(Mixed())
    found = {path: row.note for path, row in rows(model, model.init(KEY, X), X).items()}
    assert "subclass" in found["Special_0"]
    assert found["own"] == "custom dot_general"
    assert found["attention"] == "custom attention_fn"
    assert found["wide"] == "axes other than the last one"
    assert found["ours"] == "pinned: backend=xla"
    assert found["attention.out"] == ""


def test_rules_choose_by_path_and_type_and_the_first_wins(variables):
    rules = {
        "blocks_*.Dense_0": SMALL, "blocks_1.**": False, nn.MultiHeadDotProductAttention: True, "norm": False,
    }  # fmt: skip
    found = rows(ejlayers.swap(Model(), rules=rules), variables, TOKENS)
    assert found["blocks_0.Dense_0"].note == found["blocks_1.Dense_0"].note == "pinned: fwd.blocksize_m=4"
    assert (found["blocks_1.attention"].replaced, found["blocks_1.attention"].note) == (False, "a rule says so")
    assert (found["norm"].replaced, found["norm"].note) == (False, "a rule says so")
    assert found["blocks_0.attention"].replaced


@pytest.mark.parametrize(("options", "message"), [
    ({"rules": {"blocks_0.Dense_9": True}}, r"'blocks_0\.Dense_9' matches no layer.*did you mean 'blocks_0\.Dense_"),
    ({"rules": {"**": True, "norm": False}}, r"rule 'norm' has no effect: rule '\*\*' before it"),
    ({"rules": {"**.attention": SMALL}}, "expected a AttentionConfig"),
    ({"config": ek.GatedLinearConfig()}, "config has a GatedLinearConfig, which no layer takes"),
])  # fmt: skip
def test_what_is_wrong_with_rules_is_said_when_all_layers_are_met(options, message, variables):
    model = ejlayers.swap(Model(), **options)
    for run in (lambda: jax.eval_shape(model.init, KEY, TOKENS), lambda: ejlayers.report(model, variables, TOKENS)):
        with pytest.raises(ek.ConfigError, match=message):
            run()


def traced_steps(model, variables):
    """All ways to see the layers of a model whose variables are there, after it ran."""

    @jax.jit
    def step(variables, tokens):
        return model.apply(variables, tokens).sum()

    step(variables, TOKENS)
    return {
        "explain": lambda: ejlayers.explain(step, variables, TOKENS),
        "explain, bound": lambda: ejlayers.explain(lambda v, x: model.bind(v)(x), variables, TOKENS),
        "tune": lambda: ejlayers.tune(step, variables, TOKENS, whole_step=False),
        "check": lambda: ejlayers.check(model, variables, TOKENS),
        "check of two": lambda: ejlayers.check(Model(), model, variables, TOKENS),
    }


@pytest.mark.parametrize("change", [
    lambda rules: ejlayers.swap(Model(), rules=rules), lambda rules: ejlayers.set_config(ejlayers.swap(Model()), rules),
])  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_wherever_a_whole_model_is_traced(change, variables):
    for run in traced_steps(change({"blocks_0.Dense_9": SMALL}), variables).values():
        for _ in range(2):
            with pytest.raises(ek.ConfigError, match=r"'blocks_0\.Dense_9' matches no layer"):
                run()
    model = change({"blocks_0.Dense_1": SMALL})
    assert len(ejlayers.explain(lambda v: model.apply(v, TOKENS, method="encode"), variables).rows) == 17
    part = change({"blocks_0.Dense_9": SMALL})  # a part of a model need not have all layers
    ejlayers.explain(lambda v: part.apply(v, TOKENS, method="encode"), variables)


def test_rules_are_tried_for_each_model_of_a_class():
    deep, shallow = (ejlayers.swap(Model(depth), rules={"blocks_1.**": False}) for depth in (2, 1))
    assert type(deep) is type(shallow)
    jax.eval_shape(deep.init, KEY, TOKENS)
    with pytest.raises(ek.ConfigError, match=r"rule 'blocks_1\.\*\*' matches no layer"):
        jax.eval_shape(shallow.init, KEY, TOKENS)


def test_rules_for_a_pytree_of_models_begin_with_their_paths():
    models = {"gen": ejlayers.swap(nn.Sequential([nn.Dense(4), nn.LayerNorm()])), "critic": ejlayers.swap(nn.Dense(1))}
    params = {name: model.init(KEY, X) for name, model in models.items()}
    pinned = ejlayers.set_config(models, {"gen.layers_0": SMALL, "**.layers_1": ek.NormConfig(backend="xla")})
    notes = {name: [r.note for r in ejlayers.report(m, params[name], X).rows] for name, m in pinned.items()}
    assert notes == {"gen": ["pinned: fwd.blocksize_m=4", "pinned: backend=xla"], "critic": [""]}
    with pytest.raises(ek.ConfigError, match=r"'gne\.layers_0' matches no layer of ours"):
        ejlayers.set_config(models, {"gne.layers_0": SMALL})
    with pytest.raises(ek.ConfigError, match=r"rule 'layers_0' matches no layer of ours; paths: "):
        ejlayers.set_config(models, {"layers_0": SMALL})
    wrong = ejlayers.set_config(models, {"gen.layers_9": SMALL})["gen"]
    with pytest.raises(ek.ConfigError, match=r"did you mean 'gen\.layers_"):
        wrong.init(KEY, X)


def test_a_train_state_is_changed_with_its_model(variables):
    state = ejlayers.swap(state_of(Model(), variables))
    for tree, rule in ((state, "blocks_0.Dense_0"), ((state, 1), "0.blocks_0.Dense_0"), ((state, 1), "**.Dense_0")):
        pinned = jax.tree.leaves(ejlayers.set_config(tree, {rule: SMALL}), is_leaf=lambda x: isinstance(x, TrainState))[
            0
        ]
        found = {(r.path, r.op): r for r in ejlayers.explain(step, pinned, TOKENS).rows}
        assert found["blocks_0.Dense_0", "linear@v1"].config == "fwd.blocksize_m=4"
        assert pinned.params is state.params
    wrong = ejlayers.set_config(state, {"blocks_0.Dense_9": SMALL})
    with pytest.raises(ek.ConfigError, match=r"'blocks_0\.Dense_9' matches no layer of ours; did you mean"):
        ejlayers.explain(step, wrong, TOKENS)


def test_configs_of_what_was_not_swapped_are_refused(variables):
    message = r"finds no layer of ours, which alone can pin a config; pass what ejlayers\.swap\(model\) returned"
    state = state_of(Model(), variables)
    for unknown in (state.replace(apply_fn=lambda *args: None), variables):
        with pytest.raises(ek.ConfigError, match=message):
            ejlayers.set_config(unknown, {"**": SMALL})
    stock = ejlayers.set_config(state, {"**": SMALL})  # in which there may be layers of ours: that is seen when it runs
    with pytest.raises(ek.ConfigError, match=message):
        ejlayers.explain(step, stock, TOKENS)


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # treescope walks all of NumPy
def test_a_swapped_model_shows_what_its_layers_become_and_pin():
    model = ejlayers.set_config(ejlayers.swap(Model(depth=3), rules={"norm": False}), {"**.Dense_0": SMALL})
    text = repr(model)
    assert "depth = 3" in text
    assert "ejlayers.swap(rules={'norm': False})" in text
    assert "ejlayers.set_config({'**.Dense_0': LinearConfig(" in text
    shown = treescope.render_to_text(model, ignore_exceptions=False)
    assert "depth=3," in "".join(shown.split())
    assert "LinearConfig(" in shown
    assert repr(ejlayers.swap(Model())) == repr(Model()) + " with ejlayers.swap()"


def test_a_swapped_model_inside_of_another_was_changed_first():
    class Outer(nn.Module):
        def setup(self):
            rules = {"layers_0": SMALL, "layers_1": False}
            self.inner = ejlayers.swap(nn.Sequential([nn.Dense(5), nn.Dense(4)]), rules=rules)
            self.first = nn.Dense(3)

        def __call__(self, x):
            return self.inner(self.first(x))

    params = Outer().init(KEY, X)
    notes = [
        {path: (row.replaced, row.note) for path, row in rows(model, params, X).items()}
        for model in (Outer(), ejlayers.swap(Outer()), ejlayers.swap(Outer(), rules={"inner.*": False}))
    ]
    pinned, kept = (True, "pinned: fwd.blocksize_m=4"), (False, "a rule says so")
    assert notes == [
        {"first": (False, "not swapped"), "inner.layers_0": pinned, "inner.layers_1": kept},
        {"first": (True, ""), "inner.layers_0": pinned, "inner.layers_1": (True, "")},
        {"first": (True, ""), "inner.layers_0": kept, "inner.layers_1": kept},
    ]


def test_what_is_no_rule_and_no_model_is_refused_at_once():
    with pytest.raises(ek.ConfigError, match="expected True, False or"):
        ejlayers.swap(Model(), rules={"**": 3})
    with pytest.raises(ek.ConfigError, match="config has 3"):
        ejlayers.swap(Model(), config=3)
    with pytest.raises(ek.ConfigError, match=r"expected a .*flax\.linen\.Module"):
        ejlayers.swap({"a": 1})


def test_original_and_revert_are_stock_again(variables):
    model = ejlayers.swap(Model(), config=SMALL)
    assert ejlayers.report(model).original() == ejlayers.report(model).revert() == Model()
    params = Mixed().init(KEY, X)
    assert ("ours", "linear@v1") in calls(Mixed().apply, params, X)
    for model in (Mixed(), ejlayers.set_config(Mixed(), {"ours": SMALL})):
        assert calls(ejlayers.report(model).original().apply, params, X) == {}
    assert type(ejlayers.report(ejlayers.linen.Dense(3)).original()) is nn.Dense


# set_config, explain, tune


def test_configs_change_and_only_they(variables):
    model = ejlayers.swap(Model(), rules={"norm": False, "**.Dense_0": SMALL})
    other = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=8))
    rules = {"model.blocks_0.Dense_0": other, "**.blocks_1.Dense_0": None}
    pinned = ejlayers.set_config({"model": model}, rules)["model"]
    found = rows(pinned, variables, TOKENS)
    assert found["blocks_0.Dense_0"].note == "pinned: fwd.blocksize_m=8"
    assert (found["blocks_1.Dense_0"].note, found["norm"].replaced) == ("", False)
    assert rows(model, variables, TOKENS)["blocks_0.Dense_0"].note == "pinned: fwd.blocksize_m=4"
    again = rows(ejlayers.swap(pinned), variables, TOKENS)
    assert again["blocks_0.Dense_0"].note == "pinned: fwd.blocksize_m=8"
    with pytest.raises(ek.ConfigError, match="matches no layer"):
        jax.eval_shape(ejlayers.set_config(model, {"blocks_9": other}).init, KEY, TOKENS)
    with pytest.raises(ek.ConfigError, match="expected a LinearConfig"):
        jax.eval_shape(ejlayers.set_config(model, {"**.Dense_0": ek.NormConfig()}).init, KEY, TOKENS)
    direct = ejlayers.set_config(Mixed(), {"ours": SMALL})
    assert calls(direct.apply, direct.init(KEY, X), X)["ours", "linear@v1"].config == "fwd.blocksize_m=4"


def state_of(model, variables):
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))


@jax.jit
def step(state, tokens):
    def loss(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def test_training_goes_as_with_the_stock_layers(variables):
    losses = []
    for model in (Model(), ejlayers.swap(Model())):
        state, found = state_of(model, variables), []
        for _ in range(5):
            state, value = step(state, TOKENS)
            found.append(float(value))
        losses.append(found)
    np.testing.assert_allclose(*losses, atol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_explain_has_paths_sources_and_loops_and_leaves_labels_alone(variables):
    model = ejlayers.set_config(ejlayers.swap(Model()), {"blocks_0.Dense_0": SMALL})
    state = state_of(model, variables)
    report = ejlayers.explain(step, state, TOKENS)
    found = {(r.path, r.op): r for r in report.rows}
    assert len(found) == len(report.rows) == 36  # eighteen calls, forward and backward
    assert found["blocks_0.Dense_0", "linear@v1"].config == "fwd.blocksize_m=4"
    assert found["blocks_0.Dense_0", "linear@v1"].source == "heuristic+pinned"
    assert found["blocks_1.Dense_0", "linear@v1"].source == "heuristic"
    assert {r.label for r in report.rows} == set(ek.find_labels_in_lowered(step.lower(state, TOKENS)))
    scanned = ejlayers.swap(Scanned())
    row = calls(scanned.apply, scanned.init(KEY, X), X)["blocks.attention", "flash_attention@v1"]
    assert (row.count, row.executions) == (1, 3)


def test_tune_takes_a_step_and_a_pinned_config_beats_its_result(variables):
    chain = ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))
    model = ejlayers.set_config(ejlayers.swap(Model()), {"blocks_0.Dense_0": SMALL})
    result = ejlayers.tune(step, state_of(model, variables), TOKENS, selector=chain, whole_step=False)
    assert sum(e.count for e in result.entries if e.op_id_v == "linear@v1") == 13
    tuned = {
        ek.Key(result.device, e.op_id_v, e.call_key): ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=5))
        for e in result.entries
        if e.op_id_v == "linear@v1"
    }
    with ek.overlay_cache(tuned):
        found = calls(model.apply, variables, TOKENS[:, :-1])
    assert found["blocks_0.Dense_0", "linear@v1"].config == "fwd.blocksize_m=4"
    assert found["blocks_1.Dense_1", "linear@v1"].config == "fwd.blocksize_m=5"


def test_tables_and_checkpoints_are_those_of_the_stock_model(variables):
    model = ejlayers.swap(Model())
    assert model.tabulate(KEY, TOKENS) == Model().tabulate(KEY, TOKENS)
    data = flax.serialization.to_bytes(variables)
    trees_equal(flax.serialization.from_bytes(jax.jit(model.init)(KEY, TOKENS), data), variables)


def test_check_sees_a_difference_and_takes_collections_that_change():
    layer = nn.MultiHeadDotProductAttention(4, decode=True)
    params = layer.init(KEY, X)
    report = ejlayers.check(ejlayers.swap(layer), params, X[:, :1], mutable="cache")
    assert report.output_abs < 1e-5
    wide = ejlayers.check(nn.LayerNorm(), ejlayers.swap(nn.LayerNorm(epsilon=1.0)), nn.LayerNorm().init(KEY, X), X)
    assert wide.output_abs > 0.1


class Outer(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x, mask):
        return nn.Dense(7)(self.inner(x, mask=mask))


def test_the_stock_model_has_none_of_a_model_that_was_swapped_apart():
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    mask = jnp.ones((2, 1, 6, 6), bool).at[1, :, 3:].set(False)  # queries that see nothing, at which ours differs
    stock = Outer(nn.MultiHeadDotProductAttention(4))
    variables = stock.init(jax.random.key(0), x, mask)
    want = ejlayers.check(ejlayers.swap(stock), variables, x, mask)
    nested = ejlayers.swap(Outer(ejlayers.swap(nn.MultiHeadDotProductAttention(4))))
    got = ejlayers.check(nested, variables, x, mask)
    assert got.output_abs == pytest.approx(want.output_abs, rel=1e-5)
    assert got.output_abs > 0.1
    assert ejlayers.report(nested).original() == ejlayers.report(nested).revert() == stock


def doubled(run, args, kwargs, context):
    return run(*args, **kwargs) * (
        2 if isinstance(context.module, nn.Dense) and context.method_name == "__call__" else 1
    )


class WithInterceptor(nn.Module):
    @nn.compact
    def __call__(self, x):
        with nn.intercept_methods(doubled):
            return nn.Dense(4)(x)


def test_an_interceptor_that_a_model_enters_is_heeded():
    x = jax.random.normal(jax.random.key(0), (2, 16))
    variables = WithInterceptor().init(jax.random.key(0), x)
    want = WithInterceptor().apply(variables, x)
    np.testing.assert_allclose(ejlayers.swap(WithInterceptor()).apply(variables, x), want, atol=1e-5)
