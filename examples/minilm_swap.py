"""Puts tunable layers into a published model, and shows that it is still the same model.

    python examples/minilm_swap.py --framework equinox

It loads all-MiniLM-L6-v2, a sentence encoder, into a model of stock layers, swaps the layers, compares embeddings and
gradients, each layer's too, and fine-tunes both models a few steps.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

_FRAMEWORKS = ("nnx", "equinox")
_EMBEDDINGS, _GRADIENTS = 1e-4, 1e-3  # how far they may be apart; of gradients relative to the largest


def main(
    framework: Annotated[str, typer.Option(help="of the model: nnx or equinox")] = "nnx",
    steps: Annotated[int, typer.Option(min=0, help="steps of fine-tuning")] = 5,
    length: Annotated[int, typer.Option(min=4, max=512, help="tokens of a sentence")] = 16,
    per_module: Annotated[bool, typer.Option(help="also compare each layer; takes a few minutes")] = False,
) -> None:
    """Swaps the layers of MiniLM, checks it, and fine-tunes it."""
    if framework not in _FRAMEWORKS:
        raise typer.BadParameter(f"--framework is {framework!r}; expected one of {', '.join(_FRAMEWORKS)}")
    from minilm import weights

    try:
        agree = compared(framework, steps, length, per_module)
    except weights.Missing as missing:
        print(f"minilm_swap: {missing}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if agree else 1)


def compared(framework: str, steps: int, length: int, per_module: bool) -> bool:
    """Everything the example shows; whether the models agree."""
    import importlib

    from minilm import weights
    from minilm.pairs import PAIRS

    import ejlayers

    module = importlib.import_module(f"minilm.{framework}_model")
    checkpoint = weights.tensors()

    def loaded():
        return ejlayers.from_huggingface(module.new(), checkpoint, weights.NAMES[framework], ignore=weights.UNUSED)

    first, second = (weights.tokens(list(sentences), length) for sentences in zip(*PAIRS))
    stock, model = loaded(), ejlayers.swap(loaded())
    rows = ejlayers.report(model).rows
    print(f"{sum(row.replaced for row in rows)} of {len(rows)} layers replaced")
    difference = ejlayers.check(stock, model, *first, per_module=per_module)
    print(f"embeddings and gradients of {len(PAIRS)} sentences: {difference}")
    stock, stock_losses = module.fine_tuned(stock, (first, second), steps, 2e-5)
    model, losses = module.fine_tuned(model, (first, second), steps, 2e-5)
    for index, (a, b) in enumerate(zip(stock_losses, losses)):
        print(f"fine-tuning step {index + 1}: loss {a:.5f} stock, {b:.5f} swapped")
    agree = difference.output_abs <= _EMBEDDINGS and difference.grad_rel <= _GRADIENTS
    return agree and all(abs(a - b) < 1e-4 for a, b in zip(stock_losses, losses))


if __name__ == "__main__":
    typer.run(main)
