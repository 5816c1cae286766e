"""Layers for Equinox, and what is done around a model: swap, report, tune, explain, check, set_config."""

import functools
import io
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejkernel_ops as ek
import ejlayers

from .ops import kernels_of

WIDTH, LENGTH = 16, 9
KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
OURS = ejlayers.equinox
BLOCK = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4))


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: typing.Callable

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 32, key=keys[1])
        self.down = eqx.nn.Linear(32, WIDTH, use_bias=False, key=keys[2])
        self.activation = jax.nn.gelu

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.down)(self.activation(jax.vmap(self.up)(x)))


class Model(eqx.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, 3)
        self.blocks = [Block(k) for k in keys]
        self.head = eqx.nn.Linear(WIDTH, 8, key=last)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def model(seed=0):
    return Model(jax.random.key(seed))


TX = optax.adam(1e-2)


def start(m):
    return TX.init(eqx.filter(m, eqx.is_inexact_array))


@eqx.filter_value_and_grad
def loss_and_grads(m, x):
    return jnp.square(jax.vmap(m)(x)).mean()


@eqx.filter_jit
def step(m, state, x):
    loss, grads = loss_and_grads(m, x)
    updates, state = TX.update(grads, state, m)
    return eqx.apply_updates(m, updates), state, loss


def same_leaves(a, b):
    a, b = (jax.tree_util.tree_leaves_with_path(t) for t in (a, b))
    assert [path for path, _ in a] == [path for path, _ in b]
    for (_, x), (_, y) in zip(a, b):
        assert type(x) is type(y)
        assert np.array_equal(x, y)


# Layers

LAYERS = {
    "linear": ("Linear", (WIDTH, 8), {"key": KEY}, (WIDTH,)),
    "linear without bias": ("Linear", (WIDTH, 8, False), {"key": KEY}, (WIDTH,)),
    "linear of a scalar": ("Linear", ("scalar", 8), {"key": KEY}, ()),
    "linear to a scalar": ("Linear", (WIDTH, "scalar"), {"key": KEY}, (WIDTH,)),
    "layer norm": ("LayerNorm", (WIDTH,), {}, (WIDTH,)),
    "layer norm of two axes": ("LayerNorm", ((3, WIDTH),), {"eps": 1e-3}, (3, WIDTH)),
    "layer norm alone": ("LayerNorm", (WIDTH, 1e-5, False, False), {}, (WIDTH,)),
    "rms norm": ("RMSNorm", (WIDTH,), {"eps": 1e-3}, (WIDTH,)),
    "rms norm of two axes": ("RMSNorm", ((3, WIDTH),), {"use_bias": False}, (3, WIDTH)),
    "rotary embedding": ("RotaryPositionalEmbedding", (WIDTH,), {}, (LENGTH, WIDTH)),
    "attention": ("MultiheadAttention", (4, WIDTH), {"key": KEY}, ((LENGTH, WIDTH),) * 3),
    "attention of other sizes": (
        "MultiheadAttention", (4, WIDTH, 6, 5, 7, 3, 10),
        {"use_query_bias": True, "use_value_bias": True, "use_output_bias": True, "key": KEY},
        ((LENGTH, WIDTH), (4, 6), (4, 5)),
    ),
}  # fmt: skip


def made(name, **types):
    """The stock layer, ours, and inputs for each of its arguments."""
    cls, args, kwargs, shapes = LAYERS[name]
    layers = [getattr(module, cls)(*args, **kwargs, **types) for module in (eqx.nn, OURS)]
    shapes = shapes if shapes and isinstance(shapes[0], tuple) else (shapes,)
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return *layers, [jax.random.normal(k, s) for k, s in zip(keys, shapes)]


@pytest.mark.parametrize("name", LAYERS)
def test_same_key_gives_the_same_leaves_and_results(name):
    stock, ours, inputs = made(name)
    assert isinstance(ours, type(stock))
    same_leaves(stock, ours)
    report = ejlayers.check(stock, ours, *inputs)
    assert report.output_abs < 1e-5
    assert report.grad_rel < 1e-4
    assert len(kernels_of(lambda layer, *xs: layer(*xs), ours, *inputs)) == 1  # children of attention are not swapped


