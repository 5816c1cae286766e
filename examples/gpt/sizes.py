"""The sizes of models, of their batches and of their training."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model and its batches are, and how long it trains."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class LlamaSize(Size):
    """A size with heads of keys and values that several heads of queries share, and with features of its MLP."""

    kv_heads: int
    hidden: int


SIZES = {
    "smoke": Size(layers=1, width=32, heads=2, context=64, batch=4, steps=20, learning_rate=3e-3),
    "tiny": Size(layers=3, width=96, heads=3, context=256, batch=16, steps=700, learning_rate=4e-3),
    "small": Size(layers=6, width=384, heads=6, context=512, batch=32, steps=3000, learning_rate=1e-3),
    "gpt2-small": Size(layers=12, width=768, heads=12, context=1024, batch=16, steps=3000, learning_rate=6e-4),
    "llama-smoke": LlamaSize(
        layers=1, width=32, heads=4, kv_heads=2, hidden=64, context=64, batch=4, steps=20, learning_rate=3e-3
    ),
    "llama-1b": LlamaSize(  # that of Llama 3.2 1B, but for its vocabulary
        layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, context=2048, batch=8, steps=3000, learning_rate=3e-4
    ),
}
