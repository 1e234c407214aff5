"""Whether a written folder is the model it was written from: bit for bit, and by transformers' own logits."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from mecefo_jax.errors import RunError
from mecefo_jax.huggingface.configuration import from_llama_config
from mecefo_jax.huggingface.exporting import DTYPES
from mecefo_jax.huggingface.shards import stored_tensors
from mecefo_jax.huggingface.weights import check_stored, tensor_reader
from mecefo_jax.trained import TrainedModel

LOGIT_TOLERANCE = 1e-4
"""Largest difference of logits over the largest logit.

Both sides compute in float32, whose rounding (6e-8) grows with width and depth: 1e-6 for small models, some 1e-5 for
large ones. A wrong layout, pairing or head moves logits by as much as they are."""
_NUM_TOKENS = 256


def require_equal_weights(folder: pathlib.Path, trained: TrainedModel, dtype: str) -> None:
    """Read a written folder as an import would, and compare its shape and every bit of its weights.

    Args:
        folder: as ``write_model`` wrote it.
        trained: what it was written from.
        dtype: that it was written in.

    Raises:
        RunError: something differs.
        DataError: a file cannot be read.
    """
    written = from_llama_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), str(folder))
    ours = trained.config.model
    for field in ("max_seq_len", "rope_base", "norm_eps", "tie_embeddings", "kv_heads", "head_size"):
        if getattr(written, field) != getattr(ours, field):
            raise RunError(f"{folder}: {field} reads {getattr(written, field)}, but is {getattr(ours, field)}")
    stored = stored_tensors(folder)
    check_stored(trained.config, stored, str(folder))
    expected = tensor_reader(trained.config, trained.params, DTYPES[dtype])
    for name, tensor in stored.items():
        found, wanted = tensor.read(), expected(name)
        if found.dtype != wanted.dtype or found.tobytes() != wanted.tobytes():
            raise RunError(f"{tensor.file}: {name} is not what was written")


def can_compare_logits() -> bool:
    """Whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def largest_logit_difference(folder: pathlib.Path, trained: TrainedModel, dtype: str) -> tuple[float, float]:
    """Compare logits of transformers with ours in float32, at every position of random tokens.

    Args:
        folder: as ``write_model`` wrote it.
        trained: what it was written from; the weights are rounded as the written ones are.
        dtype: that it was written in.

    Returns:
        The largest absolute difference, and the largest absolute logit of ours.
    """
    import torch
    import transformers

    model = trained.config.model
    assert model.vocab_size is not None
    length = min(_NUM_TOKENS, model.max_seq_len)
    tokens_BT = np.random.default_rng(0).integers(model.vocab_size, size=(1, length), dtype=np.int32)
    dtype_argument = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **{dtype_argument: torch.float32}
    ).eval()
    with torch.no_grad():
        their_logits_BTV = theirs(input_ids=torch.tensor(tokens_BT, dtype=torch.int64)).logits.numpy()
    del theirs
    params = trained.params
    if dtype != "float32":
        params = jax.tree.map(lambda leaf: leaf.astype(DTYPES[dtype]).astype(jnp.float32), params)
    logits_BTV = np.asarray(jax.jit(lambda params, tokens: params(tokens, jnp.dtype(jnp.float32)))(params, tokens_BT))
    return float(np.abs(logits_BTV - their_logits_BTV).max()), float(np.abs(logits_BTV).max())