@pytest.mark.parametrize("name", LAYERS)
def test_results_have_the_types_of_the_stock_layer(name):
    for types in ({}, {"dtype": jnp.bfloat16}):
        stock, ours, inputs = made(name, **types)
        for dtype in (jnp.float32, jnp.bfloat16):
            want, got = (layer(*(x.astype(dtype) for x in inputs)) for layer in (stock, ours))
            assert got.dtype == want.dtype
            np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", LAYERS)
def test_each_stock_layer_swaps_and_goes_back(name):
    stock, ours, inputs = made(name)
    swapped = ejlayers.swap(stock)
    assert type(swapped) is type(ours)
    assert type(stock) is not type(ours)
    np.testing.assert_allclose(swapped(*inputs), stock(*inputs), atol=1e-5)
    for back in (ejlayers.report(swapped).revert(), ejlayers.report(swapped).original()):
        assert jax.tree.structure(back) == jax.tree.structure(stock)
        same_leaves(back, stock)


@pytest.mark.parametrize("name", LAYERS)
def test_leaves_of_one_are_read_into_the_other(name):
    stock, ours, inputs = made(name)
    for source, target in ((stock, ours), (ours, stock)):
        file, like = io.BytesIO(), jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, target)
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        read = eqx.tree_deserialise_leaves(file, like)
        assert type(read) is type(target)
        np.testing.assert_allclose(read(*inputs), source(*inputs), atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_is_one_kernel_call_with_one_gradient(name):
    _, layer, inputs = made(name)
    batch = [jnp.stack([x, 2 * x, 3 * x]) for x in inputs]
    nested = [jnp.stack([x, 4 * x]) for x in batch]
    for xs, run in ((batch, jax.vmap), (nested, lambda f: jax.vmap(jax.vmap(f)))):
        want = [layer(*one) for one in zip(*(x.reshape(-1, *i.shape) for x, i in zip(xs, inputs)))]
        got = run(layer)(*xs)
        np.testing.assert_allclose(got.reshape(-1, *want[0].shape), jnp.stack(want), rtol=1e-5, atol=1e-5)

        def loss(both, run=run):
            return jnp.square(run(both[0])(*both[1])).sum()

        counts = kernels_of(eqx.filter_grad(loss), (layer, xs))
        forward = next(op for op in counts if not op.endswith("_bwd"))
        assert counts == {forward: 1, f"{forward}_bwd": 1}


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("layer norm alone", "rotary embedding")])
def test_an_ensemble_has_parameters_for_each_example(name):
    stock, ours, inputs = made(name)
    grown = [jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]) if eqx.is_array(x) else x, m) for m in (stock, ours)]
    axes = eqx.if_array(0)
    run = eqx.filter_vmap(lambda layer, xs: layer(*xs), in_axes=(axes, None))
    grad = eqx.filter_vmap(eqx.filter_grad(lambda layer, xs: jnp.square(layer(*xs)).sum()), in_axes=(axes, None))
    for fn in (run, grad):
        for want, got in zip(*(jax.tree.leaves(eqx.filter(fn(m, inputs), eqx.is_array)) for m in grown)):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_the_weight_is_copied_into_no_other_layout():
    layer = OURS.Linear(WIDTH, WIDTH, key=KEY)
    text = jax.jit(jax.vmap(layer)).lower(X[0]).as_text()
    assert "transpose" not in text


def test_only_trainable_weights_have_gradients():
    """As with LoRA: a frozen layer passes a gradient on, and makes none of its weight."""
    layers = tuple(OURS.Linear(WIDTH, n, key=KEY) for n in (WIDTH, 8))

    def products(trainable):
        def loss(params, rest, x):
            first, second = eqx.combine(params, rest)
            return jnp.square(jax.vmap(second)(jax.vmap(first)(x))).sum()

        mask = eqx.tree_at(lambda m: m[trainable].weight, jax.tree.map(lambda _: False, layers), True)
        params, rest = eqx.partition(layers, mask)
        return eqx.filter_jit(eqx.filter_grad(loss)).lower(params, rest, X[0]).as_text().count("stablehlo.dot_general")

    assert products(1) == 3  # two forward, one weight gradient
    assert products(0) == 4  # and the gradient that the second layer passes on


