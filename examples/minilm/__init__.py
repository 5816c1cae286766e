"""The parts of `minilm_swap.py`: MiniLM of stock layers in two frameworks, and its weights."""
