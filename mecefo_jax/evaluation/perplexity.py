"""Perplexity on held-out text, as a run measures it of itself."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int64

from mecefo_jax.config import Config
from mecefo_jax.data import PAD, Tokenizer, evaluation_microbatches, prepare
from mecefo_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from mecefo_jax.errors import DataError
from mecefo_jax.journal import scores
from mecefo_jax.step import evaluate
from mecefo_jax.trained import TrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Of a model, on a text."""

    perplexity: float
    """Exponential of the loss."""
    nats_per_token: float
    """The loss: mean over all predicted tokens."""
    bits_per_byte: float | None
    """The same for each byte of the text; None where the tokenizer does not tell how many bytes a token stands for."""
    tokens: int
    """Tokens predicted."""
    seconds: float
    """Time it took, with compilation."""


def measure_perplexity(model: TrainedModel, config: Config) -> Perplexity:
    """Perplexity on the held-out part of the data that a config describes, in the run's own microbatches.

    Args:
        model: whose perplexity.
        config: its sections ``data`` and ``eval`` say on what; the size of its microbatches is that of the run.

    Raises:
        DataError: the data cannot be read or prepared, has no held-out part, or has another tokenizer than the model.
        ConfigError: the data section contradicts itself.
    """
    prepared = prepare(config.data)
    check_same_tokenizer(model.tokenizer, prepared.tokenizer)
    microbatches = evaluation_microbatches(prepared.validation, config.train.microbatch_size, config.eval.batches)
    if not len(microbatches):
        raise DataError("no text is held out, so there is nothing to evaluate on; set --data.validation_files")
    started = time.perf_counter()
    nats, tokens = held_out_loss(model, microbatches)
    seconds = time.perf_counter() - started
    loss, perplexity = scores(nats, tokens).values()
    num_bytes = count_bytes(model.tokenizer, microbatches)
    return Perplexity(
        perplexity=perplexity,
        nats_per_token=loss,
        bits_per_byte=nats / math.log(2) / num_bytes if num_bytes else None,
        tokens=tokens,
        seconds=seconds,
    )


def held_out_loss(model: TrainedModel, microbatches: Sequence[np.ndarray]) -> tuple[float, int]:
    """Summed loss in nats (over microbatches in float64, as a run does), and the number of tokens predicted."""
    program = jax.jit(functools.partial(evaluate, config=model.config))
    sums = jax.device_get([program(model.params, tokens_BT) for tokens_BT in microbatches])
    return float(sum(float(loss) for loss, _ in sums)), int(sum(int(tokens) for _, tokens in sums))


def check_same_tokenizer(of_model: Tokenizer, of_data: Tokenizer) -> None:
    """Refuse data whose token ids mean something else than the model's.

    Raises:
        DataError: names both.
    """
    if _meaning(of_model) != _meaning(of_data):
        raise DataError(
            f"the model reads tokens of {of_model.name}, the data has those of {of_data.name}; set --data.tokenizer to "
            "the one in the run directory's folder tokenizer"
        )


def count_bytes(tokenizer: Tokenizer, microbatches: Sequence[np.ndarray]) -> int | None:
    """Bytes of the text that the predicted tokens stand for; None where the tokenizer does not tell."""
    bytes_V = bytes_of_tokens(tokenizer)
    if bytes_V is None:
        return None
    targets = (tokens_BT[:, 1:] for tokens_BT in microbatches)
    return int(sum(bytes_V[target_BT[target_BT != PAD]].sum() for target_BT in targets))


def bytes_of_tokens(tokenizer: Tokenizer) -> Int64[np.ndarray, "V"] | None:
    """UTF-8 bytes that each id stands for, special tokens for none; None unless every token is a string of bytes.

    Those of a byte-level vocabulary are: there, each character of a token is one byte.
    """
    bytes_V = np.zeros(tokenizer.vocab_size, np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        bytes_V[:256] = 1
        return bytes_V
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    content = json.loads(tokenizer.content)
    vocabulary = content["model"].get("vocab")
    if (content.get("decoder") or {}).get("type") != "ByteLevel" or not isinstance(vocabulary, dict):
        return None
    for token, number in vocabulary.items():
        bytes_V[number] = len(token)
    for token in content.get("added_tokens", []):  # these are text, as they stand
        bytes_V[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return bytes_V


def _meaning(tokenizer: Tokenizer) -> tuple[str, int]:
    """What decides the tokens of a text."""
    content = tokenizer.content if isinstance(tokenizer, HuggingFaceTokenizer) else tokenizer.name
    return content, tokenizer.bos_id
