"""Decoding a batch whose examples have different lengths: each gives what it gives alone, all tokens at once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import ejlayers

WIDTH, ROOM = 16, 12
KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(0), (2, 9, WIDTH))
LENGTHS = jnp.array([5, 3])
PROMPTS = X[:, :5]  # of the second example two tokens are padding
NEW = (X[:, 5:7], X[:, 7:8], X[:, 8:9])
OPTIONS = {"num_kv_heads": 2, "rotary": ejlayers.Rotary(), "sliding_window": (4, 0)}


def nnx_attention():
    layer = ejlayers.nnx.Attention(WIDTH, 4, **OPTIONS, rngs=nnx.Rngs(0))
    layer.init_cache(2, ROOM)
    return layer, layer


def nnx_stock():
    layer = ejlayers.swap(nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0)))
    layer.init_cache((2, ROOM, WIDTH))
    return layer, lambda x: layer(x, is_causal=True)


def nnx_outputs(make):
    layer, whole = make()
    decode = nnx.jit(lambda layer, x: layer(x, decode=True))
    decode(layer, PROMPTS)
    layer.cache_index.set_value(LENGTHS)
    return whole, [decode(layer, x) for x in NEW]


def linen_attention(**fields):
    return ejlayers.linen.Attention(4, **OPTIONS, **fields)


def linen_stock(**fields):
    return ejlayers.swap(nn.MultiHeadDotProductAttention(4, **fields))


def linen_outputs(make):
    layer, outs = make(decode=True), []
    variables = layer.init(KEY, jnp.zeros((2, ROOM, WIDTH)))
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable="cache"))
    variables |= step(variables, PROMPTS)[1]
    variables["cache"]["cache_index"] = LENGTHS
    for x in NEW:
        out, cache = step(variables, x)
        variables |= cache
        outs.append(out)

    def whole(x):
        causal = {"mask": nn.make_causal_mask(x[..., 0])} if make is linen_stock else {}
        return make().apply({"params": variables["params"]}, x, **causal)

    return whole, outs


def equinox_outputs(layer):
    decode, outs = eqx.filter_jit(jax.vmap(lambda x, cache: layer(x, cache=cache))), []
    caches = eqx.filter_vmap(lambda: layer.init_cache(ROOM), axis_size=2)()
    _, caches = decode(PROMPTS, caches)
    caches = eqx.tree_at(lambda cache: cache.index, caches, LENGTHS)
    for x in NEW:
        out, caches = decode(x, caches)
        outs.append(out)
    return jax.vmap(layer), outs


CASES = {
    "nnx": lambda: nnx_outputs(nnx_attention),
    "nnx, swapped": lambda: nnx_outputs(nnx_stock),
    "linen": lambda: linen_outputs(linen_attention),
    "linen, swapped": lambda: linen_outputs(linen_stock),
    "equinox": lambda: equinox_outputs(ejlayers.equinox.Attention(WIDTH, 4, **OPTIONS, key=KEY)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_example_goes_on_where_its_own_tokens_end(name):
    whole, outs = CASES[name]()
    for i, length in enumerate(LENGTHS):
        tokens = jnp.concatenate([X[i, :length], *(x[i] for x in NEW)])
        np.testing.assert_allclose(
            jnp.concatenate([out[i] for out in outs]), whole(tokens[None])[0, length:], atol=1e-5
        )


def test_what_does_not_fit_of_one_example_is_nan_there_alone():
    layer, _ = nnx_attention()
    layer.cache_index.set_value(jnp.array([3, ROOM - 1]))
    out = nnx.jit(lambda layer, x: layer(x, decode=True))(layer, NEW[0])
    assert jnp.isnan(out[1]).all()
    assert not jnp.isnan(out[0]).any()
    layer.cache_index.set_value(jnp.array([3, ROOM - 1]))
    with pytest.raises(ValueError, match=r"room for 12 tokens.* 2 more do not fit after 11"):
        layer(NEW[0], decode=True)
    layer, _ = nnx_stock()
    layer.cache_index.set_value(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"index has shape \(3,\); expected \(\) or the batch axes, \(2,\)"):
        layer(NEW[0], decode=True)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)':DeprecationWarning")
def test_several_batch_axes_and_sown_weights_go_by_example_too():
    layer = ejlayers.nnx.Attention(WIDTH, 4, **OPTIONS, rngs=nnx.Rngs(0))
    layer.init_cache((1, 2), ROOM)
    layer(PROMPTS[None], decode=True)
    layer.cache_index.set_value(LENGTHS[None])
    _, outs = nnx_outputs(nnx_attention)
    np.testing.assert_allclose(layer(NEW[0][None], decode=True)[0], outs[0], atol=1e-5)
    sowing = ejlayers.swap(nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0)))
    sowing.init_cache((2, ROOM, WIDTH))
    sowing(PROMPTS, decode=True)
    sowing.cache_index.set_value(LENGTHS)
    _, outs = nnx_outputs(nnx_stock)
    np.testing.assert_allclose(sowing(NEW[0], decode=True, sow_weights=True), outs[0], atol=1e-5)
