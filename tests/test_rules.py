"""Which layers rules reach, in all frameworks: tied ones by any path, rotary embeddings, parts of kernels."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import ejkernel_ops as ek
import ejlayers
from ejlayers import Rotary

WIDTH = 16
KEY = jax.random.key(0)
X = jnp.ones((2, 5, WIDTH))
SMALL, SMALLER = (ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=n)) for n in (4, 2))
TURN = ek.RotaryConfig(fwd=ek.FwdParams(blocksize_m=3))
GATED = ek.GatedLinearConfig(fwd=ek.FwdParams(blocksize_m=2))
FRAMEWORKS = ("nnx", "linen", "equinox")


class NnxModel(nnx.Module):
    def __init__(self):
        self.attention = ejlayers.nnx.Attention(WIDTH, 4, rotary=Rotary(), rngs=nnx.Rngs(0))
        self.mlp = ejlayers.nnx.GatedMLP(WIDTH, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.mlp(self.attention(x))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return ejlayers.linen.GatedMLP(8, name="mlp")(ejlayers.linen.Attention(4, rotary=Rotary(), name="attention")(x))


class EquinoxModel(eqx.Module):
    attention: ejlayers.equinox.Attention
    mlp: ejlayers.equinox.GatedMLP

    def __init__(self):
        self.attention = ejlayers.equinox.Attention(WIDTH, 4, rotary=Rotary(), key=KEY)
        self.mlp = ejlayers.equinox.GatedMLP(WIDTH, 8, key=KEY)

    def __call__(self, x):
        return jax.vmap(lambda x: self.mlp(self.attention(x)))(x)


def changed(framework, rules):
    """The model of a framework after `set_config`, and what it is called with."""
    model = {"nnx": NnxModel, "linen": LinenModel, "equinox": EquinoxModel}[framework]()
    model = ejlayers.set_config(model, rules)
    return (lambda v, x: model.apply(v, x), model.init(KEY, X), X) if framework == "linen" else (
        lambda m, x: m(x), model, X
    )  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("rule", ["**.rotary", "attention.rotary", Rotary], ids=str)
def test_a_rule_reaches_a_rotary_embedding(framework, rule):
    rows = ejlayers.explain(*changed(framework, {rule: TURN})).rows
    [turned] = {(row.path, row.config, row.source) for row in rows if row.op == "rotary_embedding@v1"}
    assert turned == ("attention.rotary", "fwd.blocksize_m=3", "heuristic+pinned")


def test_a_rotary_embedding_is_pinned_where_it_is_made_too():
    assert Rotary(config=TURN).config == TURN
    for bad in ({"config": SMALL}, {"backend": "cuda"}, {"config": ek.RotaryConfig(backend="xla"), "backend": "cudnn"}):
        with pytest.raises(ek.ConfigError, match=r"(config|backend) is"):
            Rotary(**bad)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_gate_pins_has_no_effect_and_a_rule_for_it_is_refused(framework):
    message = "rule '.*gate' has no effect: its product is part of the kernel of mlp, a GatedMLP"
    for rule in ("**.gate", "mlp.gate"):
        with pytest.raises(ek.ConfigError, match=message):
            changed(framework, {rule: SMALL})
    rows = ejlayers.explain(*changed(framework, {"mlp": GATED, "mlp.down": SMALL})).rows
    assert {row.path for row in rows if "pinned" in row.source} == {"mlp", "mlp.down"}


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_a_config_for_all_linear_layers_leaves_gates_alone_and_the_report_says_so(framework):
    made = {"nnx": NnxModel, "equinox": EquinoxModel}[framework]()
    rows = {row.path: row.note for row in ejlayers.report(ejlayers.swap(made, config=SMALL)).rows}
    assert rows["mlp.gate"] == "its product is part of the kernel of mlp, a GatedMLP"
    assert rows["mlp.down"] == "pinned: fwd.blocksize_m=4"
    with pytest.raises(ek.ConfigError, match=r"rule 'mlp.gate' has no effect"):
        ejlayers.swap(made, rules={"mlp.gate": SMALL})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_field_of_another_op_is_refused_where_it_is_pinned(framework):
    wrong = ek.LinearConfig(fwd=ek.FwdParams(q_blocksize=64))
    message = r"the rule for 'mlp.down' sets fwd.q_blocksize=64, which no back end of a LinearConfig has; they take bwd"
    with pytest.raises(ek.ConfigError, match=message):
        changed(framework, {"mlp.down": wrong})
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ek.ConfigError, match=r"config sets fwd.q_blocksize=64"):
        ejlayers.swap(model, config=wrong)
    assert type(model.layers[0]) is nnx.Linear


# Tied modules


class Tied(nnx.Module):
    def __init__(self):
        self.block = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.relu)
        self.again = self.block
        self.parts = nnx.List([self.block.layers[0], nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))])
        self.block.parent = self  # a circle

    def __call__(self, x):
        return self.again(x)


class SharedEquinox(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        layers = [eqx.nn.Linear(WIDTH, WIDTH, key=KEY) for _ in "abc"]
        self.shared = eqx.nn.Shared(layers, lambda layers: layers[2], lambda layers: layers[0])

    def __call__(self, x):
        return jax.vmap(self.shared()[2])(x)


TIED = {
    "nnx": (Tied, ["again.layers.0", "block.layers.0", "parts.0"], "parts.1"),
    "equinox": (SharedEquinox, ["shared.pytree.0", "shared.pytree.2"], "shared.pytree.1"),
}


def pins_of(model):
    return {row.path: row.note for row in ejlayers.report(model).rows}


@pytest.mark.parametrize("framework", TIED)
def test_a_rule_matches_a_tied_module_by_each_of_its_paths(framework):
    make, paths, other = TIED[framework]
    for path in paths:
        for model in (
            ejlayers.swap(make(), rules={path: SMALL}),
            ejlayers.set_config(ejlayers.swap(make()), {path: SMALL}),
        ):
            notes = pins_of(model)
            assert notes.pop(paths[0]) == "pinned: fwd.blocksize_m=4"
            assert notes == {other: ""}


@pytest.mark.parametrize("framework", TIED)
def test_rules_for_two_paths_of_one_module_have_to_agree(framework):
    make, paths, _ = TIED[framework]
    first, last = paths[0], paths[-1]
    message = f"rules '{first}' and '{last}' differ, and '{first}' and '{last}' are one module"
    for value in (SMALLER, False):
        with pytest.raises(ek.ConfigError, match=message):
            ejlayers.swap(make(), rules={first: SMALL, last: value})
    with pytest.raises(ek.ConfigError, match=message):
        ejlayers.set_config(ejlayers.swap(make()), {first: SMALL, last: SMALLER})
    notes = pins_of(ejlayers.swap(make(), rules={first: SMALL, last: SMALL}))
    assert notes[first] == "pinned: fwd.blocksize_m=4"
    notes = pins_of(ejlayers.swap(make(), rules={first: SMALL, "**": False}))  # the first that matches wins
    assert notes[first] == "pinned: fwd.blocksize_m=4"


# Pins that contradict each other


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_back_end_that_is_not_the_configs_is_an_error_before_anything_changes(framework):
    package = getattr(ejlayers, framework)
    rules = {"**": ek.LinearConfig(backend="xla")}

    def change():
        if framework == "linen":  # whose rules are tried in `init`
            return ejlayers.set_config(package.Dense(4, backend="triton"), rules).init(KEY, X)
        end = {"rngs": nnx.Rngs(0)} if framework == "nnx" else {"key": KEY}
        return ejlayers.set_config(package.Linear(WIDTH, 4, backend="triton", **end), rules)

    with pytest.raises(ek.ConfigError, match=r"backend is 'triton', but config\.backend is 'xla'"):
        change()


def test_what_a_module_of_nnx_does_not_pin_is_an_error():
    layers = [ejlayers.nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ejlayers.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0))]
    for layer in layers:
        with pytest.raises(TypeError, match="cofnig is nothing that a module pins; expected config, backend, path"):
            layer.pin(cofnig=None)
        layer.pin(backend="triton")
        with pytest.raises(ek.ConfigError, match=r"backend is 'triton', but config\.backend is 'xla'"):
            layer.pin(config=layer.config_type(backend="xla"))
        assert layer.pin(backend=None, config=layer.config_type(backend="xla")).backend is None


def test_a_config_for_a_layer_that_stays_a_stock_one_is_refused_with_the_reason():
    def model():
        custom = nnx.Linear(
            WIDTH, 4, dot_general=lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs), rngs=nnx.Rngs(0)
        )
        return nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), custom])

    with pytest.raises(ek.ConfigError, match="rule '1' has no effect: custom dot_general"):
        ejlayers.swap(model(), rules={"1": SMALL})
    swapped = ejlayers.swap(model(), rules={"*": SMALL})  # the other one takes it
    assert type(swapped[0]) is ejlayers.nnx.Linear
    assert type(ejlayers.swap(model(), rules={"1": False})[1]) is nnx.Linear
    with pytest.raises(ek.ConfigError, match="LinearConfig, which no layer takes"):
        ejlayers.swap(nnx.List([model()[1]]), config=SMALL)