def test_everything_is_fine_under_the_filtered_transformations():
    stock, ours = model(), ejlayers.swap(model())

    def run(m, x):
        for block in m.blocks:
            x = eqx.filter_checkpoint(block)(x)
        return jax.vmap(m.head)(x)

    calls = {
        "jit": eqx.filter_jit(lambda m: m(X[0])),
        "vmap": lambda m: eqx.filter_vmap(m)(X),
        "grad": eqx.filter_jit(lambda m: jax.tree.leaves(eqx.filter_grad(lambda m: m(X[0]).sum())(m))),
        "checkpoint": eqx.filter_jit(lambda m: jax.tree.leaves(eqx.filter_grad(lambda m: run(m, X[0]).sum())(m))),
        "combine": lambda m: eqx.combine(*eqx.partition(m, eqx.is_array))(X[0]),
    }
    for name, call in calls.items():
        for a, b in zip(jax.tree.leaves(call(stock)), jax.tree.leaves(call(ours))):
            np.testing.assert_allclose(a, b, atol=1e-4, err_msg=name)
    assert eqx.filter_eval_shape(ours, X[0]).shape == (LENGTH, 8)


@pytest.mark.parametrize(("make", "x", "message"), [
    (lambda: OURS.Linear(4, 5, key=KEY), (2, 4), r"x has shape \(2, 4\); expected \(4,\): .* use jax\.vmap"),
    (lambda: OURS.Linear("scalar", 5, key=KEY), (1,), r"x has shape \(1,\); expected \(\)"),
    (lambda: OURS.LayerNorm(4), (2, 4), r"x has shape \(2, 4\); expected \(4,\): .* use jax\.vmap"),
    (lambda: OURS.RMSNorm((2, 4)), (4,), r"x has shape \(4,\); expected \(2, 4\)"),
    (lambda: OURS.RotaryPositionalEmbedding(4), (2, 3, 4), r"x has shape \(2, 3, 4\); expected \(length, 4\)"),
    (lambda: OURS.RotaryPositionalEmbedding(4), (3, 6), r"x has shape \(3, 6\); expected \(length, 4\)"),
])  # fmt: skip
def test_other_shapes_are_refused_as_by_the_stock_layer(make, x, message):
    with pytest.raises(ValueError, match=message):
        make()(jnp.ones(x))


@pytest.mark.parametrize("make", [
    functools.partial(OURS.Linear, 4, 4, key=KEY), functools.partial(OURS.LayerNorm, 4),
    functools.partial(OURS.RotaryPositionalEmbedding, 4), functools.partial(OURS.MultiheadAttention, 2, 4, key=KEY),
    functools.partial(OURS.Attention, 8, 2, key=KEY), functools.partial(OURS.LMHead, 4, 4, key=KEY),
])  # fmt: skip
def test_bad_configs_are_refused_where_the_layer_is_made_or_changed(make):
    layer = make()
    for bad in (
        {"config": 3}, {"backend": "cuda"}, {"config": layer.config_type(backend="xla"), "backend": "triton"},
    ):  # fmt: skip
        with pytest.raises(ek.ConfigError, match=r"(config|backend) is"):
            make(**bad)
        with pytest.raises(ek.ConfigError, match=r"(config|backend) is"):
            layer.pin(**bad)
    with pytest.raises(ek.ConfigError, match=r"backend is 'triton', but config.backend is 'xla'"):
        make(backend="triton").pin(config=layer.config_type(backend="xla"))
    with pytest.raises(TypeError, match="tile is nothing that a module pins; expected config, backend, path"):
        layer.pin(tile=3)
    assert layer.pin(backend="xla").backend == "xla"
    assert layer.backend is None


def test_what_no_kernel_takes_computes_as_the_stock_layer():
    stock, ours = (module.Linear(3, 4, dtype=jnp.complex64, key=KEY) for module in (eqx.nn, OURS))
    x = jnp.array([1, 2j, 3])
    np.testing.assert_array_equal(stock(x), ours(x))
    assert ejlayers.report(ejlayers.swap(stock)).rows[0].note == "weight is complex64"
    whole = jnp.array([1, 2, 3])
    for cls, args, kwargs in (("Linear", (3, 2), {"key": KEY}), ("LayerNorm", (3,), {})):
        stock, ours = (getattr(module, cls)(*args, **kwargs) for module in (eqx.nn, OURS))
        np.testing.assert_array_equal(stock(whole), ours(whole))


# Norms and rotary embedding


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_norm_gives_the_state_back_that_it_is_given(name):
    layer, state = getattr(OURS, name)(WIDTH), object()
    out, after = layer(X[0, 0], state)
    assert after is state
    np.testing.assert_array_equal(out, layer(X[0, 0], key=KEY))
    assert layer(X[0, 0], None)[1] is None


