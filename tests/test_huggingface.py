"""Checkpoints in Hugging Face's naming, read into models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from safetensors.numpy import load_file, save_file

import ejlayers

RNG = np.random.default_rng(0)
SIZES = {
    "model.embed_tokens.weight": (11, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.norm.weight": (16,),
    "lm_head.weight": (11, 16),
}
TENSORS = {name: RNG.normal(size=size).astype(np.float32) / 4 for name, size in SIZES.items()}
LLAMA = {
    "embed": "model.embed_tokens",
    "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.key": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.value": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.out": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp.*": "model.layers.*.mlp.*_proj",
    "layers.*.norm1": "model.layers.*.input_layernorm",
    "layers.*.norm2": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = ejlayers.nnx.RMSNorm(16, epsilon=1e-5, rngs=rngs)
        self.attention = ejlayers.nnx.Attention(16, 4, num_kv_heads=2, rotary=ejlayers.Rotary(), rngs=rngs)
        self.norm2 = ejlayers.nnx.RMSNorm(16, epsilon=1e-5, rngs=rngs)
        self.mlp = ejlayers.nnx.GatedMLP(16, 24, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.embed = ejlayers.nnx.Embed(11, 16, rngs=rngs)
        self.layers = nnx.List([Layer(rngs)])
        self.norm = ejlayers.nnx.RMSNorm(16, epsilon=1e-5, rngs=rngs)
        self.head = ejlayers.nnx.LMHead(16, 11, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def reference(tensors, tokens):
    """The published architecture in NumPy, in double precision, straight from the tensors."""
    w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    at = lambda name: w[f"model.layers.0.{name}.weight"]  # noqa: E731

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def turned(x):
        angles = np.arange(x.shape[0])[:, None] * 10000.0 ** (-np.arange(0, 4, 2) / 4)
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., 2:], x[..., :2]], -1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    h = norm(x, at("input_layernorm"))
    q, k, v = ((h @ at(f"self_attn.{n}_proj").T).reshape(len(tokens), -1, 4) for n in "qkv")
    q, k, v = turned(q), np.repeat(turned(k), 2, 1), np.repeat(v, 2, 1)
    logits = np.einsum("qhd,khd->hqk", q, k) / 2
    logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
    x = x + out @ at("self_attn.o_proj").T
    h = norm(x, at("post_attention_layernorm"))
    gate = h @ at("mlp.gate_proj").T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def test_a_llama_checkpoint_gives_what_its_formula_gives(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    tokens = np.array([3, 1, 4, 1, 5, 9, 2])
    for model in (Llama(nnx.Rngs(0)), nnx.eval_shape(lambda: Llama(nnx.Rngs(0)))):
        assert ejlayers.from_huggingface(model, load_file(tmp_path / "model.safetensors"), LLAMA) is model
        np.testing.assert_allclose(model(tokens[None])[0], reference(TENSORS, tokens), rtol=1e-4, atol=1e-5)


def test_parameters_keep_their_type():
    model = ejlayers.from_huggingface(Llama(nnx.Rngs(0), jnp.bfloat16), TENSORS, LLAMA)
    assert model.head.kernel.dtype == jnp.bfloat16
    assert model.embed.embedding.dtype == jnp.float32


def test_equinox_models_and_plain_parameters_are_filled_too():
    weight, bias = TENSORS["lm_head.weight"], np.arange(11.0, dtype=np.float32)
    tensors = {"head.weight": weight, "head.bias": bias}
    stock = eqx.nn.Linear(16, 11, key=jax.random.key(0))
    x = jnp.ones(16)
    np.testing.assert_allclose(
        ejlayers.from_huggingface(stock, tensors, {"": "head"})(x), weight @ x + bias, rtol=1e-5, atol=1e-5
    )
    params = {"Dense_0": {"kernel": jnp.zeros((16, 11)), "bias": jnp.zeros(11)}}
    filled = ejlayers.from_huggingface(params, tensors, {"Dense_0": "head"})
    np.testing.assert_array_equal(filled["Dense_0"]["kernel"], weight.T)


@pytest.mark.parametrize(("change", "names", "message"), [
    ({"lm_head.weight": None}, LLAMA, r"parameter head\.kernel should be tensor 'lm_head\.weight'"),
    ({"extra.weight": np.ones(3)}, LLAMA, r"no place in the model: extra\.weight; name their modules"),
    ({"lm_head.weight": np.ones((16, 12))}, LLAMA, r"has sizes \(12, 16\) for parameter head\.kernel"),
    ({"lm_head.weight": np.ones((16, 11))}, LLAMA, r"has sizes \(11, 16\) for parameter head\.kernel"),
    ({}, {k: v for k, v in LLAMA.items() if k != "norm"}, r"parameter norm\.scale has no entry in names"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_changed(change, names, message):
    tensors = {name: x for name, x in {**TENSORS, **change}.items() if x is not None}
    model = Llama(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(model))
    with pytest.raises(ValueError, match=message):
        ejlayers.from_huggingface(model, tensors, names)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, nnx.state(model)))
    if "extra.weight" in tensors:
        ejlayers.from_huggingface(model, tensors, names, ignore=["extra.*"])


@pytest.mark.cpu
def test_parameters_go_on_following_sharded_inputs():
    mesh = jax.make_mesh((2,), ("data",))
    x = jax.device_put(np.ones((4, 16), np.float32), jax.NamedSharding(mesh, jax.P("data")))
    layer = nnx.Linear(16, 11, rngs=nnx.Rngs(0))
    tensors = {"head.weight": TENSORS["lm_head.weight"], "head.bias": np.zeros(11)}
    assert ejlayers.from_huggingface(layer, tensors, {"": "head"})(x).shape == (4, 11)


@pytest.mark.parametrize(("names", "found"), [
    ({"layers.*.mlp.*": "model.layers.*.mlp.*_proj"}, "model.layers.0.mlp.up_proj"),
    ({"layers.*": "wrong.*", "layers.**": "h.**"}, "h.0.mlp.up"),
    ({"**.up": "model.**.up_proj"}, "model.layers.0.mlp.up_proj"),
    ({"**.layers.0.mlp.up": "**.up"}, "up"),
    ({"lay*.0.**.up": "h*.**.w"}, "hers.mlp.w"),
])  # fmt: skip
def test_a_star_is_one_name_and_two_are_any_number(names, found):
    params = {"layers": {"0": {"mlp": {"up": {"kernel": jnp.zeros((2, 3))}}}}}
    filled = ejlayers.from_huggingface(params, {f"{found}.weight": np.ones((3, 2))}, names)
    np.testing.assert_array_equal(filled["layers"]["0"]["mlp"]["up"]["kernel"], 1)


@pytest.mark.parametrize("names", [{"layers.*": "h"}, {"layers.*": "h.**"}, {"a": "b.*"}])
def test_other_wildcards_on_the_other_side_are_refused(names):
    with pytest.raises(ValueError, match=r"expected the same wildcards, \* and \*\*, on both sides"):
        ejlayers.from_huggingface({}, {}, names)


def test_a_linen_module_has_no_parameters_to_fill():
    with pytest.raises(TypeError, match=r"model is the Linen module Dense, .*; pass model\.init\(\.\.\.\)\['params'\]"):
        ejlayers.from_huggingface(linen.Dense(3), {}, {})


def test_a_kernel_of_more_axes_is_refused():
    layer = nnx.Conv(2, 2, (2,), use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"sizes \(2, 2, 2\); expected a matrix"):
        ejlayers.from_huggingface(layer, {"c.weight": np.ones((2, 2, 2))}, {"": "c"})


def test_a_layer_alone_takes_tensors_without_a_prefix():
    tensors = {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
    layer = ejlayers.from_huggingface(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tensors, names={"": ""})
    np.testing.assert_array_equal(layer.kernel[...], np.ones((2, 3)))
