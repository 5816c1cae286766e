"""A byte-level GPT of stock layers, in three frameworks: what `train_gpt.py` is made of."""
