"""Batches of rows: every row once, in few shapes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.evaluation.buckets import batches, bucket, padded_rows


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 7))
def test_every_row_is_in_one_batch_that_holds_it(lengths, batch_size):
    made = list(batches(lengths, batch_size=batch_size, longest=300))
    assert sorted(row for batch in made for row in batch.rows) == list(range(len(lengths)))
    for batch in made:
        assert 0 < len(batch.rows) <= batch_size
        assert all(bucket(lengths[row], 300) == batch.length for row in batch.rows)
    assert [batch.length for batch in made] == sorted((batch.length for batch in made), reverse=True)
    shapes = {bucket(length, 300) for length in lengths}
    # Only the last batch of a shape may have room left.
    assert len(made) <= len(lengths) // batch_size + len(shapes)


@given(st.integers(1, 5000))
def test_padding_less_than_doubles_a_row(length):
    padded = bucket(length, 5000)
    assert length <= padded <= max(32, 2 * length - 1)
    assert padded.bit_count() == 1 or padded == 5056  # 79 x 64


def test_rows_lie_on_the_left():
    rows = padded_rows([[1, 2, 3], [4]], num_rows=3, length=4, fill=-1)
    np.testing.assert_array_equal(rows, [[1, 2, 3, -1], [4, -1, -1, -1], [-1, -1, -1, -1]])