def test_layer_norm_is_right_where_the_mean_is_great():
    x = 2000 + jax.random.normal(jax.random.key(0), (512,))
    assert abs(float(OURS.LayerNorm(512)(x).std()) - 1) < 1e-3


def turned(x, positions, theta):
    """Halves of the features as complex numbers, turned."""
    half = x.shape[-1] // 2
    z = np.asarray(x[..., :half] + 1j * x[..., half:])
    z = z * np.exp(1j * np.outer(positions, theta ** (-np.arange(half) / half)))
    return np.concatenate([z.real, z.imag], -1)


def test_each_rotary_embedding_has_its_own_theta():
    """The stock layer takes that of the first one of its size."""
    layers = [OURS.RotaryPositionalEmbedding(WIDTH, theta) for theta in (10000.0, 500.0)]
    for layer in layers:
        np.testing.assert_allclose(layer(X[0]), turned(X[0], np.arange(LENGTH), layer.theta), atol=1e-5)


def test_positions_start_at_the_offset():
    layer = OURS.RotaryPositionalEmbedding(WIDTH)
    run = jax.jit(lambda x, n: layer(x, offset=n))
    for offset in (0, 5, np.int32(700)):
        want = turned(X[0], offset + np.arange(LENGTH), 10000.0)
        np.testing.assert_allclose(layer(X[0], offset=offset), want, atol=1e-4)
        np.testing.assert_allclose(run(X[0], offset), want, atol=1e-4)
    each = jax.vmap(lambda x, n: layer(x, offset=n))
    np.testing.assert_allclose(each(X, jnp.array([3, 5]))[1], layer(X[1], offset=5), atol=1e-5)
    assert kernels_of(each, X, jnp.array([3, 5])) == {"rotary_embedding": 1}
    with pytest.raises(TypeError, match="offset is float32; expected an integer"):
        layer(X[0], offset=1.0)
    with pytest.raises(ValueError, match=r"offset has shape \(2,\); expected one integer"):
        layer(X[0], offset=jnp.array([3, 5]))


# Attention

CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
BY_HEAD = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.7, (4, LENGTH, LENGTH))) | np.eye(LENGTH, dtype=bool)


def rotated(query, key, value):
    turn = jax.vmap(eqx.nn.RotaryPositionalEmbedding(4), 1, 1)
    return turn(query), turn(key), value


