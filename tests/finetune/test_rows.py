"""Examples as rows: what is in them, what is cut off, and in which order they come."""

import numpy as np
import pytest

from mecefo_jax.data.tokenizer import ByteTokenizer
from mecefo_jax.finetune.rows import bucket, encode, epoch_order
from mecefo_jax.finetune.tasks import Example, make_task

BOS = 256


def rows_of(*examples, max_length=16):
    made = [Example(tuple(texts), label, "here") for *texts, label in examples]
    return encode(made, make_task("task", made, made), ByteTokenizer(), max_length)


def test_texts_stand_as_documents_did():
    rows = rows_of(("ab", "c", "no"), ("", "d", "yes"))
    assert [list(tokens) for tokens in rows.tokens] == [[BOS, *b"ab", BOS, *b"c"], [BOS, BOS, *b"d"]]
    batch = rows.batch([1, 0], 3, 6)
    assert batch.tolist() == [[BOS, BOS, 100, -1, -1, -1, 1], [BOS, 97, 98, BOS, 99, -1, 0], [-1] * 6 + [0]]


def test_numbers_travel_as_their_bits():
    rows = rows_of(("a", 0.25), ("b", -3))
    batch = rows.batch(np.array([1, 0]), 3, 4)
    np.testing.assert_array_equal(batch[:, -1].view(np.float32), [-3.0, 0.25, 0.0])


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (("abcdefgh",), ("abcde",)),
        (("abcde",), ("abcde",)),
        (("abcdefgh", "ij"), ("ab", "ij")),
        (("a", "bcdefgh"), ("a", "bcd")),
        (("abcdefgh", "ijklmno"), ("ab", "ij")),
        (("ab", "cd"), ("ab", "cd")),
        (("abc", "d"), ("abc", "d")),
        (("abcdefgh", ""), ("abcd", "")),
    ],
)
def test_what_is_too_long_loses_its_end(texts, kept):
    """Six tokens, of which each text's BOS is one."""
    rows = rows_of((*texts, 0), (*texts, 1), max_length=6)
    assert list(rows.tokens[0]) == [token for text in kept for token in (BOS, *text.encode())]
    assert rows.truncated == (0 if texts == kept else 2)


def test_buckets_are_few():
    assert [bucket(length, 100) for length in (1, 16, 17, 32, 33, 64, 65, 100)] == [16, 16, 32, 32, 64, 64, 100, 100]
    assert bucket(5, 8) == 8


def test_each_epoch_is_another_permutation_and_the_same_each_time():
    orders = [epoch_order(50, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for number, order in enumerate(orders):
        assert sorted(order) == list(range(50))
        assert all((order != other).any() for other in orders[:number])
    np.testing.assert_array_equal(orders[1], epoch_order(50, 0, 1))
