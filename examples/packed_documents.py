"""Several documents in one row: the loss of each is that of the document alone, and hardly a byte is padding.

    python examples/packed_documents.py --documents 16 --length 512

The documents are docstrings of Python's builtins, of very different lengths, and the model is a small Llama.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import inspect
import random

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpt.llama_model import Llama
from gpt.sizes import SIZES

from ejkernel_ops import benchmark

IGNORED = -100  # the label of bytes that have no next one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of documents; all arrays are int32 `(rows, length)`, and the document of padding is -1."""

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray  # which document a byte is of: bytes see those of their own, and padding sees nothing
    positions: np.ndarray  # in the document

    @classmethod
    def of(cls, rows: list[list[int]], documents: list[bytes], length: int) -> Batch:
        """The documents whose numbers each row has."""
        batch = cls(*(np.full((len(rows), length), fill, np.int32) for fill in (0, IGNORED, -1, 0)))
        for row, numbers in enumerate(rows):
            start = 0
            for number in numbers:
                text = np.frombuffer(documents[number], np.uint8)
                place = row, slice(start, start + len(text))
                batch.tokens[place], batch.segment_ids[place] = text, number
                batch.labels[place] = [*text[1:], IGNORED]
                batch.positions[place] = np.arange(len(text))
                start += len(text)
        return batch


def docstrings(count: int, length: int) -> list[bytes]:
    """So many documents of at most `length` bytes, in the order of a fixed shuffle."""
    texts = sorted({text for value in vars(builtins).values() if (text := inspect.getdoc(value))})
    random.Random(0).shuffle(texts)
    return [text.encode()[:length] for text in texts[:count]]


def packed(documents: list[bytes], length: int) -> list[list[int]]:
    """Rows of documents by number, the longest first, each put into the first row that has room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(documents)), key=lambda number: -len(documents[number])):
        size = len(documents[number])
        row = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(number)
        room[row] -= size
    return rows


def losses(model: Llama, batch: Batch) -> jax.Array:
    """The loss of each byte, `(rows, length)`."""
    hidden = model.hidden(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions)
    return model.head.loss(hidden, batch.labels, reduction="none")


@nnx.jit
def loss_and_gradients(model: Llama, batch: Batch) -> tuple[jax.Array, nnx.State]:
    """What a train step computes: of the mean loss of all bytes."""
    return nnx.value_and_grad(lambda model: losses(model, batch).sum() / (batch.labels != IGNORED).sum())(model)


@nnx.jit(static_argnums=2)
def of_each(model: Llama, batch: Batch, count: int) -> jax.Array:
    """The mean loss of each document, `(count,)`."""
    numbers = batch.segment_ids.ravel()  # JAX leaves out those of padding, for they are negative
    arrays = losses(model, batch), (batch.labels != IGNORED).astype(jnp.float32)
    sums, counts = (jax.ops.segment_sum(x.ravel(), numbers, count) for x in arrays)
    return sums / counts


@nnx.jit
def alone(model: Llama, text: jax.Array) -> jax.Array:
    """The mean loss of one document by itself: no padding, no segments."""
    return model.loss(text[None])


def main(arguments: list[str] | None = None) -> float:
    """Prints rows, padding and speed; returns the largest difference of a document's loss from it alone, in nats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=16, help="how many, at most 100")
    parser.add_argument("--length", type=int, default=512, help="bytes of a row")
    options = parser.parse_args(arguments)
    if not (1 <= options.documents <= 100 and options.length >= 2):
        parser.error("documents are 1 to 100, and a row has 2 bytes at least")
    documents = docstrings(options.documents, options.length)
    size = dataclasses.replace(SIZES["llama-smoke"], layers=2, width=128, hidden=256)
    model, total = Llama(size, jnp.float32, nnx.Rngs(0)), sum(map(len, documents))
    expected = jnp.array([alone(model, np.frombuffer(text, np.uint8).astype(np.int32)) for text in documents])

    print(f"{len(documents)} documents of {min(map(len, documents))} to {max(map(len, documents))} bytes")
    print(f"{'':8}{'rows':>6}{'padding':>9}{'step, ms':>10}{'bytes/s':>9}  largest difference from each alone, nats")
    differences = []
    for name, rows in (
        ("padded", [[number] for number in range(len(documents))]),
        ("packed", packed(documents, options.length)),
    ):
        batch = Batch.of(rows, documents, options.length)
        ms = benchmark(loss_and_gradients, model, batch, num_warmup=1, num_iters=3)
        padding = 1 - total / batch.tokens.size
        differences.append(float(abs(of_each(model, batch, len(documents)) - expected).max()))
        print(f"{name:8}{len(rows):6}{padding:9.0%}{ms:10.0f}{total / ms * 1e3:9.0f}  {differences[-1]:.1e}")
    return max(differences)


if __name__ == "__main__":
    main()
