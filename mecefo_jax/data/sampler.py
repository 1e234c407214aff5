"""Which records form a microbatch: a pure function of (seed, step, microbatch id).

Slot ``g = (step * M + id) * B + row`` of a run lies in epoch ``g // N`` at place ``g % N`` of that epoch's seeded
permutation of the ``N`` records. There is no iterator and no state: any node can produce any microbatch, a resumed
run needs the step alone, and nothing that fails makes a record be lost or seen twice.

Legend: M microbatches of a step, B sequences of a microbatch, T tokens that a sequence predicts.
"""

import functools
from collections.abc import Sequence

import numpy as np
from grain.experimental import index_shuffle
from jaxtyping import Int32, Int64

from mecefo_jax.errors import DataError
from mecefo_jax.padding import PAD

_TABLE_RECORDS = 2**16
"""Up to this many records a permutation is a table: grain's index_shuffle takes up to milliseconds an index there."""
_ROUNDS = 16
"""Rounds of the block cipher that permutes indices beyond. With the 4 of grain's own shuffle, records that follow each
other in an epoch are visibly related: their numbers correlate by 0.4 for a million records. With 16 no trace is left.
"""


def shuffled(index: int, num_records: int, *, seed: int, epoch: int) -> int:
    """Return the record at a place of an epoch's permutation.

    Args:
      index: place within the epoch, in [0, num_records).
      num_records: length of the permutation.
      seed: seed of the run; neighbouring seeds share no permutations.
      epoch: epoch of the run, from 0.
    """
    if num_records <= _TABLE_RECORDS:
        return int(_permutation(num_records, seed, epoch)[index])
    # With a largest index of 4^k grain's permutation (0.2.18) misses one record and repeats another, so the one over
    # an index more is used, following its cycle where it leads to the index that does not exist.
    largest = num_records if (num_records - 1).bit_count() == 1 else num_records - 1
    index = index_shuffle(index, largest, _epoch_seed(seed, epoch), _ROUNDS)
    while index >= num_records:
        index = index_shuffle(index, largest, _epoch_seed(seed, epoch), _ROUNDS)
    return index


@functools.lru_cache(maxsize=64)
def _permutation(num_records: int, seed: int, epoch: int) -> Int64[np.ndarray, " N"]:
    # Sorted random keys: unlike np.random's own permutations, seed sequences promise never to change.
    keys = np.random.SeedSequence((seed, epoch)).generate_state(num_records, np.uint64)
    return np.argsort(keys, kind="stable")


@functools.lru_cache(maxsize=16)
def _epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


class Sampler:
    """Gives the microbatches of a run's steps."""

    def __init__(
        self,
        sequences: Sequence[np.ndarray],
        *,
        seed: int,
        num_microbatches: int,
        microbatch_size: int,
        repeat: bool,
    ) -> None:
        """Set up; reads nothing.

        Args:
          sequences: the records, each int32[T + 1].
          seed: seed of the permutations.
          num_microbatches: microbatches of a step (M).
          microbatch_size: sequences of a microbatch (B).
          repeat: whether another epoch follows the first one.

        Raises:
          DataError: there are no records.
        """
        if not len(sequences):
            raise DataError("no training sequences; there is nothing to sample from")
        assert len(sequences) <= 2**32, "the index permutation has 32 bits"
        self._sequences = sequences
        self._seed = seed
        self._num_microbatches = num_microbatches
        self._microbatch_size = microbatch_size
        self._repeat = repeat

    def require_enough(self, steps: int) -> None:
        """Raise DataError, with the counts, if the run needs more records than there are and may not repeat."""
        needed = steps * self._num_microbatches * self._microbatch_size
        if needed > len(self._sequences) and not self._repeat:
            possible = len(self._sequences) // (self._num_microbatches * self._microbatch_size)
            raise DataError(
                f"{steps} steps of {self._num_microbatches} microbatches of {self._microbatch_size} sequences need "
                f"{needed} sequences, the data has {len(self._sequences)}; set --data.repeat true"
                + (f" or --train.steps {possible}" if possible else ", or fewer sequences a step")
            )

    def record_ids(self, step: int, microbatch_id: int) -> Int64[np.ndarray, " B"]:
        """Return the ids of the records of a microbatch.

        Args:
          step: step of the run, from 0.
          microbatch_id: id within the step, in [0, M).

        Raises:
          DataError: the data ends before this microbatch and may not repeat.
        """
        assert step >= 0 and 0 <= microbatch_id < self._num_microbatches, (step, microbatch_id)
        num_records = len(self._sequences)
        first = (step * self._num_microbatches + microbatch_id) * self._microbatch_size
        if not self._repeat and first + self._microbatch_size > num_records:
            raise DataError(
                f"step {step} needs sequence {first + self._microbatch_size} but the data has {num_records}; "
                "set --data.repeat true"
            )
        slots = (divmod(slot, num_records) for slot in range(first, first + self._microbatch_size))
        ids = [shuffled(i, num_records, seed=self._seed, epoch=epoch) for epoch, i in slots]
        return np.asarray(ids, np.int64)

    def microbatch(self, step: int, microbatch_id: int) -> Int32[np.ndarray, "B T+1"]:
        """Return the tokens of a microbatch.

        Args:
          step: step of the run, from 0.
          microbatch_id: id within the step, in [0, M).

        Raises:
          DataError: the data ends before this microbatch and may not repeat, or cannot be read.
        """
        return np.stack([self._sequences[int(i)] for i in self.record_ids(step, microbatch_id)])


class EvaluationMicrobatches(Sequence[np.ndarray]):
    """Microbatches of the sequences ``ids``, read when asked for; rows of PAD fill up the last one."""

    def __init__(self, sequences: Sequence[np.ndarray], ids: Int64[np.ndarray, " N"], microbatch_size: int) -> None:
        self._sequences = sequences
        self._ids = ids
        self._microbatch_size = microbatch_size

    def __len__(self) -> int:
        return -(-len(self._ids) // self._microbatch_size)

    def __getitem__(self, index: int) -> Int32[np.ndarray, "B T+1"]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"microbatch {index} of {len(self)}")
        ids = self._ids[index * self._microbatch_size : (index + 1) * self._microbatch_size]
        rows = np.stack([self._sequences[int(i)] for i in ids])
        return np.pad(rows, ((0, self._microbatch_size - len(rows)), (0, 0)), constant_values=PAD)


def evaluation_microbatches(
    sequences: Sequence[np.ndarray], microbatch_size: int, limit: int | None
) -> EvaluationMicrobatches:
    """Return the microbatches to evaluate on: every sequence once, in order, or an even selection of them.

    Args:
      sequences: the held-out records, each int32[T + 1].
      microbatch_size: sequences of a microbatch (B).
      limit: most microbatches to return; the sequences taken are then spread evenly over all. None: all.

    Returns:
      A sequence of int32[B, T + 1], the last one padded with rows of PAD.
    """
    count = len(sequences) if limit is None else min(len(sequences), limit * microbatch_size)
    ids = np.arange(count, dtype=np.int64) * len(sequences) // max(count, 1)
    return EvaluationMicrobatches(sequences, ids, microbatch_size)
