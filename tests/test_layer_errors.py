"""What our layers say of bad arguments: which one, what came, what was expected."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import ejlayers
from ejkernel_ops import ConfigError
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


KEY = jax.random.key(0)
MADE = {
    "nnx": (attention, lambda **kwargs: ejlayers.nnx.GatedMLP(16, 8, rngs=nnx.Rngs(0), **kwargs)),
    "linen": (
        lambda **kwargs: ejlayers.linen.Attention(4, **kwargs), lambda **kwargs: ejlayers.linen.GatedMLP(8, **kwargs),
    ),
    "equinox": (
        lambda **kwargs: ejlayers.equinox.Attention(16, 4, key=KEY, **kwargs),
        lambda **kwargs: ejlayers.equinox.GatedMLP(16, 8, key=KEY, **kwargs),
    ),
}  # fmt: skip


@pytest.mark.parametrize("framework", MADE)
def test_bad_options_are_refused_where_a_layer_is_made(framework):
    make_attention, make_mlp = MADE[framework]
    rate = "dropout_p" if framework == "equinox" else "dropout_rate"
    with pytest.raises(TypeError, match=r"rotary is True; expected an ejlayers\.Rotary, such as ejlayers\.Rotary\(\)"):
        make_attention(rotary=True)
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"{rate} is {bad}; expected between 0 and 1"):
            make_attention(**{rate: bad})
    for bad in ("tanhh", None, jax.nn.silu):
        with pytest.raises(ValueError, match=r"activation is .*; expected one of 'gelu', "):
            make_mlp(activation=bad)


@pytest.mark.parametrize(("rules", "message"), [
    ({3: True}, r"rules has the key 3; expected a path pattern, such as 'layers\.3', or a type"),
    (["**"], "rules is a list; expected a mapping"),
    ({"**": 3}, r"rule '\*\*' is 3; expected True, False or one of AttentionConfig"),
    ({"head": True}, r"rule 'head' matches no layer .*; paths: '' \(the model\)"),
    (None, r"rules is None; expected a mapping; to pin nothing anywhere pass \{'\*\*': None\}"),
])  # fmt: skip
def test_bad_rules_are_named(rules, message):
    model = ejlayers.swap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    for run in (ejlayers.set_config, *([lambda m, rules: ejlayers.swap(m, rules=rules)] if rules is not None else [])):
        with pytest.raises(ConfigError, match=message):
            run(model, rules)


def test_inputs_of_too_few_axes_are_named():
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match=r"query has shape \(4, 4\); expected \(\.\.\., length, heads, head_dim\)"):
        attend(x, x, x)


@pytest.mark.once
@pytest.mark.parametrize("form", ["import ejlayers; ejlayers.{}", "import ejlayers.{}", "from ejlayers import {}"])
@pytest.mark.parametrize(("name", "package"), [("nnx", "flax"), ("linen", "flax"), ("equinox", "equinox")])
def test_a_missing_framework_says_what_to_install(name, package, form):
    code = f"import sys; sys.modules[{package!r}] = None\n{form.format(name)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ejlayers.{name} needs {package}, which is not installed: pip install 'ejlayers[{package}]'" in done.stderr


def test_positions_of_as_many_axes_as_heads_are_refused():
    with pytest.raises(ValueError, match=r"positions has shape \(1, 2, 3\); expected what broadcasts to \(2, 3\)"):
        Rotary()(jnp.ones((2, 3, 4, 8)), jnp.ones((1, 2, 3), int))


def test_a_rotary_embedding_has_no_path_to_pin():
    with pytest.raises(TypeError, match="path is nothing that a module pins; expected config, backend"):
        Rotary().pin(path="x")
