"""Examples as rows of token ids, and their order: each epoch a new permutation, drawn from the seed.

A text is encoded as documents were in pre-training: BOS, then its tokens; two texts follow each other in the same way.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Int32

from mecefo_jax.data import PAD, Tokenizer
from mecefo_jax.finetune.tasks import Example, Task

_SHORTEST = 16
"""Shorter sequences cost as much as one of this length, and would cost a compilation of their own."""
# Keeps this stream apart from others that are seeded with the run's seed alone.
_STREAM_TAG = 0xF17E


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Encoded examples (E)."""

    tokens: tuple[Int32[np.ndarray, " T"], ...]
    """Of each example, without padding."""
    labels_E: Int[np.ndarray, " E"] | Float[np.ndarray, " E"]
    """int32 numbers of classes, or float32 numbers."""
    truncated: int
    """Examples that were too long and lost the ends of their texts."""

    def __len__(self) -> int:
        return len(self.tokens)

    def longest(self, indices: Sequence[int] | np.ndarray) -> int:
        """Length of the longest of some examples, in tokens."""
        return max(len(self.tokens[index]) for index in indices)

    def batch(self, indices: Sequence[int] | np.ndarray, num_rows: int, length: int) -> Int32[np.ndarray, "B T1"]:
        """Some examples, padded on the right and followed by their labels (a float32's bits); then rows of padding."""
        rows_BT1 = np.full((num_rows, length + 1), PAD, np.int32)
        for row, index in enumerate(indices):
            rows_BT1[row, : len(self.tokens[index])] = self.tokens[index]
        rows_BT1[:, -1] = 0  # read as a float, PAD would be NaN, which spoils gradients even where it is left out
        rows_BT1[: len(indices), -1] = self.labels_E[indices].view(np.int32)
        return rows_BT1


def encode(examples: Sequence[Example], task: Task, tokenizer: Tokenizer, max_length: int) -> Rows:
    """Encode examples.

    Args:
        examples: of the task.
        task: says what their labels stand for.
        tokenizer: the model's.
        max_length: most tokens of an example, at least 4; the longer of its texts is cut first, at its end.

    Raises:
        DataError: the tokenizer cannot encode a text.
    """
    texts = [tokenizer.encode_batch([example.texts[part] for example in examples]) for part in range(_parts(examples))]
    numbers = {label: number for number, label in enumerate(task.labels)}
    labels = [example.label if task.is_regression else numbers[example.label] for example in examples]  # type: ignore[index]
    bos, tokens, truncated = np.array([tokenizer.bos_id], np.int32), [], 0
    for parts in zip(*texts, strict=True):
        kept = _cut(parts, max_length - len(parts))
        truncated += sum(map(len, kept)) < sum(map(len, parts))
        tokens.append(np.concatenate([piece for part in kept for piece in (bos, part)]))
    dtype = np.float32 if task.is_regression else np.int32
    return Rows(tokens=tuple(tokens), labels_E=np.array(labels, dtype), truncated=truncated)


def bucket(length: int, max_length: int) -> int:
    """What rows of this length are padded to: a power of two, no less than 16 and no more than ``max_length``."""
    assert 0 < length <= max_length, (length, max_length)
    return min(max(_SHORTEST, 1 << (length - 1).bit_length()), max_length)


def epoch_order(num_examples: int, seed: int, epoch: int) -> Int[np.ndarray, " E"]:
    """The order of the examples in an epoch (from 0)."""
    seeds = np.random.SeedSequence([_STREAM_TAG, seed, epoch])
    return np.random.Generator(np.random.Philox(seeds)).permutation(num_examples)


def _parts(examples: Sequence[Example]) -> int:
    counts = {len(example.texts) for example in examples}
    assert len(counts) == 1, counts
    return counts.pop()


def _cut(parts: Sequence[np.ndarray], room: int) -> list[np.ndarray]:
    """The beginnings of one or two texts that fit: where one is short, the other gets what that leaves."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = map(len, parts)
    half = room // 2
    first_room = room - second if second <= half else max(half, room - second)
    kept = min(first, first_room)
    return [parts[0][:kept], parts[1][: room - kept]]
