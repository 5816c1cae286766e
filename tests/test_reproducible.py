"""Whether gradients of attention are the same bits in each run: what layers say of it reaches each call."""

import copy
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import ejkernel_ops as ek
import ejlayers
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.meta import split_label

WIDTH, LENGTH = 16, 5
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, LENGTH, WIDTH))


def promised(fn, *args):
    """What each call of attention in a program says about the bits of gradients, by its kernel."""
    found = {}
    for text in ek.find_labels_in_lowered(eqx.filter_jit(fn).lower(*args)):
        op, call = split_label(text)
        if op.startswith("flash_attention"):
            inv = find_call(ek.Key(ek.device_fingerprint(), op, call))
            found.setdefault(inv.kernel.op_id, set()).add(inv.kwargs["deterministic"])
    return found


def promise(value):
    """What `promised` finds of a gradient in which each call says the same."""
    return {"flash_attention": {value}, "flash_attention_bwd": {value}}


def gradient(layer):
    """Of a function of a batch."""
    return jax.grad(lambda x: jnp.square(layer(x)).sum())


# Models of two stock layers, and what runs them


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = (nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.second(self.first(x))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("first", "second"):
            x = nn.MultiHeadDotProductAttention(4, name=name)(x)
        return x


class Equinox(eqx.Module):
    first: eqx.nn.MultiheadAttention
    second: eqx.nn.MultiheadAttention

    def __init__(self):
        self.first, self.second = (eqx.nn.MultiheadAttention(4, WIDTH, key=key) for key in jax.random.split(KEY))

    def __call__(self, x):
        for layer in (self.first, self.second):
            x = layer(x, x, x)
        return x


@functools.cache
def linen_variables():
    return jax.jit(Linen().init)(KEY, X)


def of_linen(layer):
    """A function of a batch, of a Linen module with the variables that it makes."""
    return functools.partial(layer.apply, layer.init(KEY, X))


MODELS = {  # how to make one, and what makes a function of a batch of it
    "nnx": (Nnx, lambda model: lambda x: model(x)),
    "linen": (Linen, lambda model: functools.partial(model.apply, linen_variables())),
    "equinox": (Equinox, jax.vmap),
}


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param][0]


def run(model):
    return next(call for kind, call in MODELS.values() if isinstance(model, kind))(model)


def equinox_layer(**options):
    layer = ejlayers.equinox.MultiheadAttention(4, WIDTH, key=KEY, **options)
    return jax.vmap(lambda x: layer(x, x, x))


def with_nnx_function(**options):
    attend = ejlayers.nnx.KernelAttention(**options)
    return nnx.MultiHeadAttention(4, WIDTH, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))


def with_linen_function(**options):
    return of_linen(nn.MultiHeadDotProductAttention(4, attention_fn=ejlayers.linen.KernelAttention(**options)))


LAYERS = {  # functions of a batch
    "nnx swapped": lambda **options: run(ejlayers.swap(Nnx(), **options)),
    "nnx": lambda **options: ejlayers.nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0), **options),
    "nnx Attention": lambda **options: ejlayers.nnx.Attention(WIDTH, 4, rngs=nnx.Rngs(0), **options),
    "nnx function": with_nnx_function,
    "linen swapped": lambda **options: run(ejlayers.swap(Linen(), **options)),
    "linen": lambda **options: of_linen(ejlayers.linen.MultiHeadDotProductAttention(4, **options)),
    "linen SelfAttention": lambda **options: of_linen(ejlayers.linen.SelfAttention(4, **options)),
    "linen Attention": lambda **options: of_linen(ejlayers.linen.Attention(4, **options)),
    "linen function": with_linen_function,
    "equinox swapped": lambda **options: run(ejlayers.swap(Equinox(), **options)),
    "equinox": equinox_layer,
    "equinox Attention": lambda **options: jax.vmap(ejlayers.equinox.Attention(WIDTH, 4, key=KEY, **options)),
}


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_each_call_forward_and_backward_says_what_was_asked_for_and_by_default_the_same_bits(name):
    results = {}
    for options in ({}, {"reproducible": True}, {"reproducible": False}):
        asked = options.get("reproducible", True)
        fn = gradient(LAYERS[name](**options))
        assert promised(fn, X) == promise(asked)
        results[asked] = jax.jit(fn)(X)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(results[True], results[False])  # XLA's has one order


