"""The types and shapes that public signatures state, checked while calls run."""

import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from flax import linen as nn
from flax import nnx
from jaxtyping import jaxtyped

import ejkernel_ops as ek
import ejlayers
from ejlayers.cache import attend_cached
from ejlayers.functional import attend


def f(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def i(*shape):
    return jnp.zeros(shape, jnp.int32)


QKV = (f(2, 6, 4, 8), f(2, 5, 2, 8), f(2, 5, 2, 16))
CALLS = {
    "attention": (ek.flash_attention, QKV, {"bias": f(4, 6, 5), "mask": jnp.ones((6, 5), bool), "causal": True}),
    "attention with more": (
        ek.flash_attention, QKV,
        {"q_segment_ids": i(2, 6), "kv_segment_ids": i(2, 5), "kv_lengths": i(2), "sinks": f(4), "q_offset": i(2),
         "sliding_window": (1, 2), "softmax_scale": f()},
    ),
    "linear": (ek.linear, (f(2, 3, 8), f(8, 5), f(5)), {"activation": "relu"}),
    "linear, other layout": (ek.linear, (f(3, 8), f(5, 8)), {"weight_layout": "oi"}),
    "gated linear": (ek.gated_linear, (f(3, 8), f(8, 5), f(8, 5)), {"gate_bias": f(5), "up_bias": f(5)}),
    "gated linear, one weight": (ek.gated_linear, (f(3, 8), f(8, 10)), {}),
    "gated linear, other layout": (ek.gated_linear, (f(3, 8), f(5, 8), f(5, 8)), {"weight_layout": "oi"}),
    "mlp": (ek.mlp, (f(2, 3, 8), f(8, 5), f(5, 4)), {"up_bias": f(5), "down_bias": f(4)}),
    "mlp with a gate": (ek.mlp, (f(3, 8), f(5, 8), f(4, 5), f(5, 8)), {"weight_layout": "oi", "gate_bias": f(5)}),
    "rms norm": (ek.rms_norm, (f(2, 3, 8), f(8)), {}),
    "layer norm with residual": (ek.layer_norm, (f(2, 3, 8), f(8), f(8)), {"residual": f(2, 3, 8)}),
    "rotary": (ek.rotary_embedding, (f(2, 6, 4, 8), i(6)), {}),
    "rotary, positions of each": (
        ek.rotary_embedding, (f(2, 6, 4, 8), i(2, 6)), {"scaling": ek.RotaryScaling(kind="linear", factor=2.0)},
    ),
    "cross-entropy": (ek.linear_cross_entropy, (f(2, 3, 8), f(8, 11), i(2, 3)), {"bias": f(11)}),
    "cross-entropy of each": (
        ek.linear_cross_entropy, (f(3, 8), f(11, 8), i(3)),
        {"weight_layout": "oi", "reduction": "none", "token_weights": f(3)},
    ),
    "attend": (attend, (f(2, 3, 6, 4, 8), f(2, 3, 5, 2, 8), f(2, 3, 5, 2, 8)), {}),
    "attend cached": (
        attend_cached, (f(2, 3, 4, 8), f(2, 3, 2, 8), f(2, 3, 2, 8), f(2, 9, 2, 8), f(2, 9, 2, 8), i()), {},
    ),
}  # fmt: skip

RNGS = nnx.Rngs(0)
LAYERS = {
    "Linear": (ejlayers.nnx.Linear(8, 5, rngs=RNGS), (f(2, 3, 8),), {}),
    "LinearGeneral": (ejlayers.nnx.LinearGeneral((3, 8), (5, 2), axis=(-2, -1), rngs=RNGS), (f(2, 3, 8),), {}),
    "Einsum": (ejlayers.nnx.Einsum("...a,ab->...b", (8, 5), rngs=RNGS), (f(2, 3, 8),), {}),
    "RMSNorm": (ejlayers.nnx.RMSNorm(8, rngs=RNGS), (f(2, 8),), {}),
    "LayerNorm": (ejlayers.nnx.LayerNorm(8, rngs=RNGS), (f(8),), {}),
    "MultiHeadAttention": (
        ejlayers.nnx.MultiHeadAttention(2, 8, decode=False, rngs=RNGS), (f(2, 3, 8), f(2, 4, 8)),
        {"mask": jnp.ones((2, 1, 1, 4), bool)},
    ),
    "Attention": (
        ejlayers.nnx.Attention(8, 2, num_kv_heads=1, rotary=ejlayers.Rotary(), rngs=RNGS), (f(2, 3, 8),),
        {"positions": jnp.arange(3), "segment_ids": i(2, 3), "kv_lengths": i(2), "bias": f(3, 3)},
    ),
    "GatedMLP": (ejlayers.nnx.GatedMLP(8, 12, 5, rngs=RNGS), (f(2, 3, 8),), {}),
    "LMHead": (ejlayers.nnx.LMHead(8, 11, rngs=RNGS), (f(2, 8),), {}),
}  # fmt: skip
CALLS |= {name: (type(layer).__call__, (layer, *args), kwargs) for name, (layer, args, kwargs) in LAYERS.items()}
CALLS |= {
    "attend of Embed": (ejlayers.nnx.Embed.attend, (ejlayers.nnx.Embed(11, 8, rngs=RNGS), f(2, 8)), {}),
    "loss of LMHead": (ejlayers.nnx.LMHead.loss, (LAYERS["LMHead"][0], f(2, 8), i(2)), {}),
}

KEY = jax.random.key(0)
EQUINOX = {
    "Linear": (ejlayers.equinox.Linear(8, 5, key=KEY), (f(8),), {}),
    "RMSNorm": (ejlayers.equinox.RMSNorm((3, 8)), (f(3, 8),), {}),
    "LayerNorm": (ejlayers.equinox.LayerNorm(8), (f(8),), {"state": None}),
    "RotaryPositionalEmbedding": (ejlayers.equinox.RotaryPositionalEmbedding(8), (f(3, 8),), {"offset": 2}),
    "MultiheadAttention": (
        ejlayers.equinox.MultiheadAttention(2, 8, key=KEY), (f(3, 8), f(4, 8), f(4, 8), jnp.ones((3, 4), bool)), {},
    ),
    "Attention": (
        ejlayers.equinox.Attention(8, 2, num_kv_heads=1, rotary=ejlayers.Rotary(), key=KEY), (f(3, 8),),
        {"positions": jnp.arange(3), "segment_ids": i(3), "kv_lengths": 2, "bias": f(3, 3)},
    ),
    "GatedMLP": (ejlayers.equinox.GatedMLP(8, 12, 5, key=KEY), (f(8),), {}),
    "LMHead": (ejlayers.equinox.LMHead(8, 11, key=KEY), (f(2, 8),), {}),
}  # fmt: skip
CALLS |= {f"Equinox {name}": (type(m).__call__, (m, *args), kwargs) for name, (m, args, kwargs) in EQUINOX.items()}
CALLS["Equinox loss of LMHead"] = (ejlayers.equinox.LMHead.loss, (EQUINOX["LMHead"][0], f(2, 8), i(2)), {})

LINEN = {
    "Dense": (ejlayers.linen.Dense(5), (f(2, 3, 8),), {}),
    "DenseGeneral": (ejlayers.linen.DenseGeneral((5, 2), axis=(-2, -1)), (f(2, 3, 8),), {}),
    "Einsum": (ejlayers.linen.Einsum((8, 5), "...a,ab->...b"), (f(2, 3, 8),), {}),
    "RMSNorm": (ejlayers.linen.RMSNorm(), (f(2, 8),), {}),
    "LayerNorm": (ejlayers.linen.LayerNorm(), (f(8),), {}),
    "MultiHeadDotProductAttention": (
        ejlayers.linen.MultiHeadDotProductAttention(2), (f(2, 3, 8), f(2, 4, 8)), {"mask": f(2, 1, 1, 4)},
    ),
    "Attention": (
        ejlayers.linen.Attention(2, num_kv_heads=1, rotary=ejlayers.Rotary()), (f(2, 3, 8),),
        {"positions": jnp.arange(3), "segment_ids": i(2, 3), "kv_lengths": i(2), "bias": f(3, 3)},
    ),
    "GatedMLP": (ejlayers.linen.GatedMLP(12), (f(2, 3, 8),), {}),
    "LMHead": (ejlayers.linen.LMHead(8, 11), (f(2, 8),), {}),
}  # fmt: skip


def checked(fn):
    return jaxtyped(typechecker=beartype)(fn)


@pytest.mark.parametrize("name", CALLS)
def test_signatures_state_the_shapes_and_types_of_calls(name):
    fn, args, kwargs = CALLS[name]
    refuses_other_types(checked(fn), args, kwargs)


def refuses_other_types(fn, args, kwargs):
    fn(*args, **kwargs)
    for index, x in enumerate(args):
        if not isinstance(x, jax.Array) or x.dtype == bool:
            continue
        for wrong in (x.astype(bool), "x"):
            with pytest.raises(Exception, match="Type-check error"):
                fn(*args[:index], wrong, *args[index + 1 :], **kwargs)


@pytest.mark.parametrize("name", LINEN)
def test_signatures_of_linen_layers_do_too(name):
    layer, args, kwargs = LINEN[name]
    bound = layer.bind(layer.init(KEY, *args, **kwargs))
    fn = checked(type(layer).__call__.__wrapped__)  # without what Flax does around it
    with jax.disable_jit():
        refuses_other_types(lambda *args, **kwargs: bound_call(bound, fn, args, kwargs), args, kwargs)


def bound_call(bound, fn, args, kwargs):
    """Runs a method as Flax does, in the place of that which it wraps."""

    def intercept(run, a, k, context):
        return fn(bound, *a, **k) if (context.module, context.method_name) == (bound, "__call__") else run(*a, **k)

    with nn.intercept_methods(intercept):
        return bound(*args, **kwargs)
