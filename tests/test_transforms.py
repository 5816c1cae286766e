"""Ops and user kernels compute the right thing under every JAX transform, and labels tell what the program holds."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ejkernel_ops import (
    ConfigSelectorChain,
    Kernel,
    Key,
    clear_invocations,
    device_fingerprint,
    find_labels_in_lowered,
    flash_attention,
    get_invocations,
    linear,
    set_default_selector,
)
from ejkernel_ops.registry import find_call
from ejkernel_ops.utils.meta import count_labels, split_label

from .ops import OPS, along_query, attention, close, directional, gradients, jitted, normal, recorded, runs

# Arrays: Q2, K2, V2 have two axes more than a call, Q1 one more, Q0 none


BATCH, LENGTH = 2, 4
Q2, K2, V2 = normal(0, 3, 2, BATCH, LENGTH, 2, 4), *normal(1, 2, 3, 2, BATCH, LENGTH, 1, 4)
Q1, K1, V1 = Q2[:, 0], K2[:, 0], V2[:, 0]
Q0, K0, V0 = QKV0 = Q1[0], K1[0], V1[0]
QKV1, QKV2 = (Q1, K1, V1), (Q2, K2, V2)
IDS = np.asarray(jax.random.randint(jax.random.key(3), (3, BATCH, LENGTH), -1, 2))
LENGTHS = np.array([[4, 2], [0, 3], [1, 4]])
X1, W, BIAS = normal(4, 3, 5, 4), normal(5, 4, 3), normal(6, 3)
SCALE, SHIFT, SCALES = normal(10, 4), normal(11, 4), normal(12, 3, 4)
PLACES = np.array([[3, 0, 7, 1], [2, 9, 4, 4], [0, 1, 2, 3]])
WS, BIASES = normal(7, 3, 4, 3), normal(8, 3, 3)


# Transforms


def stacked(fn, *, remat=True):
    """Three layers as a scan."""

    def layers(q, *rest):
        def layer(carry, _):
            return carry + fn(carry, *rest), None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, q, None, length=3)[0]

    return layers


def vmapped_gradients(fn):
    return jax.vmap(gradients(fn))


def layer_gradients(fn):
    return gradients(stacked(fn, remat=False))


def vmapped_layer_gradients(fn):
    return jax.vmap(layer_gradients(fn))


def twelve_layers(fn):
    return lambda q, k, v: functools.reduce(lambda carry, _: carry + fn(carry, k, v), range(12), q)


def rematerialized(policy):
    return lambda fn: gradients(jax.checkpoint(fn, policy=policy))


def linear_weights_in_a_scan(fn):
    def loss(x, weights, biases):
        return jnp.sum(jax.lax.scan(lambda c, wb: (fn(c, *wb) @ jnp.ones((3, 4)), None), x, (weights, biases))[0] ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))


policies = jax.checkpoint_policies
second_order = {
    "grad(grad)": lambda f: jax.grad(lambda *a: sum(jnp.sum(g**2) for g in gradients(f)(*a)), argnums=(0, 1, 2)),
    "jvp(grad)": along_query(lambda f, q: directional(jax.grad(lambda q: jnp.sum(f(q) ** 2)), q)),
    "jvp(jvp)": along_query(lambda f, q: directional(lambda q: directional(f, q), q)),
    "grad of jvp": along_query(lambda f, q: jax.grad(lambda q: jnp.sum(directional(f, q)[1] ** 2))(q)),
}


def case(name, make, arrays, forward=1, backward=1, op="attention", like=None, dead=False, eager=False):
    """One row of the table.

    `forward` and `backward`: how many calls of either kernel the program has. `like`: a transform that gives the same
    numbers, if not `make` itself. `dead`: that XLA drops the forward, which only a transposed derivative would need.
    `eager`: whether to run it without `jit` too.
    """
    return pytest.param(op, make, arrays, forward, backward, like or make, dead, eager, id=f"{op}-{name}")


def norm_cases(op):
    """Transforms of a norm: of one call, and of three calls that share scale and bias or have their own."""
    one, shared, own = (X1[0], SCALE, SHIFT), (X1, SCALE, SHIFT), (X1, SCALES, SCALES)
    return [
        case("grad", gradients, one, op=op, eager=True),
        case("grad(scan(remat))", lambda f: gradients(stacked(f)), one, 2, op=op, like=layer_gradients),
        case("jvp", along_query(directional), one, 1, 0, op=op),
        case("grad(grad)", second_order["grad(grad)"], one, op=op, eager=True),
        case("jvp(grad)", second_order["jvp(grad)"], one, 1, 0, op=op),
        case("vmap, shared scale", lambda f: jax.vmap(f, (0, None, None)), shared, 1, 0, op=op),
        case("grad(vmap), shared scale", lambda f: gradients(jax.vmap(f, (0, None, None))), shared, op=op, eager=True),
        case("vmap(grad), shared scale", lambda f: jax.vmap(gradients(f), (0, None, None)), shared, op=op),
        case("grad(vmap), own scales", lambda f: gradients(jax.vmap(f)), own, op=op),
        case("vmap(grad), own scales", vmapped_gradients, own, op=op),
    ]


def residual_cases():
    """Transforms of a norm with a residual, both of whose results count."""
    one, mapped, op = (X1[0], SCALE, X1[1]), (X1, SCALE, X1[::-1]), "residual"
    return [
        case("grad", gradients, one, op=op),
        case("jvp", along_query(directional), one, 1, 0, op=op),
        case("grad(grad)", second_order["grad(grad)"], one, op=op),
        case("grad(vmap)", lambda f: gradients(jax.vmap(f, (0, None, 0))), mapped, op=op),
        case("vmap(grad)", lambda f: jax.vmap(gradients(f), (0, None, 0)), mapped, op=op),
    ]


CASES = [
    case("jit", lambda f: f, QKV0, 1, 0, eager=True),
    case("grad", gradients, QKV0, eager=True),
    case("grad of 12 layers", lambda f: gradients(twelve_layers(f)), QKV0, 12, 12),
    case("vmap", jax.vmap, QKV1, 1, 0),
    case("vmap(vmap)", lambda f: jax.vmap(jax.vmap(f)), QKV2, 1, 0),
    case("vmap(grad)", vmapped_gradients, QKV1, eager=True),
    case("vmap(jit(grad))", lambda f: jax.vmap(jax.jit(gradients(f))), QKV1, like=vmapped_gradients),
    case("grad(vmap(vmap))", lambda f: gradients(jax.vmap(jax.vmap(f))), QKV2),
    case("vmap(vmap(grad))", lambda f: jax.vmap(jax.vmap(gradients(f))), QKV2),
    case("vmap(grad), shared key", lambda f: jax.vmap(gradients(f), (0, None, None)), (Q1, K0, V0)),
    case("grad(vmap), shared key", lambda f: gradients(jax.vmap(f, (0, None, None))), (Q1, K0, V0)),
    case("grad(vmap), axes", lambda f: gradients(jax.vmap(f, (1, 2, -1), 3)), (
        np.moveaxis(Q1, 0, 1), np.moveaxis(K1, 0, 2), np.moveaxis(V1, 0, -1)
    )),
    case("scan", lambda f: stacked(f), QKV0, 1, 0),
    case("grad(scan)", layer_gradients, QKV0),
    case("grad(scan(remat))", lambda f: gradients(stacked(f)), QKV0, 2, like=layer_gradients, eager=True),
    case("vmap(grad(scan(remat)))", lambda f: jax.vmap(gradients(stacked(f))), QKV1, 2, like=vmapped_layer_gradients),
    case("grad(vmap(scan(remat)))", lambda f: gradients(jax.vmap(stacked(f))), QKV1, 2, like=vmapped_layer_gradients),
    case("grad(remat(vmap))", lambda f: gradients(jax.checkpoint(jax.vmap(f))), QKV1, 2, like=vmapped_gradients),
    case("remat nothing", rematerialized(policies.nothing_saveable), QKV0, 2, like=gradients),
    case("remat dots", rematerialized(policies.dots_saveable), QKV0, 2, like=gradients),
    case("remat everything", rematerialized(policies.everything_saveable), QKV0, like=gradients),
    case("remat name", rematerialized(policies.save_only_these_names("flash_attention")), QKV0, like=gradients),
    case("cond", lambda f: gradients(lambda q, k, v: jax.lax.cond(q.sum() > 0, f, lambda q, k, v: q, q, k, v)), QKV0),
    case("jvp", along_query(directional), QKV0, 1, 0, eager=True),
    case("jacrev", lambda f: jax.jacrev(f, (0, 1)), QKV0),
    case("jacfwd", lambda f: jax.jacfwd(f, (0, 1)), QKV0, 1, 0, dead=True),
    case("linearize", along_query(lambda f, q: jax.vmap(jax.linearize(f, q)[1])(jnp.stack([q, 2 * q]))), QKV0, 1, 0,
         dead=True),
    case("linear_transpose", along_query(lambda f, q: jax.linear_transpose(jax.linearize(f, q)[1], q)(f(q))), QKV0, 2),
    # Of a derivative's derivative there is only plain code, so no label of it.
    case("grad(grad)", second_order["grad(grad)"], QKV0),
    case("jvp(grad)", second_order["jvp(grad)"], QKV0, 1, 0),
    case("jvp(jvp)", second_order["jvp(jvp)"], QKV0, 1, 0),
    case("grad of jvp", second_order["grad of jvp"], QKV0, 0, 0),
    case("grad", gradients, (*QKV0, IDS[0], LENGTHS[0]), op="ids"),
    case("vmap(grad)", vmapped_gradients, (*QKV1, IDS, LENGTHS), op="ids"),
    case("grad(vmap), shared ids", lambda f: gradients(jax.vmap(f, (0, 0, 0, None, 0))), (*QKV1, IDS[0], LENGTHS),
         op="ids"),
    case("vmap(grad(scan(remat)))", lambda f: jax.vmap(gradients(stacked(f))), (*QKV1, IDS, LENGTHS), 2, op="ids"),
    case("jvp", lambda f: lambda q, k, v, *ids: directional(lambda q: f(q, k, v, *ids), q), (*QKV0, IDS[0], LENGTHS[0]),
         1, 0, op="ids"),
    case("jacfwd", jax.jacfwd, (*QKV0, IDS[0], LENGTHS[0]), 1, 0, op="ids", dead=True),
    case("grad(grad)", lambda f: gradients(lambda *a: gradients(f)(*a)[0]), (*QKV0, IDS[0], LENGTHS[0]), op="ids"),
    case("grad", gradients, (X1[0], W, BIAS), op="linear", eager=True),
    case("vmap, shared weight", lambda f: jax.vmap(f, (0, None, None)), (X1, W, BIAS), 1, 0, op="linear"),
    case("grad(vmap), shared weight", lambda f: gradients(jax.vmap(f, (0, None, None))), (X1, W, BIAS), op="linear",
         eager=True),
    case("vmap(grad), shared weight", lambda f: jax.vmap(gradients(f), (0, None, None)), (X1, W, BIAS), op="linear"),
    case("vmap, own weights", jax.vmap, (X1, WS, BIASES), 1, 0, op="linear"),
    case("grad(vmap), own weights", lambda f: gradients(jax.vmap(f)), (X1, WS, BIASES), op="linear"),
    case("vmap(grad), own weights", lambda f: jax.vmap(gradients(f)), (X1, WS, BIASES), op="linear", eager=True),
    case("grad(vmap(vmap)), one weight shared",
         lambda f: gradients(jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, None))), (X1, WS, BIAS), op="linear"),
    case("grad of scan over weights", linear_weights_in_a_scan, (X1[0], WS, BIASES), op="linear"),
    case("grad(grad)", lambda f: gradients(lambda *a: gradients(f)(*a)[1]), (X1[0], W, BIAS), op="linear", eager=True),
    *norm_cases("rms_norm"),
    *norm_cases("layer_norm"),
    *residual_cases(),
    case("grad", gradients, (Q0, PLACES[:2]), op="rotary", eager=True),
    case("vmap(grad)", vmapped_gradients, (Q1, np.stack([PLACES[:2], PLACES[1:], PLACES[:2]])), op="rotary"),
    case("vmap(grad), shared positions", lambda f: jax.vmap(gradients(f), (0, None)), (Q1, PLACES[0]), op="rotary",
         eager=True),
    case("grad(vmap), shared positions", lambda f: gradients(jax.vmap(f, (0, None))), (Q1, PLACES[0]), op="rotary"),
    case("grad(vmap), positions of each example", lambda f: gradients(jax.vmap(f)), (Q1[:, 0], PLACES), op="rotary"),
    case("grad(vmap), shared input", lambda f: gradients(jax.vmap(f, (None, 0))), (Q0[0], PLACES), op="rotary"),
    case("grad(scan(remat))", lambda f: gradients(stacked(f)), (Q0, PLACES[0]), 2, op="rotary", eager=True),
    case("jvp", lambda f: lambda x, at: directional(lambda x: f(x, at), x), (Q0, PLACES[0]), 1, 0, op="rotary",
         eager=True),
    case("grad(grad)", lambda f: gradients(lambda *a: gradients(f)(*a)[0]), (Q0, PLACES[0]), op="rotary"),
]  # fmt: skip


def kernel_counts(lowered, kernel):
    counts = {split_label(text)[0].split("@")[0]: n for text, n in count_labels(lowered).items()}
    return counts.get(kernel, 0), counts.get(f"{kernel}_bwd", 0)


@pytest.fixture(scope="module", autouse=True)
def own_selector():
    """One selector for all tests of this file, as none of them stores anything: eager calls stay compiled."""
    before = set_default_selector(ConfigSelectorChain())
    yield
    set_default_selector(before)


@functools.cache
def reference_values(op, make, arrays):
    """What a transform of a reference gives; `arrays` is the position of the first case that has these arrays."""
    return jitted(make(OPS[op][1]), *CASES[arrays].values[2])


@pytest.mark.parametrize(("op", "make", "arrays", "forward", "backward", "like", "dead", "eager"), CASES)
def test_transform_is_right_and_labels_are_those_of_the_program(op, make, arrays, forward, backward, like, dead, eager):
    fn, _, kernel = OPS[op]
    clear_invocations()
    lowered = jax.jit(make(fn)).lower(*arrays)
    labels = set(find_labels_in_lowered(lowered))
    assert kernel_counts(lowered, kernel) == (forward, backward)
    assert recorded() == labels  # nothing that is not in the program, and all that is
    compiled = lowered.compile()
    assert set(find_labels_in_lowered(compiled)) == (set() if dead else labels)
    wanted = reference_values(op, like, next(i for i, c in enumerate(CASES) if c.values[2] is arrays))
    close(compiled(*arrays), wanted)
    if eager:
        close(make(fn)(*arrays), wanted)


def test_third_derivatives_are_exact_in_float64():
    def third(fn):
        def first(q):
            return jnp.sum(fn(q, key, value) ** 2)

        return jax.grad(lambda q: jax.grad(lambda q: jnp.sum(jax.grad(first)(q) ** 2))(q).sum())

    with jax.enable_x64(True):
        query, key, value = (x[:, :3].astype(np.float64) for x in QKV0)
        close(jitted(third(flash_attention), query), jitted(third(attention), query), 1e-11)


# Bias and mask under vmap: their kind of operand in all its forms is the subject of test_user_kernels.py


@pytest.mark.parametrize(("op", "batch", "shape", "axis", "forward", "backward"), [
    # A bias that all examples and rows share folds; its gradient for each example needs a loop.
    ("bias", 2, (1, 2, 1, 4), None, 1, 3),
    ("bias", 2, (3, 1, 2, 4, 4), 0, 3, 3),  # one for each example, shared by its rows
    ("mask", 2, (1, 1, 4, 4), None, 1, 1),
    ("mask", 2, (2, 1, 1, 4, 3), -1, 1, 1),  # one for each row
])  # fmt: skip
def test_bias_and_mask_under_vmap_fold_where_rows_may_join_and_loop_where_not(
    op, batch, shape, axis, forward, backward
):
    fn, reference, _ = OPS[op]
    tile = normal(9, *shape)
    arrays, axes = (*(x[:, :batch] for x in QKV1), tile if op == "bias" else tile > 0), (0, 0, 0, axis)
    lowered = jax.jit(jax.vmap(gradients(fn), axes)).lower(*arrays)
    assert runs(lowered) == {"flash_attention@v1": forward, "flash_attention_bwd@v1": backward}
    close(lowered.compile()(*arrays), jitted(jax.vmap(gradients(reference), axes), *arrays))


def test_gradient_of_a_bias_is_the_sum_over_the_examples_that_share_it():
    fn, reference, _ = OPS["bias"]
    arrays, axes = (*QKV1, normal(9, 1, 2, 4, 4)), (0, 0, 0, None)
    close(jitted(gradients(jax.vmap(fn, axes)), *arrays), jitted(gradients(jax.vmap(reference, axes)), *arrays))


def test_vmap_of_no_examples_gives_no_outputs():
    x = np.zeros((0, 5, 4), np.float32)
    assert jax.vmap(linear, (0, None))(x, W).shape == (0, 5, 3)
    assert [g.shape for g in vmapped_gradients(lambda x: linear(x, W))(x)] == [(0, 5, 4)]


# Gradients that no one asked for


def backward_needs(lowered):
    """`needs` of the recorded backward call of a program."""
    (text,) = [text for text in find_labels_in_lowered(lowered) if "_bwd@" in text]
    return find_call(Key(device_fingerprint(), *split_label(text))).needs


@pytest.mark.parametrize(("wanted", "needs", "products"), [
    ((0,), (True, False, False), 1), ((1,), (False, True, False), 1), ((2,), (False, False, True), 0),
    ((0, 1, 2), (True, True, True), 2),
])  # fmt: skip
def test_backward_of_linear_computes_only_the_gradients_that_are_asked_for(wanted, needs, products):
    fn, reference, _ = OPS["linear"]
    arrays = X1[0], W, BIAS
    grad = jax.grad(lambda *a: fn(*a).sum(), wanted)
    lowered = jax.jit(grad).lower(*arrays)
    assert backward_needs(lowered) == needs
    assert lowered.as_text().count("stablehlo.dot_general") == 1 + products
    close(lowered.compile()(*arrays), jitted(jax.grad(lambda *a: reference(*a).sum(), wanted), *arrays))


def test_backward_of_attention_has_a_key_for_each_set_of_needed_gradients():
    sets = [(0,), (1,), (2,), (3,), (1, 2), (0, 1, 2, 3)]
    arrays, keys, products = (*QKV0, normal(9, 1, 2, 4, 4)), set(), []
    for wanted in sets:
        lowered = jax.jit(jax.grad(lambda *a: OPS["bias"][0](*a).sum(), wanted)).lower(*arrays)
        assert backward_needs(lowered)[:4] == tuple(i in wanted for i in range(4))
        keys |= {text for text in find_labels_in_lowered(lowered) if "_bwd@" in text}
        products.append(lowered.as_text().count("stablehlo.dot_general"))
    assert len(keys) == len(sets)
    assert products[2] == min(products)
    assert products[5] == max(products)


# Export, modes of JAX, frameworks


def test_exported_programs_compute_the_same_and_keep_their_labels():
    attend = functools.partial(flash_attention, backend="xla")  # JAX vouches for no custom call of a GPU

    def both(*arrays):
        return attend(*arrays), gradients(attend)(*arrays)

    exported = jax.export.export(jax.jit(both), platforms=("cpu", "cuda"))(*QKV0)
    close(jitted(exported.call, *QKV0), jitted(both, *QKV0))
    assert {split_label(text)[0] for text in find_labels_in_lowered(exported)} == {
        "flash_attention@v1", "flash_attention_bwd@v1"
    }  # fmt: skip


def test_no_tracer_leaks():
    with jax.checking_leaks():
        jax.jit(gradients(jax.vmap(flash_attention))).lower(*QKV1)


def test_debug_nans_accepts_rows_that_see_nothing():
    fn = OPS["ids"][0]
    with jax.debug_nans(True):
        grads = jitted(gradients(fn), *QKV0, np.full((BATCH, LENGTH), -1), LENGTHS[0])
    assert all(not np.any(g) for g in grads)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans_names_the_operation_inside_a_kernel(wrap, capfd):
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="dot_general"):
        wrap(flash_attention)(np.full_like(Q0, np.inf), K0, V0)


def test_disable_jit_runs_the_kernel_op_by_op():
    seen = []

    class Watched(Kernel):
        def run(self, x, *, cfg):
            seen.append(x)
            return 2 * x

        def heuristic_cfg(self, inv):
            return 1

    kernel = Watched("watched")
    with jax.disable_jit():
        assert kernel(jnp.float32(3)) == 6
        assert any(not isinstance(x, jax.core.Tracer) for x in seen)
        grads = gradients(OPS["linear"][0])(X1[0], W, BIAS)
    close(grads, jitted(gradients(OPS["linear"][1]), X1[0], W, BIAS))


def test_types_follow_enable_x64_for_the_same_arrays():
    class Argmax(Kernel):
        def run(self, x, *, cfg):
            return jnp.argmax(x)

        def heuristic_cfg(self, inv):
            return 1

    kernel, x = Argmax("argmax"), jnp.arange(3.0)
    types = [kernel(x).dtype.name]
    with jax.enable_x64(True):
        types.append(kernel(x).dtype.name)
    assert types == ["int32", "int64"]


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        arrays = [x.astype(np.float64) for x in QKV0]
        close(jitted(gradients(flash_attention), *arrays), jitted(gradients(attention), *arrays), 1e-13)


def test_eval_shape_and_tracing_record_nothing():
    clear_invocations()
    out = jax.eval_shape(gradients(flash_attention), *QKV0)
    assert [x.shape for x in out] == [x.shape for x in QKV0]
    jax.make_jaxpr(gradients(flash_attention))(*QKV0)
    jax.jit(gradients(flash_attention)).trace(*QKV0)
    assert get_invocations() == {}


def test_dead_calls_are_not_recorded():
    def fn(q, k, v):
        flash_attention(q, k, v, softmax_scale=0.123)
        return jax.lax.stop_gradient(flash_attention(q, k, v, softmax_scale=0.25)) * q

    clear_invocations()
    lowered = jax.jit(gradients(fn)).lower(*QKV0)
    assert kernel_counts(lowered, "flash_attention") == (1, 0)
    assert recorded() == set(find_labels_in_lowered(lowered))


def test_nnx_jit_and_grad_see_the_ops():
    class Layer(nnx.Module):
        def __init__(self):
            self.weight, self.bias = nnx.Param(jnp.asarray(W)), nnx.Param(jnp.asarray(BIAS))

        def __call__(self, x):
            return OPS["linear"][0](x, self.weight[...], self.bias[...])

    @nnx.jit
    def step(layer, x):
        return nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)

    grads = step(Layer(), X1[0])
    wanted = jitted(gradients(OPS["linear"][1]), X1[0], W, BIAS)
    close((grads["weight"][...], grads["bias"][...]), wanted[1:])


def test_equinox_filter_jit_and_filter_grad_see_the_ops():
    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array
        activation: str = eqx.field(static=True)

        def __call__(self, x):
            return linear(x, self.weight, self.bias, activation=self.activation)

    @eqx.filter_jit
    @eqx.filter_grad
    def step(layer, x):
        return jnp.sum(layer(x) ** 2)

    grads = step(Layer(jnp.asarray(W), jnp.asarray(BIAS), "silu"), X1[0])
    close((grads.weight, grads.bias), jitted(gradients(OPS["linear"][1]), X1[0], W, BIAS)[1:])
