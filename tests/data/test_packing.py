"""Packing neither loses, nor repeats, nor reorders a token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.data.packing import Packer, join_documents, pad_record
from mecefo_jax.padding import PAD


@given(
    pieces=st.lists(st.integers(0, 30), max_size=12),
    seq_len=st.integers(1, 9),
)
def test_records_cover_the_stream_whatever_the_pieces(pieces: list[int], seq_len: int) -> None:
    stream = np.arange(sum(pieces), dtype=np.int32)
    packer = Packer(seq_len)
    records = [record for piece in np.split(stream, np.cumsum(pieces)[:-1]) for record in packer.push(piece)]
    last = packer.finish()
    for k, record in enumerate(records):
        np.testing.assert_array_equal(record, stream[k * seq_len : (k + 1) * seq_len + 1])
        assert len(record) == seq_len + 1
    predicted = [token for record in records for token in record[1:]]
    if last is not None:
        assert 2 <= len(last) <= seq_len
        assert last[0] == len(records) * seq_len
        predicted += list(last[1:])
    np.testing.assert_array_equal(predicted, stream[1:])


def test_pieces_may_be_overwritten_after_pushing() -> None:
    packer = Packer(4)
    piece = np.array([1, 2, 3], np.int32)
    packer.push(piece)
    piece[:] = 0
    np.testing.assert_array_equal(packer.push(np.array([4, 5], np.int32)), [[1, 2, 3, 4, 5]])


def test_each_document_begins_with_bos() -> None:
    documents = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    np.testing.assert_array_equal(join_documents(documents, 9), [9, 1, 2, 9, 3])
    assert join_documents([], 9).shape == (0,)


def test_padding_is_no_token() -> None:
    np.testing.assert_array_equal(pad_record(np.array([5, 0], np.int32), 3), [5, 0, PAD, PAD])
    assert PAD < 0
