"""Pre-training of LLaMA-style models in JAX that goes on while nodes of the cluster fail (MeCeFO)."""
