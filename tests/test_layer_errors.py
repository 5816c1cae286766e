"""What our layers say of bad arguments: which one, what came, what was expected."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import ejlayers
from ejlayers import Rotary
from ejlayers.functional import attend

X = jax.random.normal(jax.random.key(0), (2, 5, 16))


def attention(**kwargs):
    return ejlayers.nnx.Attention(16, 4, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.parametrize(("call", "kind", "message"), [
    ({"mask": jnp.ones((2, 5), bool)}, ValueError, r"mask has shape \(2, 5\).*reshape it to \(batch, 1, 1, kv_len\)"),
    ({"mask": jnp.ones((3, 1, 5, 5), bool)}, ValueError, r"mask has shape \(3, 1, 5, 5\), whose batch axes \(3,\)"),
    ({"mask": jnp.ones((2, 3, 5, 5), bool)}, ValueError, r"mask has shape .* does not broadcast to"),
    ({"mask": jnp.ones((5, 5))}, TypeError, r"mask is float32; expected bool.*add floats as bias"),
    ({"mask": "all"}, TypeError, r"mask is a str; expected an array"),
    ({"bias": jnp.zeros((3, 5, 5))}, ValueError, r"bias has shape .* does not broadcast to"),
    ({"segment_ids": jnp.zeros((2, 4), int)}, ValueError, r"q_segment_ids has shape \(2, 4\); expected \(2, 5\)"),
    ({"segment_ids": jnp.zeros((2, 5))}, TypeError, r"q_segment_ids is float32; expected an int type"),
    ({"kv_lengths": 3}, ValueError, r"kv_lengths has shape \(\); expected the batch axes of query, \(2,\)"),
    ({"positions": jnp.arange(5)}, ValueError, r"positions are given, but the layer has no rotary embedding"),
])  # fmt: skip
def test_bad_arguments_of_attention_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        attention()(X, **call)


@pytest.mark.parametrize(("positions", "kind", "message"), [
    (jnp.arange(4), ValueError, r"positions has shape \(4,\); expected \(5,\)"),
    (jnp.zeros((3, 5), int), ValueError, r"positions has shape \(3, 5\); expected what broadcasts to \(2, 5\)"),
    (jnp.arange(5.0), TypeError, r"positions is float32; expected an int type"),
])  # fmt: skip
def test_bad_positions_are_named(positions, kind, message):
    with pytest.raises(kind, match=message):
        attention(rotary=Rotary())(X, positions=positions)


def test_inputs_of_too_few_axes_are_named():
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match=r"query has shape \(4, 4\); expected \(\.\.\., length, heads, head_dim\)"):
        attend(x, x, x)


@pytest.mark.once
@pytest.mark.parametrize(("name", "package"), [("nnx", "flax"), ("linen", "flax"), ("equinox", "equinox")])
def test_a_missing_framework_says_what_to_install(name, package):
    code = f"import sys; sys.modules[{package!r}] = None\nimport ejlayers\nejlayers.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ejlayers.{name} needs {package}, which is not installed: pip install 'ejlayers[{package}]'" in done.stderr