def nnx_decoding(kind, size, **options):
    layer = kind(*size, decode=True, rngs=nnx.Rngs(0), **options)
    layer.init_cache(*((X.shape,) if kind is ejlayers.nnx.MultiHeadAttention else X.shape[:2]))
    return lambda x: nnx.clone(layer)(x)  # of its own, for it changes


def linen_decoding(kind, **options):
    layer = kind(4, decode=True, **options)
    variables = layer.init(KEY, X)
    return lambda x: layer.apply(variables, x, mutable=["cache"])


def equinox_decoding(**options):
    layer = ejlayers.equinox.Attention(WIDTH, 4, key=KEY, **options)
    return lambda x: layer(x[0], cache=layer.init_cache(LENGTH))


DECODING = {
    "nnx": functools.partial(nnx_decoding, ejlayers.nnx.MultiHeadAttention, (4, WIDTH)),
    "nnx Attention": functools.partial(nnx_decoding, ejlayers.nnx.Attention, (WIDTH, 4)),
    "linen": functools.partial(linen_decoding, ejlayers.linen.MultiHeadDotProductAttention),
    "linen Attention": functools.partial(linen_decoding, ejlayers.linen.Attention),
    "equinox Attention": equinox_decoding,
}


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("name", DECODING)
def test_a_call_with_a_cache_says_it_too(name, asked):
    assert promised(DECODING[name](reproducible=asked), X) == {"flash_attention": {asked}}


# A swapped model


def test_another_swap_changes_it_and_one_that_does_not_say_it_leaves_it(make):
    model = make()
    for asked, expected in ((False, False), (None, False), (True, True), (None, True), (False, False)):
        model = ejlayers.swap(model) if asked is None else ejlayers.swap(model, reproducible=asked)
        assert promised(gradient(run(model)), X) == promise(expected)
    config = ejlayers.AttentionConfig(backend="xla")
    for pinned in (ejlayers.set_config(model, {"**.second": config}), ejlayers.swap(model, config=config)):
        assert promised(gradient(run(pinned)), X) == promise(False)
    stock = ejlayers.report(model).revert()
    assert promised(gradient(run(stock)), X) == {}
    assert promised(gradient(run(ejlayers.swap(stock))), X) == promise(True)


COPIES = {
    "nnx": {
        "clone": nnx.clone,
        "split and merge": lambda model: nnx.merge(*nnx.split(model)),
        "deep copy": copy.deepcopy,
    },
    "linen": {
        "clone": lambda model: model.clone(),
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "deep copy": copy.deepcopy,
    },
    "equinox": {
        "flatten": lambda model: jax.tree.map(lambda x: x, model),
        "partition": lambda model: eqx.combine(*eqx.partition(model, eqx.is_array)),
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "deep copy": copy.deepcopy,
    },
}


@pytest.mark.parametrize(("framework", "how"), [(name, how) for name, hows in COPIES.items() for how in hows])
def test_copies_of_a_model_keep_it(framework, how):
    made = COPIES[framework][how](ejlayers.swap(MODELS[framework][0](), reproducible=False))
    assert promised(gradient(run(made)), X) == promise(False)


def structure(model):
    """What a jitted function is keyed by, of a model."""
    return nnx.graphdef(model) if isinstance(model, nnx.Module) else jax.tree.structure(eqx.filter(model, eqx.is_array))


@pytest.mark.parametrize("make", [Nnx, Equinox])
def test_models_that_say_the_same_are_equal_and_those_that_do_not_are_not(make):
    model = structure(ejlayers.swap(make()))
    assert structure(ejlayers.swap(ejlayers.swap(make(), reproducible=False), reproducible=True)) == model
    other = structure(ejlayers.swap(make(), reproducible=False))
    assert structure(ejlayers.swap(make(), reproducible=False)) == other
    assert other != model


def test_equal_swaps_of_a_linen_model_are_equal_and_show_it():
    models = [ejlayers.swap(Linen(), reproducible=False) for _ in range(2)]
    assert models[0] == models[1] != ejlayers.swap(Linen())
    assert "ejlayers.swap(reproducible=False)" in repr(models[0])


def arrays(model):
    """Parameters, by path."""
    if isinstance(model, nn.Module):
        tree = model.init(KEY, X)
    else:
        tree = nnx.to_pure_dict(nnx.state(model, nnx.Param)) if isinstance(model, nnx.Module) else model
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves if eqx.is_array(x)}