ATTENTION = {
    "mask": {"mask": CAUSAL},
    "mask by head": {"mask": BY_HEAD},
    "ints as a mask": {"mask": CAUSAL.astype(int)},
    "heads in process": {"process_heads": rotated, "mask": CAUSAL},
    "inference": {"inference": True},
    "key without dropout": {"key": KEY, "inference": True},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_honours_every_argument(name):
    call = ATTENTION[name]
    stock, ours = (m.MultiheadAttention(4, WIDTH, dropout_p=0.5, inference=True, key=KEY) for m in (eqx.nn, OURS))
    np.testing.assert_allclose(ours(X[0], X[1], X[1], **call), stock(X[0], X[1], X[1], **call), atol=1e-5)
    batch = jax.vmap(lambda x: ours(x, x, x, **call))
    assert kernels_of(lambda x: batch(x), X) == {"flash_attention": 1}


def test_each_example_may_have_its_own_mask():
    layer, masks = OURS.MultiheadAttention(4, WIDTH, key=KEY), jnp.stack([CAUSAL, CAUSAL.T])
    batch = jax.vmap(lambda x, mask: layer(x, x, x, mask))
    want = [layer(x, x, x, mask) for x, mask in zip(X, masks)]
    np.testing.assert_allclose(batch(X, masks), jnp.stack(want), atol=1e-5)
    assert kernels_of(lambda x, masks: batch(x, masks), X, masks) == {"flash_attention": 1}


def test_a_query_that_sees_no_key_gives_0_and_no_gradient():
    layer = OURS.MultiheadAttention(4, WIDTH, key=KEY)
    mask = jnp.asarray(CAUSAL).at[3].set(False)
    out, pull = jax.vjp(lambda x: layer(x, X[0], X[0], mask), X[0])
    assert not jnp.any(out[3])
    assert not jnp.any(pull(jnp.ones_like(out))[0][3])


def test_the_deprecated_name_of_inference_warns_and_counts():
    layer = OURS.MultiheadAttention(4, WIDTH, dropout_p=0.5, key=KEY)
    with pytest.warns(UserWarning, match="deterministic= is deprecated"):
        out = layer(X[0], X[0], X[0], deterministic=True)
    np.testing.assert_array_equal(out, layer(X[0], X[0], X[0], inference=True))


@pytest.mark.parametrize(("inputs", "call", "message"), [
    ((X, X, X), {}, r"query has shape \(2, 9, 16\); expected \(length, size\): for a batch use jax.vmap"),
    ((X[0], X[0], X[0, :3]), {}, "key_ has 9 tokens and value 3; expected as many"),
    ((X[0],) * 3, {"mask": CAUSAL[0]}, r"mask has shape \(9,\); expected \(9, 9\), or by head \(4, 9, 9\)"),
    ((X[0],) * 3, {"inference": False}, "key is None and dropout is on, with p=0.5; pass a PRNG key, or inference"),
    ((X[0],) * 3, {"process_heads": lambda q, k, v: (q[:1], k, v)}, r"made queries of shape \(1, 4, 4\); expected"),
])  # fmt: skip
def test_bad_arguments_of_attention_are_refused(inputs, call, message):
    layer = OURS.MultiheadAttention(4, WIDTH, dropout_p=0.5, inference=True, key=KEY)
    with pytest.raises(ValueError, match=message):
        layer(*inputs, **call)


def test_dropout_differs_by_key_example_and_head_and_keeps_the_mean():
    layer = OURS.MultiheadAttention(4, WIDTH, dropout_p=0.4, key=KEY)
    draw = jax.jit(jax.vmap(lambda key: layer(X[0], X[0], X[0], key=key)))
    outs = draw(jax.random.split(jax.random.key(1), 600))
    assert len(np.unique(np.asarray(outs)[:, 0, 0])) > 590
    np.testing.assert_allclose(outs.mean(0), layer(X[0], X[0], X[0], inference=True), atol=0.08)
    kept = weights_kept(OURS.MultiheadAttention(2, LENGTH, qk_size=1, vo_size=LENGTH, dropout_p=0.4, key=KEY))
    assert abs(kept.mean() - 0.6) < 0.12
    assert np.any(kept[0] != kept[1])


class Kept(eqx.Module):
    """In place of the last projection: the outputs of the heads as they are."""

    def __call__(self, x):
        return x


def weights_kept(layer):
    """Which probabilities each head keeps: values are unit vectors, and outputs those of the heads."""
    eye = jnp.eye(LENGTH)

    def process(query, key, value):
        return 0 * query, key, jnp.broadcast_to(eye[:, None], value.shape)

    out = eqx.tree_at(lambda m: m.output_proj, layer, Kept())(eye, eye, eye, key=KEY, process_heads=process)
    return np.asarray(out.reshape(LENGTH, 2, LENGTH).swapaxes(0, 1) > 0)


def test_inference_mode_turns_dropout_off():
    layer = eqx.nn.inference_mode(OURS.MultiheadAttention(4, WIDTH, dropout_p=0.5, key=KEY))
    assert np.all(np.isfinite(layer(X[0], X[0], X[0])))


def test_dropout_of_a_traced_probability_runs_as_the_stock_layer():
    stock, ours = (m.MultiheadAttention(4, WIDTH, dropout_p=0.5, key=KEY) for m in (eqx.nn, OURS))
    run = eqx.filter_jit(lambda m, p: eqx.tree_at(lambda m: m.dropout.p, m, p)(X[0], X[0], X[0], key=KEY))
    np.testing.assert_allclose(run(ours, jnp.array(0.3)), run(stock, jnp.array(0.3)), atol=1e-6)


# swap and report


def test_swap_leaves_the_model_alone_and_training_goes_as_before():
    m, twin = model(), model()
    swapped = ejlayers.swap(m)
    assert jax.tree.structure(m) == jax.tree.structure(twin)
    assert type(swapped.head) is OURS.Linear
    assert swapped.head.weight is m.head.weight
    assert swapped.blocks[0].activation is m.blocks[0].activation
    same_leaves(m, swapped)
    losses = []
    for each in (twin, swapped):
        state = start(each)
        for _ in range(5):
            each, state, loss = step(each, state, X)
            losses.append(float(loss))
    np.testing.assert_allclose(losses[:5], losses[5:], atol=1e-5)


def test_swapping_twice_is_swapping_once():
    once = ejlayers.swap(model(), config=BLOCK)
    assert jax.tree.structure(ejlayers.swap(once)) == jax.tree.structure(once)
    assert all(row.replaced for row in ejlayers.report(once).rows)


def test_revert_and_original_are_stock_again():
    m = ejlayers.swap(model(), config=BLOCK)
    for stock in (ejlayers.report(m).original(), ejlayers.report(m).revert()):
        assert jax.tree.structure(stock) == jax.tree.structure(model())
        assert stock.head.weight is m.head.weight
    assert m.head.config == BLOCK


def test_subclasses_are_skipped_with_a_reason_and_rules_are_remembered():
    class Special(eqx.nn.Linear):
        pass

    m = eqx.tree_at(lambda m: m.head, model(), Special(WIDTH, 8, key=KEY))
    m = ejlayers.swap(m, rules={"blocks.0.up": False})
    trained, _, _ = step(m, start(m), X)
    for later in (m, m, trained, eqx.tree_at(lambda m: m.blocks[1].up.weight, m, jnp.ones((32, WIDTH)))):
        found = {row.path: row for row in ejlayers.report(later).rows}
        assert found["blocks.0.up"].note == "a rule says so, or it came after the swap"
        assert "a subclass" in found["head"].note
        assert found["blocks.1.attention.query_proj"].replaced
        ejlayers.report(later).original()  # which forgets nothing about the model
    assert {row.note for row in ejlayers.report(model()).rows} == {"not swapped"}


def test_rules_choose_by_path_and_type_and_the_first_wins():
    rules = {"blocks.*.up": BLOCK, "blocks.1.**": False, eqx.nn.MultiheadAttention: True, "head": False}
    m = ejlayers.swap(model(), rules=rules)
    found = {row.path: (row.replaced, row.note) for row in ejlayers.report(m).rows}
    assert found["blocks.0.up"] == (True, "pinned: fwd.blocksize_m=4")
    assert found["blocks.1.up"][0]
    assert found["blocks.1.attention"] == found["head"] == (False, "a rule says so, or it came after the swap")
    assert found["blocks.0.attention"] == (True, "")
    back = ejlayers.swap(m, rules={"blocks.0.up": False})
    assert type(back.blocks[0].up) is eqx.nn.Linear
    with pytest.raises(ek.ConfigError, match=r"'blocks\.0\.upp' matches no layer.*did you mean 'blocks\.0\.up'"):
        ejlayers.swap(model(), rules={"blocks.0.upp": True})
    with pytest.raises(ek.ConfigError, match="expected a AttentionConfig"):
        ejlayers.swap(model(), rules={"**.attention": BLOCK})


@pytest.mark.parametrize("rules", [None, {"**.up": False, "**.down": BLOCK}])
def test_a_model_is_swapped_in_the_midst_of_training_with_its_optimizer_state(rules):
    m, losses = model(), []
    state = start(m)
    for _ in range(3):
        m, state, _ = step(m, state, X)
    for pair in ((m, state), ejlayers.swap((m, state), rules=rules)):
        found = []
        for _ in range(3):
            *pair, loss = step(*pair, X)
            found.append(float(loss))
        losses.append(found)
    assert type(pair[0].head) is type(pair[1][0].nu.head) is OURS.Linear
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][0] > losses[0][2]


