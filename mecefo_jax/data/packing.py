"""Cuts a stream of tokens into training records.

Documents are laid end to end, each with BOS in front. Record ``k`` holds the tokens ``[k T, (k + 1) T]`` of the
stream, ``T`` being the sequence length: one more than it predicts, so that consecutive records share a token and
every token but the stream's first is predicted exactly once. The last record may be shorter.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from mecefo_jax.padding import PAD


def join_documents(documents: Sequence[Int32[np.ndarray, " T"]], bos_id: int) -> Int32[np.ndarray, " T"]:
    """Return the ids of documents end to end, each with BOS in front.

    Args:
      documents: ids of each document.
      bos_id: the id to put in front of each.
    """
    bos = np.asarray([bos_id], np.int32)
    parts = [part for document in documents for part in (bos, document)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


class Packer:
    """Turns a stream of tokens, given piece by piece, into records of ``seq_len + 1`` tokens."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._rest = np.zeros(0, np.int32)

    def push(self, tokens: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, "N T+1"]:
        """Append tokens to the stream and return the records that are now complete."""
        stream = np.concatenate([self._rest, tokens])
        num_records = max(0, (len(stream) - 1) // self._seq_len)
        self._rest = stream[num_records * self._seq_len :].copy()
        if num_records == 0:
            return np.zeros((0, self._seq_len + 1), np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(stream, self._seq_len + 1)
        return windows[:: self._seq_len][:num_records]

    def finish(self) -> Int32[np.ndarray, " T"] | None:
        """Return the last, shorter record; None if no token is left to predict."""
        return self._rest if len(self._rest) > 1 else None


def pad_record(record: Int32[np.ndarray, " T"], seq_len: int) -> Int32[np.ndarray, " T+1"]:
    """Return a record filled up with PAD to ``seq_len + 1`` tokens."""
    return np.pad(record, (0, seq_len + 1 - len(record)), constant_values=PAD)
