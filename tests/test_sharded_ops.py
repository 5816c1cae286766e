"""Each op over a mesh of 2 x 4: right in both directions, on local shapes, and nothing is gathered that need not be."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_ops as ej
from ejkernel_ops.execution.local_calls import with_local_labels
from ejkernel_ops.utils.meta import call_sites, split_label

from .ops import normal

SEGMENTS = np.repeat([[0, 0, 0, 1, 1, 2, 2, -1]], 4, 0)
LABELS = np.arange(16) % 24


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


MESHES = {"auto": mesh_of(AxisType.Auto), "explicit": mesh_of(AxisType.Explicit)}
ROWS, COLUMNS, HEADS = P("data"), P(None, "model"), P("data", None, "model")


def qkv(kv_heads, kv=HEADS, heads=8, **more):
    shapes = [(4, 8, heads, 4), (4, 8, kv_heads, 4), (4, 8, kv_heads, 4)]
    return [(normal(i, *shape), spec) for i, (shape, spec) in enumerate(zip(shapes, (HEADS, kv, kv)))]


def causal(*x):
    return ej.flash_attention(*x, causal=True)


def biased(query, key, value, bias, sinks):
    return ej.flash_attention(query, key, value, bias=bias, sinks=sinks)


def packed(query, key, value):
    lengths = jnp.array([8, 5, 0, 7])
    return ej.flash_attention(query, key, value, q_segment_ids=SEGMENTS, kv_segment_ids=SEGMENTS, kv_lengths=lengths)


def dropped(query, key, value):
    return ej.flash_attention(query, key, value, dropout_rate=0.4, dropout_rng=jax.random.key(7))


def masked(query, key, value):
    mask = jnp.tril(jnp.ones((8, 8), bool))[None, None]
    return ej.flash_attention(query, key, value, mask=mask, sliding_window=3)


def mlp(x, up, down, up_bias, down_bias):
    return ej.mlp(x, up, down, up_bias=up_bias, down_bias=down_bias, activation="silu")


def turned(x):
    return ej.rotary_embedding(x, jnp.arange(8))


def loss(hidden, weight, **options):
    return ej.linear_cross_entropy(hidden, weight, LABELS, **options)


X, W = normal(10, 8, 8, 16), normal(11, 16, 32)
BIAS, SCALE = normal(12, 32), normal(13, 16)
SUMS = 4, 4, 8  # what four devices tell each other of a vocabulary: four numbers of each of eight rows
CASES = {  # the op, its operands with their shardings, the shapes of the arrays that it may gather
    "attention": (causal, qkv(4), []),
    "attention, one head each": (causal, qkv(8), []),
    "attention, fewer key heads than devices": (causal, qkv(2, P("data")), [(2, 8, 2, 4)]),
    "attention, one key head": (causal, qkv(1, P("data")), []),
    "attention over the batch": (causal, [(x, P(("data",))) for x, _ in qkv(3, heads=6)], []),
    "bias": (biased, [*qkv(4), (normal(3, 1, 8, 8, 8), P(None, "model")), (normal(4, 8), P("model"))], []),
    "bias of all": (biased, [*qkv(4), (normal(3, 8, 8), P()), (normal(4, 8), P("model"))], []),
    "bias of examples": (biased, [*qkv(4), (normal(3, 4, 1, 8, 8), P("data")), (normal(4, 8), P("model"))], []),
    "packed": (packed, qkv(4), []),
    "dropped": (dropped, qkv(4), []),
    "dropped, fewer key heads than devices": (dropped, qkv(2, P("data")), [(2, 8, 2, 4)]),
    "masked": (masked, qkv(2, P("data")), [(2, 8, 2, 4)]),
    "linear": (lambda x, w: ej.linear(x, w), [(X, ROWS), (W, COLUMNS)], []),
    "linear and bias": (
        lambda x, w, b: ej.linear(x, w, b, activation="gelu"), [(X, ROWS), (W, COLUMNS), (BIAS, P("model"))], [],
    ),
    "linear, split features": (ej.linear, [(X, HEADS), (W, P("model")), (BIAS, P())], []),
    "linear, split features, activation": (
        lambda x, w, b: ej.linear(x, w, b, activation="silu"), [(X, HEADS), (W, P("model")), (BIAS, P())], [],
    ),
    "linear, layout oi": (
        lambda x, w: ej.linear(x, w, weight_layout="oi"), [(X, ROWS), (W.T, P("model"))], [],
    ),
    "linear, fully sharded": (ej.linear, [(X, ROWS), (W, P("data")), (BIAS, P("data"))], [(16, 32), (32,)]),
    "gated": (ej.gated_linear, [(X, ROWS), (W, COLUMNS), (W + 1, COLUMNS)], []),
    "gated, one weight": (lambda x, w: ej.gated_linear(x, w, None), [(X, ROWS), (W, P())], []),
    "mlp": (mlp, [(X, ROWS), (W, COLUMNS), (W.T, P("model")), (BIAS, P("model")), (SCALE, P())], []),
    "rms_norm": (ej.rms_norm, [(X, ROWS), (SCALE, P())], []),
    "layer_norm": (ej.layer_norm, [(X, P("data")), (SCALE, P()), (SCALE, P())], []),
    "rms_norm of split lengths": (ej.rms_norm, [(normal(14, 4, 8, 16), P("data", "model")), (SCALE, P())], []),
    "rotary": (turned, qkv(4)[:1], []),
    "cross-entropy": (loss, [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), P())], []),
    "cross-entropy, split vocabulary": (
        loss, [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), COLUMNS)], [SUMS],
    ),
    "cross-entropy, split vocabulary, bias": (
        lambda h, w, b, t: loss(h, w, weight_layout="oi", bias=b, token_weights=t, label_smoothing=0.1, z_loss=1e-2),
        [(normal(15, 16, 8), ROWS), (normal(16, 24, 8), P("model")), (normal(17, 24), P("model")),
         (np.abs(normal(18, 16)), P("data"))], [SUMS],
    ),
    "cross-entropy of rows, split vocabulary": (
        lambda h, w: loss(h, w, reduction="none", logits_soft_cap=5.0),
        [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), COLUMNS)], [SUMS],
    ),
    "cross-entropy, split vocabulary, no gradients in the forward": (
        lambda h, w: loss(h, w, config=ej.LinearCrossEntropyConfig(recompute=True)),
        [(normal(15, 16, 8), P()), (normal(16, 8, 24), COLUMNS)], [(4, 4, 16)],
    ),
    "cross-entropy of rows": (
        lambda h, w: loss(h, w, reduction="none"), [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), P())], [],
    ),
    "cross-entropy, no gradients in the forward": (
        lambda h, w: loss(h, w, config=ej.LinearCrossEntropyConfig(recompute=True)),
        [(normal(15, 16, 8), ROWS), (normal(16, 8, 24), P())], [],
    ),
}  # fmt: skip


def gradients(fn):
    """Output and gradients; a sum of the output would tell little of it."""

    def weighted(*args):
        out = fn(*args)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    def both(*args):
        (_, out), grads = jax.value_and_grad(weighted, tuple(range(len(args))), has_aux=True)(*args)
        return out, grads

    return both


def placed(mesh, operands):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in operands]


def gathered(compiled):
    """The shapes of what a compiled program gathers or moves between devices."""
    moved = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    return [tuple(map(int, shape.split(","))) if shape else () for shape in moved]


def compiled_and_labels(fn, arrays):
    """The compiled program, the labels that are predicted from its lowered text, and those that it has."""
    step = jax.jit(fn)
    ej.clear_invocations()
    lowered = step.lower(*arrays)
    predicted = {split_label(site.label) for site in call_sites(with_local_labels(lowered.as_text()))}
    ej.clear_invocations()
    compiled = step.lower(*arrays).compile()
    return compiled, predicted, {(op, key) for op, calls in ej.get_invocations().items() for key in calls}


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(b).max()))


def wanted_alone(fn, arrays):
    """What one device makes of whole arrays."""
    with jax.set_mesh(jax.make_mesh((1,), ("alone",), axis_types=(AxisType.Auto,))):
        return jax.jit(gradients(fn))(*arrays)


@functools.cache
def wanted_of(case):
    fn, operands, _ = CASES[case]
    return wanted_alone(fn, [x for x, _ in operands])


@pytest.fixture(params=list(MESHES))
def mesh(request):
    with jax.set_mesh(MESHES[request.param]):
        yield MESHES[request.param]


@pytest.mark.parametrize("case", CASES)
def test_each_device_runs_its_own_part(case, mesh):
    fn, operands, may_gather = CASES[case]
    sharded = placed(mesh, operands)
    compiled, predicted, recorded = compiled_and_labels(gradients(fn), sharded)
    found = compiled(*sharded)
    assert predicted
    assert recorded <= predicted
    assert set(gathered(compiled)) <= {*may_gather}
    close(found, wanted_of(case))


@pytest.mark.parametrize(("fn", "operands", "message"), [
    (causal, [(x, P(None, None, None, "model")) for x, _ in qkv(4)],
     r"query of flash_attention has shape \(4, 8, 8, 4\), and axis 3 of it is split over mesh axis 'model', 4 ways; "
     r"each device needs it whole: pass jax\.sharding\.reshard\(query, jax\.P\(None, None, None, None\)\)"),
    (causal, qkv(3, P("data"), heads=12), r"query of flash_attention .* 12 cannot be split so among its devices"),
    (ej.rms_norm, [(X, P("data", None, "model"))], r"x of rms_norm .* axis 2 .*reshard\(x, jax\.P\('data', None"),
])  # fmt: skip
def test_types_that_say_what_cannot_be_are_refused(fn, operands, message):
    """Under Explicit axes nothing is gathered that its type says is split; under Auto axes XLA moves what it must."""
    with jax.set_mesh(MESHES["explicit"]), pytest.raises(ej.ConfigError, match=message):
        fn(*placed(MESHES["explicit"], operands))
    with jax.set_mesh(MESHES["auto"]):
        found = jax.jit(fn)(*placed(MESHES["auto"], operands))
    close([found], [fn(*[x for x, _ in operands])])


def constrained(x, spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESHES["auto"], spec))


def scanned(x, weight):
    def step(carry, row):
        return carry, jax.checkpoint(ej.linear)(row, weight)

    return jax.lax.scan(step, 0, jnp.stack([x, 2 * x]))[1]


def mapped(x, spec):
    return jax.shard_map(jnp.sin, mesh=MESHES["auto"], in_specs=spec, out_specs=spec)(x)


PROGRAMS = {  # how arrays come to a call
    "steps of a loop": scanned,
    "what goes around a loop": lambda x, _: jax.lax.fori_loop(0, 2, lambda _, y: ej.rms_norm(y, SCALE), x),
    "a constrained weight": lambda x, weight: ej.linear(x, constrained(weight, P("data"))),
    "a weight out of a shard_map": lambda x, weight: ej.linear(x, mapped(weight, P("data"))),
    "in a branch": lambda x, _: jax.lax.cond(x[0, 0] > 0, lambda x: ej.rms_norm(x, SCALE), lambda x: x, x),
    "twice": lambda x, weight: (ej.linear(x, weight), ej.linear(constrained(x, P(None, "model")), weight)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_labels_are_predicted_as_they_are_compiled(program):
    sharded = placed(MESHES["auto"], [(X[0], P("model")), (W, P())])
    _, predicted, recorded = compiled_and_labels(PROGRAMS[program], sharded)
    assert predicted == recorded != set()


def of_lengths(hidden, weight, labels, weights, reduction):
    out = ej.linear_cross_entropy(hidden, weight, labels, token_weights=weights, reduction=reduction)
    return out if reduction == "none" else out[None]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [P(None, "model"), P("data", "model"), P("data"), P("model", "data")])
def test_rows_of_several_axes_may_be_split_along_any(rows, reduction, mesh):
    """Labels and weights follow the hidden states, which under Explicit axes do not move."""
    labels, weights = np.resize(LABELS, (4, 8)), np.abs(normal(18, 4, 8))
    arrays = [normal(15, 4, 8, 12), normal(16, 12, 24)]

    def fn(hidden, weight):
        return of_lengths(hidden, weight, split[0], split[1], reduction)

    split = [labels, weights]
    wanted = wanted_alone(fn, arrays)
    split = placed(mesh, [(labels, P(None, "model")), (weights, P("data"))])
    operands = placed(mesh, [(arrays[0], rows), (arrays[1], P())])
    compiled = jax.jit(gradients(fn)).lower(*operands).compile()
    close(compiled(*operands), wanted)
    if mesh is MESHES["explicit"]:
        assert all(np.prod(shape) <= labels.size for shape in gathered(compiled))


MIXED = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
SPLIT_HEAD = [(normal(15, 16, 8), P()), (normal(16, 8, 24), COLUMNS)]


@pytest.mark.parametrize("columns", [COLUMNS, P(None, ("data", "model"))])
def test_a_vocabulary_that_types_split_may_be_split_by_xla_too(columns):
    with jax.set_mesh(MIXED):
        operands = placed(MIXED, [SPLIT_HEAD[0], (SPLIT_HEAD[1][0], columns)])
        close(jax.jit(gradients(loss))(*operands), wanted_alone(loss, [x for x, _ in SPLIT_HEAD]))


@pytest.mark.parametrize("spec", [P(), P(None, "data")])
def test_a_vocabulary_that_a_shard_map_splits_may_be_split_by_xla_too(spec):
    def local(hidden, weight):
        return loss(hidden, jax.lax.with_sharding_constraint(weight, spec), vocab_axis="model")

    split = jax.shard_map(
        local, mesh=MESHES["auto"], in_specs=(P(), COLUMNS), out_specs=P(), axis_names={"model"}
    )  # fmt: skip
    arrays = [x for x, _ in SPLIT_HEAD]
    close(jax.jit(gradients(split))(*arrays), wanted_alone(loss, arrays))


@pytest.mark.parametrize("manual", ["first", "second", "third"])
def test_xla_shares_out_what_a_shard_map_over_another_axis_leaves(manual):
    """XLA numbers the devices of such a part as it likes, and sums must be over those that have its parts."""
    mesh = jax.make_mesh((2, 2, 2), ("first", "second", "third"), axis_types=(AxisType.Auto,) * 3)
    low, high = (axis for axis in mesh.axis_names if axis != manual)

    def local(x, weight):
        x, weight = (jax.lax.with_sharding_constraint(a, P(None, axis)) for a, axis in ((x, high), (weight, low)))
        return ej.linear(x, weight)

    split = jax.shard_map(local, mesh=mesh, in_specs=(P(manual), P()), out_specs=P(manual), axis_names={manual})
    close(jax.jit(gradients(split))(X, W), wanted_alone(ej.linear, [X, W]))


class Shifted(ej.Kernel):
    """Rows and what they share, which also makes a residual that they share."""

    name, rows, out_rows, residual_rows = "test_shifted", (True, "broadcast"), (True,), ("broadcast",)

    def heuristic_cfg(self, inv):
        return 1

    def run(self, x, shift, *, cfg):
        return x + jnp.sin(shift)

    def fwd_with_residuals(self, x, shift, *, cfg):
        return x + jnp.sin(shift), jnp.cos(shift)

    def vjp(self, residuals, out, cotangent, x, shift, *, cfg):
        return cotangent, (cotangent * residuals).sum(0, keepdims=True)


def test_what_rows_share_is_no_sum_over_devices(mesh):
    operands = [(X[0], ROWS), (SCALE[None], P())]
    fn = functools.partial(ej.Executor(), Shifted())
    close(jax.jit(gradients(fn))(*placed(mesh, operands)), wanted_alone(fn, [x for x, _ in operands]))


def test_gradients_of_a_loss_are_summed_by_what_the_last_to_share_it_out_has_chosen():
    """Types split the rows, and then XLA does: the call of those parts may have another config than the first part."""
    operands = [(normal(15, 16, 8), P(("model", "data"))), (normal(16, 8, 24), P())]
    with jax.set_mesh(MIXED):
        arrays = placed(MIXED, operands)
        ej.clear_invocations()
        jax.jit(gradients(loss)).lower(*arrays).compile()
        device, op = ej.device_fingerprint(), "linear_cross_entropy@v1"
        chosen = ej.LinearCrossEntropyConfig(
            backend="xla", fwd=ej.FwdParams(blocksize_m=4, blocksize_n=24), recompute=True
        )
        with ej.overlay_cache({ej.Key(device, op, key): chosen for key in ej.get_invocations()[op]}):
            found = jax.jit(gradients(loss))(*arrays)
    close(found, wanted_alone(loss, [x for x, _ in operands]))


@pytest.mark.parametrize("spec", [P(), P("data"), P("model")])
def test_the_gradient_of_a_bias_is_split_as_the_bias_is(spec):
    """However the weight is: a step that trains both leaves both as they were."""
    operands = [(X, ROWS), (W, P("data", "model")), (BIAS, spec)]
    mesh = MESHES["auto"]
    step = jax.jit(lambda x, w, b: jax.grad(lambda w, b: (ej.linear(x, w, b) ** 2).sum(), (0, 1))(w, b))
    made = step(*placed(mesh, operands))[1]
    assert made.sharding.is_equivalent_to(NamedSharding(mesh, spec), 1)
