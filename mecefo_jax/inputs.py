"""What a run reads: the prepared text, its sampler, and the held-out microbatches."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mecefo_jax.config import Config, check_vocab_size
from mecefo_jax.data import PreparedData, Sampler, check_vocabulary, evaluation_microbatches, prepare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Opened for a config."""

    prepared: PreparedData
    vocab_size: int
    """Rows of the embedding table."""
    sampler: Sampler
    held_out: Sequence[np.ndarray]
    """Evaluation's microbatches, ``int32[B, T+1]`` each; empty where no text is held out."""


def open_inputs(config: Config) -> Inputs:
    """Prepare the data if that has not been done, and open it.

    Raises:
        DataError: it cannot be read or prepared, or is too short for the run.
        ConfigError: the vocabulary does not fit the model or the mesh.
    """
    prepared = prepare(config.data)
    vocab_size = config.model.vocab_size or prepared.vocab_size
    check_vocabulary(prepared, vocab_size)
    check_vocab_size(vocab_size, config.mesh, smallest=prepared.vocab_size)
    train = config.train
    sampler = Sampler(
        prepared.train,
        seed=train.seed,
        num_microbatches=config.num_microbatches,
        microbatch_size=train.microbatch_size,
        repeat=config.data.repeat,
    )
    sampler.require_enough(train.steps)
    held_out = evaluation_microbatches(prepared.validation, train.microbatch_size, config.eval.batches)
    return Inputs(prepared=prepared, vocab_size=vocab_size, sampler=sampler, held_out=held_out)