def test_an_optimizer_state_follows_its_model_where_its_own_arrays_are_others():
    m = eqx.tree_at(lambda m: m.head.weight, model(), jnp.ones((8, WIDTH), jnp.int8))  # which has no kernel
    swapped, state = ejlayers.swap((m, start(m)))
    assert type(swapped.head) is type(state[0].mu.head) is eqx.nn.Linear
    small = jax.tree.map(lambda x: x.astype(jnp.int8) if eqx.is_inexact_array(x) else x, start(model()))
    swapped, state = ejlayers.swap((model(), small))
    assert type(swapped.head) is type(state[0].mu.head) is OURS.Linear


def test_abstract_models_swap():
    abstract = ejlayers.swap(eqx.filter_eval_shape(model))
    assert type(abstract.head) is OURS.Linear
    assert isinstance(abstract.head.weight, jax.ShapeDtypeStruct)
    assert eqx.filter_eval_shape(lambda m, x: m(x), abstract, X[0]).shape == (LENGTH, 8)


def test_stacked_models_swap_and_scan():
    plain = eqx.filter_vmap(Block)(jax.random.split(KEY, 3))
    stacked = ejlayers.swap(plain)

    def run(blocks, x):
        arrays, rest = eqx.partition(blocks, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (eqx.combine(layer, rest)(x), None), x, arrays)[0]

    np.testing.assert_allclose(run(stacked, X[0]), run(plain, X[0]), atol=1e-5)
    rows = ejlayers.explain(eqx.filter_jit(run), stacked, X[0]).rows
    projections = [f"attention.{name}_proj" for name in ("query", "key", "value", "output")]
    assert {(r.path, r.op, r.executions) for r in rows} == {
        ("norm", "layer_norm@v1", 3), ("attention", "flash_attention@v1", 3),
        *((path, "linear@v1", 3) for path in ("up", "down", *projections)),
    }  # fmt: skip


