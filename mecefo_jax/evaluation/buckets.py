"""Rows of many lengths, put into batches of few shapes, so that few programs are compiled."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

_SHORTEST = 32
"""A row shorter than this costs as much as one of this length, and would cost a compilation of its own."""

_STEP = 64
"""Attention kernels of accelerators want lengths that they can cut into blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that are computed together."""

    rows: tuple[int, ...]
    """Their numbers, from 0; no more than a batch has room for."""
    length: int
    """What all of them are padded to, in tokens."""


def bucket(length: int, longest: int) -> int:
    """What a row is padded to: a power of two, 32 at least; or ``longest`` in whole 64s, where that is less."""
    assert 0 < length <= longest, (length, longest)
    return min(max(_SHORTEST, 1 << (length - 1).bit_length()), -(-longest // _STEP) * _STEP)


def batches(lengths: Sequence[int], *, batch_size: int, longest: int) -> Iterator[Batch]:
    """Rows by falling length, in batches of one padded length each.

    The longest come first, so that what does not fit in memory fails at once, and not after hours.

    Args:
        lengths: of each row, in tokens.
        batch_size: most rows of a batch.
        longest: longest that a row may be.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    start = 0
    while start < len(order):
        padded = bucket(lengths[order[start]], longest)
        rows = [row for row in order[start : start + batch_size] if bucket(lengths[row], longest) == padded]
        yield Batch(rows=tuple(rows), length=padded)
        start += len(rows)


def padded_rows(rows: Sequence[Sequence[int]], num_rows: int, length: int, fill: int) -> Int32[np.ndarray, "B T"]:
    """Rows of token ids on the left of an array ``[num_rows, length]``, the rest of which is ``fill``."""
    array_BT = np.full((num_rows, length), fill, np.int32)
    for number, row in enumerate(rows):
        array_BT[number, : len(row)] = row
    return array_BT
