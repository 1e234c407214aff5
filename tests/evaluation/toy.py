"""A toy model of bytes with random weights: large enough that its logits differ, and that it attends."""

import jax
import numpy as np

from mecefo_jax.config import Config, DataConfig, ModelConfig
from mecefo_jax.data.tokenizer import ByteTokenizer
from mecefo_jax.model import init_model
from mecefo_jax.trained import TrainedModel

_forward = jax.jit(lambda params, tokens_BT: params(tokens_BT, jax.numpy.dtype("float32")))
TOKENIZER = ByteTokenizer()
LONGEST = 96
# Logits of order 1 in float32, computed in other shapes: about 1e-6 a token, over at most so many tokens.
TOLERANCE = 1e-4


def toy_model(seed: int = 0, **fields) -> TrainedModel:
    """Two layers; ``fields`` of ``ModelConfig`` in place of those here."""
    shape = {"hidden_size": 32, "ffn_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 512}
    model = ModelConfig(**shape | {"vocab_size": TOKENIZER.vocab_size, "norm_eps": 1e-4, "rope_base": 500.0} | fields)
    vocab_size = model.vocab_size
    assert vocab_size is not None
    config = Config(model=model, data=DataConfig(seq_len=LONGEST))
    rng = np.random.default_rng(seed)

    def livelier(leaf):
        # Matrices ten times as large make logits of order 1; norms begin as ones, which would hide their absence.
        return leaf * 10 if leaf.ndim > 2 or leaf.shape[-1] > 64 else leaf * rng.uniform(0.5, 1.5, leaf.shape)

    params = jax.tree.map(
        lambda leaf: jax.numpy.asarray(livelier(leaf), leaf.dtype), init_model(model, vocab_size, seed)
    )
    return TrainedModel(config=config, params=params, tokenizer=TOKENIZER, step=1)


def logits_of(model: TrainedModel, ids) -> np.ndarray:
    """``[T, V]`` in float64, from one row alone; padding behind it cannot reach it (tests/test_model.py)."""
    padded = -(-len(ids) // 128) * 128
    tokens = np.pad(np.asarray([ids], np.int32), ((0, 0), (0, padded - len(ids))))
    return np.asarray(_forward(model.params, tokens)[0, : len(ids)], np.float64)


def logprobs_of(model: TrainedModel, ids) -> np.ndarray:
    """Log-probability of each token but the first, in float64."""
    logits = logits_of(model, ids)[:-1]
    normalizer = np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1)) + logits.max(-1)
    return logits[np.arange(len(ids) - 1), list(ids[1:])] - normalizer


def continue_slowly(model: TrainedModel, ids, count: int) -> list[int]:
    """Greedy continuation, by a whole forward pass for each token."""
    row = list(ids)
    for _ in range(count):
        row.append(int(np.argmax(logits_of(model, row)[-1])))
    return row[len(ids) :]