def test_models_of_every_kind_of_node_swap():
    class Pair(typing.NamedTuple):
        first: eqx.Module
        second: None

    class Checked(eqx.Module):
        inner: eqx.nn.Linear
        size: int = eqx.field(static=True)

        def __check_init__(self):
            assert type(self.inner) is eqx.nn.Linear, "a constructor ran again"

    def linear():
        return eqx.nn.Linear(4, 4, key=KEY)

    class All(eqx.Module):
        tree: dict
        batch_norm: eqx.nn.BatchNorm
        still: eqx.Module = eqx.field(static=True)
        function: typing.Callable

    tree = {"pair": Pair(linear(), None), "tuple": (linear(), [Checked(linear(), 4)]), "none": None}
    batch_norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
    m = All({"all": tree, "text": "text"}, batch_norm, eqx.nn.Identity(), jnp.tanh)
    swapped = ejlayers.swap(m)
    assert [row.path for row in ejlayers.report(swapped).rows if row.replaced] == [
        "tree.all.pair.first", "tree.all.tuple.0", "tree.all.tuple.1.0.inner",
    ]  # fmt: skip
    assert swapped.batch_norm is m.batch_norm
    assert swapped.still is m.still
    assert swapped.tree["text"] == "text"
    assert jax.tree.structure(ejlayers.report(swapped).original()) == jax.tree.structure(m)


def test_tied_embeddings_stay_tied():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            pair = (eqx.nn.Embedding(11, WIDTH, key=key), eqx.nn.Linear(WIDTH, 11, use_bias=False, key=key))
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, tokens):
            embedding, linear = self.shared()
            return jax.vmap(linear)(jax.vmap(embedding)(tokens))

    stock, tokens = Tied(KEY), jnp.arange(5)
    ours = ejlayers.swap(stock)
    assert ejlayers.report(ours).rows[0].replaced
    assert len(jax.tree.leaves(eqx.filter(ours, eqx.is_array))) == 1
    np.testing.assert_allclose(ours(tokens), stock(tokens), atol=1e-5)
    state = optax.adam(1e-3).init(eqx.filter(stock, eqx.is_inexact_array))  # which has no `where` any more
    both, moved = ejlayers.swap((stock, state))
    np.testing.assert_allclose(both(tokens), stock(tokens), atol=1e-5)
    _, mask = ejlayers.swap((stock, jax.tree.map(eqx.is_inexact_array, stock)))
    assert jax.tree.structure(mask) == jax.tree.structure(both)
    assert jax.tree.structure(moved[0].mu) == jax.tree.structure(eqx.filter(both, eqx.is_inexact_array))


def test_what_is_no_model_is_refused():
    with pytest.raises(ek.ConfigError, match=r"expected a .*equinox\.Module"):
        ejlayers.swap({"a": 1})


# check, explain, set_config, tune


def test_check_sees_a_difference():
    a, b = model(), ejlayers.swap(model())
    assert ejlayers.check(b, X[0]).output_abs < 1e-5
    b = eqx.tree_at(lambda m: m.head.bias, b, b.head.bias + 0.5)
    assert 0.4 < ejlayers.check(a, b, X[0]).output_abs < 0.6


