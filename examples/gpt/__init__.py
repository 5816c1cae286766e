"""A byte-level GPT of stock Flax NNX layers: what `train_gpt.py` is made of."""
