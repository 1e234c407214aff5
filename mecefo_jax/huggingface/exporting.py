"""A trained model as a folder that ``transformers`` opens."""

import json
import pathlib
from typing import Any, Literal

import ml_dtypes
import numpy as np

from mecefo_jax.huggingface.configuration import to_llama_config
from mecefo_jax.huggingface.shards import write_shards
from mecefo_jax.huggingface.tokenizer_files import write_tokenizer
from mecefo_jax.huggingface.weights import places, tensor_reader
from mecefo_jax.trained import TrainedModel

DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Dtypes that weights can be written in, by their names."""
MAX_SHARD_BYTES = 5 * 10**9


def write_model(
    folder: pathlib.Path,
    trained: TrainedModel,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json``, ``generation_config.json``, the tokenizer and the weights.

    Args:
        folder: where; it exists and is empty (``whole_folder``).
        trained: what to write.
        dtype: of the weights in the files; bfloat16 rounds to the nearest.
        max_shard_bytes: most bytes of a file of weights; about so much memory is taken above the parameters.

    Raises:
        OSError: a file cannot be written.
    """
    config, tokenizer = trained.config, trained.tokenizer
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    _write_json(
        folder / "config.json",
        to_llama_config(config.model, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, dtype=dtype),
    )
    _write_json(folder / "generation_config.json", special)
    write_tokenizer(folder, tokenizer, config.model.max_seq_len)
    found = places(config)
    sizes = {name: int(np.prod(place.shape)) * DTYPES[dtype].itemsize for name, place in found.items()}
    write_shards(folder, sizes, tensor_reader(config, trained.params, DTYPES[dtype]), max_shard_bytes)


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