def test_explain_has_paths_and_sources_and_leaves_labels_alone():
    pinned = ek.LinearConfig(fwd=ek.FwdParams(blocksize_m=4), bwd=ek.BwdParams(blocksize_m=8))
    m = ejlayers.set_config(ejlayers.swap(model()), {"blocks.0.up": pinned})
    state = start(m)
    report = ejlayers.explain(step, m, state, X)
    rows = {(r.path, r.op): r for r in report.rows}
    assert len(rows) == len(report.rows) == 34  # seventeen layers, forward and backward
    assert rows["blocks.0.up", "linear@v1"].config == "fwd.blocksize_m=4"
    assert rows["blocks.0.up", "linear@v1"].source == "heuristic+pinned"  # the back end was not pinned
    assert rows["blocks.0.up", "linear_bwd@v1"].config == "bwd.blocksize_m=8"
    assert rows["blocks.1.up", "linear@v1"].source == "heuristic"
    assert all(r.count == 1 for r in report.rows)
    assert {r.label for r in report.rows} == set(ek.find_labels_in_lowered(step.lower(m, state, X)))


def test_explain_tells_models_of_several_classes_apart():
    generator, critic = ejlayers.swap(model()), OURS.Linear(8, 3, key=KEY)

    @eqx.filter_jit
    def both(generator, states, critic, x):
        grads = eqx.filter_grad(lambda pair: jax.vmap(pair[1])(pair[0](x)).sum())((generator, critic))
        return [TX.update(g, s)[0] for g, s in zip(grads, states)]

    args = generator, (start(generator), start(critic)), critic, X[0]
    paths = [row.path for row in ejlayers.explain(both, *args).rows]
    assert {"blocks.0.up", "head", "0.2"} <= set(paths)


def test_pinned_config_beats_a_result_and_does_not_leak():
    m = ejlayers.set_config(ejlayers.swap(model()), {"blocks.0.up": BLOCK})
    result = ejlayers.tune(eqx.filter_jit(lambda m, x: m(x)), m, X[0], selector=quick(), whole_step=False)
    other = ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=5))
    overlay = {
        ek.Key(result.device, "linear@v1", e.call_key): other for e in result.entries if e.op_id_v == "linear@v1"
    }
    with ek.overlay_cache(overlay):
        rows = {r.path: r for r in ejlayers.explain(eqx.filter_jit(lambda m, x: m(x)), m, X[0]).rows}
    assert rows["blocks.0.up"].config == "fwd.blocksize_m=4"
    assert rows["blocks.1.up"].config == "fwd.blocksize_m=5"


def test_changing_a_config_retraces_once_and_the_optimizer_goes_on():
    m, traces = ejlayers.swap(model()), []
    state = start(m)

    @eqx.filter_jit
    def counted(m, state, x):
        traces.append(1)
        return step(m, state, x)

    m, state, _ = counted(m, state, X)
    changed = ejlayers.set_config(m, {"head": BLOCK})
    with pytest.raises(ValueError, match="metadata"):  # of the state, which has the old config
        counted(changed, state, X)
    for _ in range(2):  # equal content: no further trace
        m, state = ejlayers.set_config((m, state), {"**.head": BLOCK})
        m, state, loss = counted(m, state, X)
    assert m.head.config == state[0].mu.head.config == BLOCK
    assert np.isfinite(loss)
    assert len(traces) == 3
    assert ejlayers.set_config(m, {"head": None}).head.config is None
    with pytest.raises(ek.ConfigError, match="matches no layer"):
        ejlayers.set_config((m, state), {"**.heat": BLOCK})


def quick():
    return ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=1))


def test_tune_takes_every_kind_of_step():
    m = ejlayers.swap(model())
    state, chain = start(m), quick()
    result = ejlayers.tune(step, m, state, X, selector=chain)
    assert sorted({e.op_id_v for e in result.entries}) == [
        f"{op}{way}@v1" for op in ("flash_attention", "layer_norm", "linear") for way in ("", "_bwd")
    ]
    assert sum(e.count for e in result.entries if e.op_id_v == "linear@v1") == 13
    assert result.step_ms is not None

    def plain(m, state, x):
        return step(m, state, x)

    abstract = eqx.filter_eval_shape(lambda: (m, state, X))
    for each, args in ((plain, (m, state, X)), (step, abstract)):
        again = ejlayers.tune(each, *args, selector=chain, whole_step=False)
        assert again.digest == result.digest
    with result:
        assert np.isfinite(step(m, state, X)[2])
