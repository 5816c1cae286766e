"""`rotary_embedding` on XLA: its numbers, and each rule of its documentation as a test."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    BwdParams,
    ConfigError,
    ConfigSelectorChain,
    FwdParams,
    RotaryConfig,
    RotaryScaling,
    UnsupportedError,
    autotune_lowered,
    from_json,
    rotary_embedding,
    to_json,
)
from ejkernel_ops.kernels.rotary.scaling import frequencies

from .reference import assert_as_good_as_plain, case_name, pairwise
from .reference import rotary as reference

SCALINGS = {
    "linear": RotaryScaling(kind="linear", factor=4),
    "ntk": RotaryScaling(kind="ntk", factor=2.5),
    "yarn": RotaryScaling(kind="yarn", factor=8, original_length=512),
    "yarn-2": RotaryScaling(
        kind="yarn", factor=4, original_length=4096, beta_fast=20, beta_slow=2, attention_factor=1.5
    ),
    "llama3": RotaryScaling(kind="llama3", factor=8, original_length=64, low_freq_factor=1.5),
}


@functools.partial(jax.jit, static_argnames="statics")
def run(x, positions, dout, statics=()):
    """Output and gradient."""
    out, pull = jax.vjp(lambda x: rotary_embedding(x, positions, **dict(statics)), x)
    return {"out": out, "x": pull(dout)[0]}


def chunks(fwd, bwd):
    return RotaryConfig(backend="xla", fwd=FwdParams(blocksize_m=fwd), bwd=BwdParams(blocksize_m=bwd))


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def judge(x, positions, config=None, **options):
    """Checks output and gradient against the reference; returns them."""
    dout = normal(*x.shape, seed=1, dtype=x.dtype)
    got = run(x, positions, dout, (("config", config), *sorted(options.items())))
    exact, plain = (reference(x, positions, dout=dout, **options, plain=p) for p in (False, True))
    assert_as_good_as_plain(got, exact, plain, x.dtype)
    assert all(a.shape == x.shape and a.dtype == x.dtype for a in got.values())
    return got


def rotated(x, positions, **options):
    return np.asarray(jax.jit(functools.partial(rotary_embedding, **options))(x, positions))


# Numbers


POSITIONS = {
    "from 0": lambda batch, length: np.arange(length),
    "offset": lambda batch, length: 1000 + np.arange(length, dtype=np.int16),
    "each": lambda batch, length: np.arange(batch)[:, None] * 77 - 50 + np.arange(length),
    "one row": lambda batch, length: np.arange(length)[None, ::-1],
}
FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "shape": ((2, 33, 3, 16), (1, 65, 1, 8), (3, 1, 2, 32)),
    "fraction": (1.0, 0.5, 0.25),
    "interleaved": (False, True),
    "theta": (10000.0, 500000),
    "scaling": (None, *SCALINGS),
    "positions": tuple(POSITIONS),
    "chunks": (None, (16, 5), (5, 64), (1, 16)),
}


@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=case_name)
def test_output_and_gradient_err_no_more_than_a_plain_program(case):
    features = round(case["shape"][-1] * case["fraction"])
    scaling = None if case["scaling"] == "ntk" and features == 2 else SCALINGS.get(case["scaling"])
    x = normal(*case["shape"], seed=zlib.crc32(case_name(case).encode()), dtype=case["dtype"])
    options = {name: case[name] for name in ("fraction", "interleaved", "theta")}
    config = chunks(*case["chunks"]) if case["chunks"] else None
    judge(x, POSITIONS[case["positions"]](*case["shape"][:2]), config, scaling=scaling, **options)


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        x = normal(2, 9, 3, 16, dtype=np.float64)
        judge(x, 100_000 + np.arange(9), chunks(4, 4), scaling=SCALINGS["yarn"])


def test_angles_at_large_positions_err_as_documented():
    """By at most 2**-23 of themselves, and a few roundings of the result."""
    positions = np.array([1, 999, 131_071, 1_000_003, 2**24, -(2**24)])
    x = np.zeros((6, 1, 64), np.float32)
    x[..., :32] = 1
    out = rotated(x, positions, theta=500000.0)[:, 0].astype(np.float64)
    angles = positions[:, None] * 500000.0 ** (-np.arange(0, 64, 2) / 64)
    error = np.hypot(out[:, :32] - np.cos(angles), out[:, 32:] - np.sin(angles))
    assert (error <= 2.0**-23 * np.abs(angles) + 1e-6).all()


# What a rotation keeps


def test_position_0_is_the_identity():
    x = normal(2, 3, 2, 8)
    got = run(x, np.zeros(3, int), x)
    np.testing.assert_array_equal(got["out"], x)
    np.testing.assert_array_equal(got["x"], x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_queries_and_keys_depend_on_differences_of_positions_alone(interleaved):
    query, key, at = normal(1, 7, 2, 16), normal(1, 7, 2, 16, seed=1), np.arange(7)

    def products(shift):
        q, k = (rotated(x, at + shift, interleaved=interleaved) for x in (query, key))
        return np.einsum("bqhd,bkhd->bhqk", q, k)

    np.testing.assert_allclose(products(1000), products(0), atol=2e-3)
    np.testing.assert_allclose(products(-3), products(0), atol=1e-5)
    assert np.abs(products(0) - np.einsum("bqhd,bkhd->bhqk", query, key)).max() > 0.1


def test_norms_are_kept_and_the_gradient_turns_back():
    x, at = normal(2, 5, 3, 16), np.arange(5) * 1000
    out = rotated(x, at)
    np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(run(x, at, out)["x"], x, atol=1e-6)


def test_packed_sequences_whose_positions_start_again_equal_separate_ones():
    x = normal(1, 8, 2, 16)
    together = rotated(x, np.array([0, 1, 2, 3, 4, 0, 1, 2]))
    np.testing.assert_array_equal(together[:, :5], rotated(x[:, :5], np.arange(5)))
    np.testing.assert_array_equal(together[:, 5:], rotated(x[:, 5:], np.arange(3)))


def test_a_step_of_decoding_at_its_offset_equals_that_of_the_whole():
    x = normal(2, 9, 2, 16)
    whole = rotated(x, np.arange(9))
    np.testing.assert_array_equal(rotated(x[:, 7:8], np.array([[7], [7]])), whole[:, 7:8])
    np.testing.assert_array_equal(rotated(x[:, 4:], np.arange(4, 9)), whole[:, 4:])


def test_negative_positions_turn_the_other_way():
    x, at = normal(1, 4, 1, 8), np.arange(1, 5)
    np.testing.assert_allclose(rotated(rotated(x, at), -at), x, atol=1e-6)


def test_interleaved_pairs_are_halves_in_another_order():
    x, at = normal(1, 5, 2, 12), np.arange(5)
    order = np.arange(12).reshape(2, 6).T.reshape(12)  # 0, 6, 1, 7, ...
    np.testing.assert_array_equal(rotated(x[..., order], at, interleaved=True), rotated(x, at)[..., order])


def test_a_fraction_turns_the_first_features_and_leaves_the_others():
    x, at = normal(1, 5, 2, 80), np.arange(5)
    out = rotated(x, at, fraction=0.4)
    np.testing.assert_array_equal(out[..., 32:], x[..., 32:])
    np.testing.assert_array_equal(out[..., :32], rotated(x[..., :32], at))


def test_one_pair_of_features_turns_by_its_position():
    out = rotated(np.ones((3, 1, 2), np.float32), np.arange(3))[:, 0]
    wanted = np.sqrt(2) * np.exp(1j * (np.pi / 4 + np.arange(3)))
    np.testing.assert_allclose(out, np.stack([wanted.real, wanted.imag], -1), rtol=1e-6)


def test_chunks_of_tokens_change_nothing():
    x, dout, at = normal(2, 7, 3, 8), normal(2, 7, 3, 8, seed=1), np.arange(7)
    whole, chunked = (run(x, at, dout, (("config", c),)) for c in (None, chunks(4, 3)))
    for name, wanted in whole.items():
        np.testing.assert_allclose(chunked[name], wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_any_number_of_axes_before_the_length(lead):
    x, at = normal(*lead, 5, 2, 8), np.arange(5)
    one = np.stack([rotated(part, at) for part in x.reshape(-1, 5, 2, 8)]).reshape(x.shape)
    np.testing.assert_allclose(rotated(x, at), one, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rotated(x, np.broadcast_to(at, (*lead, 5))), one, rtol=1e-6, atol=1e-6)


def test_positions_that_some_axes_share():
    x, at = normal(2, 3, 5, 1, 8), np.arange(10).reshape(2, 1, 5)
    np.testing.assert_array_equal(rotated(x, at), rotated(x, np.broadcast_to(at, (2, 3, 5))))


@pytest.mark.parametrize("shape", [(2, 0, 3, 8), (0, 4, 3, 8), (2, 4, 0, 8)])
def test_no_tokens_or_heads_give_none(shape):
    got = run(np.zeros(shape, np.float32), np.arange(shape[1]), np.zeros(shape, np.float32))
    assert got["out"].shape == got["x"].shape == shape


# Scaling


def test_frequencies_of_llama_3_are_the_published_ones():
    """Theta 500000, head_dim 128, factor 8 of 8192 tokens: wavelengths to 2048 stay, those from 8192 grow 8 times."""
    scaling = RotaryScaling(kind="llama3", factor=8, original_length=8192, low_freq_factor=1, high_freq_factor=4)
    freqs, factor = frequencies(500000.0, 128, scaling)
    plain = 500000.0 ** (-np.arange(64) / 64)
    assert factor == 1
    np.testing.assert_array_equal(freqs[:29], plain[:29])  # wavelength of pair 28: 1956
    np.testing.assert_allclose(freqs[35:], plain[35:] / 8)  # of pair 35: 8218
    by_hand = [0.002166571, 0.001371894, 0.000856751, 0.000524846, 0.000312694, 0.000178508]  # of pairs 29 to 34
    np.testing.assert_allclose(freqs[29:35], by_hand, rtol=2e-6)


def test_frequencies_of_yarn_are_the_published_ones():
    """Theta 10000, 128 features, factor 16 of 4096 tokens: pairs 0 to 20 stay, those from 46 are divided by 16.

    32 turns in 4096 tokens are those of pair 20.94, one turn that of pair 45.03: rounded down and up.
    """
    scaling = RotaryScaling(kind="yarn", factor=16, original_length=4096)
    freqs, factor = frequencies(10000.0, 128, scaling)
    plain = 10000.0 ** (-np.arange(64) / 64)
    assert factor == pytest.approx(1.2772588722)
    np.testing.assert_array_equal(freqs[:21], plain[:21])
    np.testing.assert_allclose(freqs[46:], plain[46:] / 16)
    np.testing.assert_allclose(freqs[33] / plain[33], 0.5 + 0.5 / 16)  # halfway
    assert frequencies(10000.0, 128, RotaryScaling(kind="yarn", factor=1, original_length=4096))[1] == 1


def test_the_range_of_yarn_stays_within_the_pairs_and_has_a_width():
    """Where no pair turns so often, or each does, or both ends are the same."""
    np.testing.assert_allclose(
        frequencies(100.0, 4, RotaryScaling(kind="yarn", factor=2, original_length=3))[0], [1.0, 0.05]
    )
    long = RotaryScaling(kind="yarn", factor=2, original_length=10**9)
    np.testing.assert_allclose(frequencies(10000.0, 8, long)[0], 10000.0 ** (-np.arange(4) / 4))


def test_frequencies_of_linear_and_ntk_are_the_published_ones():
    plain = 10000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(frequencies(10000.0, 8, SCALINGS["linear"])[0], plain / 4)
    ntk, factor = frequencies(10000.0, 8, RotaryScaling(kind="ntk", factor=8))
    np.testing.assert_allclose(ntk, (10000 * 16) ** (-np.arange(4) / 4))  # 8 ** (8 / 6) is 16
    np.testing.assert_allclose(ntk[-1], plain[-1] / 8)  # the slowest as with linear scaling, the fastest stays
    assert factor == 1


def test_the_factor_of_yarn_scales_output_and_gradient():
    scaling = RotaryScaling(kind="yarn", factor=4, original_length=64, attention_factor=2)
    x = normal(1, 1, 1, 8)
    got = run(x, np.zeros(1, int), x, (("scaling", scaling),))
    np.testing.assert_array_equal(got["out"], 2 * x)
    np.testing.assert_array_equal(got["x"], 2 * x)


def test_equal_scalings_are_one_value_and_can_be_stored():
    one = RotaryScaling(kind="yarn", factor=8, original_length=np.int64(64))
    other = RotaryScaling(kind="yarn", factor=8.0, original_length=64, beta_fast=32, beta_slow=1)
    assert one == other
    assert hash(one) == hash(other)
    assert from_json(to_json(one), RotaryScaling) == one
    x, at = normal(1, 2, 1, 4), np.arange(2)
    programs = {lowered_gradient(x, at, scaling=scaling).as_text() for scaling in (one, other)}
    assert len(programs) == 1


BAD_SCALINGS = [  # fields, type of the error, what its message must say
    (dict(kind="dynamic"), ValueError, ["kind", "'dynamic'", "linear, ntk, yarn, llama3"]),
    (dict(kind=["yarn"]), ValueError, ["kind", "yarn"]),
    (dict(factor=0.5), ValueError, ["factor", "0.5", "at least 1"]),
    (dict(factor=float("inf")), ValueError, ["factor", "finite"]),
    (dict(factor="8"), TypeError, ["factor", "'8'", "number"]),
    (dict(factor=None), ValueError, ["factor", "None"]),
    (dict(original_length=None), ValueError, ["original_length", "None", "'yarn'"]),
    (dict(original_length=0), ValueError, ["original_length", "0", "positive"]),
    (dict(original_length=64.0), TypeError, ["original_length", "64.0", "int"]),
    (dict(beta_fast=-1), ValueError, ["beta_fast", "-1", "positive"]),
    (dict(beta_slow=40), ValueError, ["beta_slow", "40", "beta_fast", "32"]),
    (dict(attention_factor=0), ValueError, ["attention_factor", "0", "positive"]),
    (dict(low_freq_factor=1), ValueError, ["low_freq_factor", "'yarn'", "leave it out"]),
    (dict(kind="linear"), ValueError, ["original_length", "64", "'linear'", "leave it out"]),
    (dict(kind="llama3", low_freq_factor=4), ValueError, ["low_freq_factor", "4", "high_freq_factor"]),
]


@pytest.mark.parametrize(("fields", "error", "words"), BAD_SCALINGS, ids=str)
def test_a_bad_field_of_a_scaling_is_refused_by_name(fields, error, words):
    with pytest.raises(error) as caught:
        RotaryScaling(**(dict(kind="yarn", factor=8, original_length=64) | fields))
    assert all(word in str(caught.value) for word in words), str(caught.value)


# Calls


def test_numpy_arrays_and_lists_are_taken_as_jax_takes_them():
    out = jax.eval_shape(lambda: rotary_embedding(np.ones((2, 3, 1, 4)), [0, 1, 2], theta=10000))
    assert (out.shape, out.dtype) == ((2, 3, 1, 4), jnp.float32)


def lowered_gradient(x, at, **options):
    return jax.jit(jax.grad(lambda x: rotary_embedding(x, at, **options).sum())).lower(x)


def test_both_directions_are_tuned():
    result = autotune_lowered(ConfigSelectorChain(), lowered_gradient(normal(1, 600, 1, 2), np.arange(600)))
    assert {e.op_id_v for e in result.entries} == {"rotary_embedding@v1", "rotary_embedding_bwd@v1"}
    for entry in result.entries:
        assert entry.source.startswith("tuned")
        assert {t.status for t in entry.trials} == {"timed"}
        assert len(entry.trials) == 2  # all 600 tokens, and chunks of 256


def test_cos_and_sin_are_computed_once_for_a_token_and_once_for_both_directions():
    x, at = normal(1, 64, 16, 32), np.arange(64)
    text = run.lower(x, at, x).compile().as_text()
    lines = [line for line in text.splitlines() if " cosine(" in line or " sine(" in line]
    assert len(lines) == 2
    assert all("[1,64,16]" in line for line in lines)  # tokens and pairs: no heads
    fusions = [part for part in text.split("\n\n") if " cosine(" in part]
    assert not any("f32[1,64,16,32]" in part for part in fusions)  # not inside the loop over heads


def test_the_backward_keeps_neither_input_nor_output():
    """Of eight layers in a scan what is kept for gradients is positions alone: less than one array."""
    x, at = jnp.zeros((1, 64, 16, 32)), jnp.arange(64)

    def layers(x):
        return jax.lax.scan(lambda x, _: (rotary_embedding(x, at), None), x, None, length=8)[0]

    compiled = jax.jit(lambda x, dout: jax.vjp(layers, x)[1](dout)).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * x.nbytes


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return like(*shape, dtype=jnp.int32)


BAD = [  # argument, value, type of the error, what its message must say besides the argument's name
    ("x", like(4, 8), ValueError, ["(4, 8)", "(batch, length, heads, head_dim)"]),
    ("x", like(2, 4, 1, 8, dtype=jnp.int32), TypeError, ["int32", "float"]),
    ("x", None, TypeError, ["NoneType", "array"]),
    ("positions", like(4), TypeError, ["float32", "int"]),
    ("positions", like(4, dtype=bool), TypeError, ["bool", "int"]),
    ("positions", ints(), ValueError, ["()", "(4,)"]),
    ("positions", ints(5), ValueError, ["(5,)", "(4,)", "(2, 4)"]),
    ("positions", ints(1), ValueError, ["(1,)", "(4,)"]),
    ("positions", ints(2), ValueError, ["(2,)", "(4,)", "positions[:, None]"]),
    ("positions", ints(3, 4), ValueError, ["(3, 4)", "(2, 4)"]),
    ("positions", ints(1, 2, 4), ValueError, ["(1, 2, 4)", "(2, 4)"]),
    ("theta", 1.0, ValueError, ["1.0", "above 1"]),
    ("theta", float("inf"), ValueError, ["inf", "finite"]),
    ("theta", "10000", TypeError, ["'10000'", "number"]),
    ("fraction", 0, ValueError, ["0.0", "above 0"]),
    ("fraction", 1.5, ValueError, ["1.5", "at most 1"]),
    ("fraction", 0.3, ValueError, ["0.3", "2.4 of 8", "even"]),
    ("fraction", 0.375, ValueError, ["0.375", "3 of 8", "even"]),
    ("x", like(2, 4, 1, 7), ValueError, ["head_dim of 7", "even"]),
    ("x", like(2, 4, 1, 8, dtype=jnp.float8_e4m3fn), TypeError, ["float8_e4m3fn", "cast it to bfloat16"]),
    ("interleaved", "half", TypeError, ["'half'", "True", "False"]),
    ("scaling", {"rope_type": "yarn"}, TypeError, ["rope_type", "RotaryScaling"]),
    ("precision", 3, ValueError, ["3", "highest"]),
    ("config", {"blocksize_m": 4}, ConfigError, ["blocksize_m", "RotaryConfig"]),
    ("config", RotaryConfig(backend="xla", fwd=FwdParams(num_warps=4)), ConfigError, ["num_warps=4", "blocksize_m"]),
    ("backend", "cpu", ConfigError, ["'cpu'", "triton, pallas, cudnn, xla"]),
    ("backend", "cudnn", UnsupportedError, ["'cudnn'", "xla"]),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), BAD, ids=[f"{n}-{e.__name__}-{i}" for i, (n, _, e, _) in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name_with_what_came_and_what_was_expected(name, value, error, words):
    arrays, options = {"x": like(2, 4, 1, 8), "positions": ints(4)}, {}
    (arrays if name in arrays else options)[name] = value
    with pytest.raises(error) as caught:
        jax.jit(lambda arrays: rotary_embedding(**arrays, **options)).lower(arrays)
    assert all(word in str(caught.value) for word in [name, *words]), str(caught.value)


def test_ntk_scaling_of_one_pair_is_refused():
    with pytest.raises(ValueError, match=r"scaling is 'ntk' for 2 turned features.*'linear'"):
        rotary_embedding(jnp.ones((1, 1, 1, 2)), [0], scaling=SCALINGS["ntk"])