def test_parameters_are_those_of_the_stock_model(make):
    stock, ours = arrays(make()), arrays(ejlayers.swap(make(), reproducible=False))
    assert stock.keys() == ours.keys()
    for path, x in stock.items():
        np.testing.assert_array_equal(ours[path], x)


def test_one_layer_alone_can_say_it():
    tree = ejlayers.swap(Nnx())
    tree.first.pin(reproducible=False)
    module = ejlayers.swap(Equinox())
    module = eqx.tree_at(lambda m: m.first, module, replace_fn=lambda layer: layer.pin(reproducible=False))
    for model in (tree, module):
        notes = {row.path: row.note for row in ejlayers.report(model).rows}
        assert (notes["first"], notes["second"]) == ("pinned: reproducible=False", "")
        assert promised(gradient(run(model)), X) == {op: {True, False} for op in promise(None)}
    assert vars(tree.first.pin(reproducible=True)).keys() == vars(tree.second).keys()


def test_the_report_of_a_linen_model_says_it():
    rows = ejlayers.report(ejlayers.swap(Linen(), reproducible=False), linen_variables(), X).rows
    assert {row.path: row.note for row in rows if row.path in ("first", "second")} == dict.fromkeys(
        ("first", "second"), "pinned: reproducible=False"
    )


# In training


def test_a_train_state_of_linen_takes_it_in_the_midst_of_training():
    state = TrainState.create(apply_fn=Linen().apply, params=linen_variables()["params"], tx=optax.adam(1e-3))
    state = ejlayers.swap(state, reproducible=False)
    assert promised(gradient(lambda x: state.apply_fn({"params": state.params}, x)), X) == promise(False)
    state = ejlayers.swap(state, reproducible=True)
    assert promised(gradient(lambda x: state.apply_fn({"params": state.params}, x)), X) == promise(True)


@eqx.filter_grad
def equinox_gradient(model):
    return jnp.square(jax.vmap(model)(X)).mean()


def test_a_model_of_equinox_and_its_optimizer_state_take_it_together():
    optimizer, model = optax.adam(1e-3), Equinox()
    pair = model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for asked in (False, True):
        model, state = pair = ejlayers.swap(pair, reproducible=asked)
        assert promised(lambda model: equinox_gradient(model), model) == promise(asked)
        optimizer.update(equinox_gradient(model), state)  # an error where the trees differ


def test_a_jitted_step_of_nnx_retraces_once_and_its_optimizer_goes_on():
    model, traced = ejlayers.swap(Nnx()), []
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        traced.append(model.first.reproducible)
        optimizer.update(model, nnx.grad(lambda model: jnp.square(model(X)).mean())(model))

    for asked in (True, False, False, True):
        step(ejlayers.swap(model, reproducible=asked), optimizer)
    assert traced == [True, False]  # the last one is known
    assert optimizer.step[...] == 4


# Errors


BAD = [(name, bad) for name in LAYERS for bad in (1, "any", np.True_, None)]


@pytest.mark.parametrize(("name", "bad"), [(n, bad) for n, bad in BAD if not (bad is None and "swapped" in n)], ids=str)
def test_what_is_no_bool_is_refused(name, bad):
    with pytest.raises(
        TypeError, match=r"reproducible is .*; expected True, for gradients of the same bits in each run"
    ):
        LAYERS[name](reproducible=bad)


def test_what_is_no_bool_is_refused_where_a_layer_pins_it():
    for layer in (ejlayers.swap(Nnx()).first, ejlayers.swap(Equinox()).first):
        with pytest.raises(TypeError, match="reproducible is 0; expected True"):
            layer.pin(reproducible=0)
    with pytest.raises(TypeError, match="reproducible is nothing that a module pins; expected config, backend"):
        ejlayers.nnx.Linear(3, 4, rngs=nnx.Rngs(0)).pin(reproducible=False)


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_none_of_whose_attention_takes_it_is_refused(asked):
    message = f"reproducible is {asked}, which only layers of attention take, and none can be replaced; leave it out"
    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ek.ConfigError, match=message):
        ejlayers.swap(linear, reproducible=asked)
    assert type(linear) is nnx.Linear
    with pytest.raises(ek.ConfigError, match=message):
        ejlayers.swap(Equinox(), rules={"**": False}, reproducible=asked)
    with pytest.raises(ek.ConfigError, match=message):
        ejlayers.swap(nn.Dense(3), reproducible=asked).init(KEY, X)
