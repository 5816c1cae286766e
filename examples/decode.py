"""Generates with a cache of keys and values, and without: the same bytes, in a fraction of the time.

    python examples/decode.py --count 128

The model is a small Llama that has learned nothing yet, so its text is noise; the most likely byte is always taken.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpt.llama_model import Llama
from gpt.sizes import SIZES

from ejkernel_ops import benchmark

PROMPTS = ("def attention(query, key, value):\n", "The five boxing wizards jump quick")


@nnx.jit(static_argnums=2)
def with_cache(model: Llama, prompts: jax.Array, count: int) -> jax.Array:
    """Bytes `(batch, count)` that follow prompts `(batch, length)`: each is computed once, and seen by later ones."""
    batch, length = prompts.shape
    for block in model.blocks:
        block.attention.init_cache(batch, length + count)
    logits = model(prompts, decode=True)[:, -1]  # all of the prompts at once
    graph, cache, params = nnx.split(model, nnx.Cache, ...)

    def step(carry: Any, _: None) -> Any:
        cache, token = carry
        model = nnx.merge(graph, cache, params)
        following = model(token[:, None], decode=True)[:, -1].argmax(-1)
        return (nnx.state(model, nnx.Cache), following), token

    return jax.lax.scan(step, (cache, logits.argmax(-1)), length=count)[1].T


@nnx.jit(static_argnums=2)
def without_cache(model: Llama, prompts: jax.Array, count: int) -> jax.Array:
    """The same by the whole sequence anew for each byte; what is not there yet no byte sees."""
    length = prompts.shape[1]

    def step(tokens: jax.Array, index: jax.Array) -> Any:
        following = model(tokens)[:, index - 1].argmax(-1)
        return tokens.at[:, index].set(following), following

    tokens = jnp.pad(prompts, ((0, 0), (0, count)))
    return jax.lax.scan(step, tokens, length + jnp.arange(count))[1].T


def main(arguments: list[str] | None = None) -> bool:
    """Prints the speed of both; returns whether they gave the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=128, help="bytes that follow each prompt")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error("--count is 1 at least")
    size = dataclasses.replace(SIZES["llama-smoke"], layers=options.layers, width=128, hidden=256)
    model = Llama(size, jnp.float32, nnx.Rngs(0))
    prompts = jnp.array([list(text.encode()) for text in PROMPTS], jnp.int32)

    found = {}
    for name, generate in (("with a cache", with_cache), ("without", without_cache)):
        found[name] = np.asarray(generate(model, prompts, options.count))
        ms = benchmark(generate, model, prompts, options.count, num_warmup=0, num_iters=3)
        print(f"{name:13}{found[name].size / ms * 1e3:8.0f} bytes/s")
    cached, recomputed = found.values()
    print(f"equal bytes: {(cached == recomputed).sum()} of {cached.size}")
    print("after", repr(PROMPTS[0]), "comes", bytes(cached[0].astype(np.uint8))[:16].hex(" "))
    return bool((cached == recomputed).all())


if __name__ == "__main__":
    main()
