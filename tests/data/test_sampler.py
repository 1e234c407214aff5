"""Sampling is a pure function of (seed, step, microbatch id) that uses each record once an epoch."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.data.sampler import Sampler, evaluation_microbatches, shuffled
from mecefo_jax.errors import DataError
from mecefo_jax.padding import PAD


def numbered(count: int, width: int = 3) -> list[np.ndarray]:
    """Make records that hold their own number."""
    return [np.full(width, i, np.int32) for i in range(count)]


def sampler(count: int, *, seed: int = 0, shape: tuple[int, int] = (3, 2), repeat: bool = True) -> Sampler:
    return Sampler(numbered(count), seed=seed, num_microbatches=shape[0], microbatch_size=shape[1], repeat=repeat)


def consumed(source: Sampler, steps: int, num_microbatches: int) -> np.ndarray:
    return np.concatenate([source.record_ids(s, m) for s in range(steps) for m in range(num_microbatches)])


@given(
    count=st.integers(1, 60),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    seed=st.integers(0, 2**40),
)
def test_each_epoch_holds_each_record_once(count: int, shape: tuple[int, int], seed: int) -> None:
    steps = -(-3 * count // (shape[0] * shape[1]))
    ids = consumed(sampler(count, seed=seed, shape=shape), steps, shape[0])
    for epoch in range(3):
        assert sorted(ids[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(seed=st.integers(0, 1000), order_seed=st.integers(0, 1000))
def test_the_order_of_access_does_not_matter(seed: int, order_seed: int) -> None:
    first, second = sampler(17, seed=seed), sampler(17, seed=seed)
    keys = [(step, i) for step in range(8) for i in range(3)]
    expected = {key: first.record_ids(*key).tolist() for key in keys}
    shuffled = random.Random(order_seed).sample(keys, len(keys))
    assert {key: second.record_ids(*key).tolist() for key in shuffled} == expected


def test_epochs_and_seeds_are_permuted_differently() -> None:
    count = 600
    epochs = [consumed(sampler(count, seed=seed), 3 * count // 6, 3).reshape(3, count) for seed in (0, 1)]
    orders = {tuple(order) for seed in epochs for order in seed}
    assert len(orders) == 6
    assert tuple(range(count)) not in orders


@pytest.mark.parametrize("count", [2**16, 2**16 + 1, 10**8], ids=["table", "cipher", "large"])
def test_neighbouring_seeds_share_no_epoch(count: int) -> None:
    orders = {
        tuple(shuffled(i, count, seed=seed, epoch=epoch) for i in range(4)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


@pytest.mark.parametrize("count", [2**16, 2**16 + 1, 2**16 + 2])
def test_permutations_are_permutations_on_both_sides_of_the_table(count: int) -> None:
    order = [shuffled(i, count, seed=1, epoch=1) for i in range(count)]
    np.testing.assert_array_equal(np.sort(order), np.arange(count))


@pytest.mark.parametrize("count", [2**16, 2**16 + 2, 10**6])
def test_records_that_follow_each_other_are_unrelated(count: int) -> None:
    num_draws = 30_000
    order = np.array([shuffled(i, count, seed=1, epoch=1) for i in range(num_draws)])
    for lag in (1, 2, 4, 16):
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(num_draws), lag  # 4 standard deviations of independent draws


def test_permutations_never_change() -> None:
    # A resumed run must see the records of the run that it resumes, whatever was upgraded in between.
    table = [shuffled(i, 10, seed=0, epoch=0) for i in range(10)]
    cipher = [shuffled(i, 10**6, seed=0, epoch=0) for i in range(4)]
    assert (table, cipher) == ([4, 9, 2, 6, 8, 3, 5, 7, 1, 0], [400413, 992172, 896713, 169901])


def test_how_steps_are_divided_among_microbatches_keeps_the_order_of_records() -> None:
    few, many = sampler(50, shape=(2, 6)), sampler(50, shape=(6, 2))
    np.testing.assert_array_equal(consumed(few, 9, 2), consumed(many, 9, 6))


def test_microbatch_holds_the_records_of_its_ids() -> None:
    source = sampler(20)
    tokens = source.microbatch(5, 2)
    assert tokens.dtype == np.int32
    assert tokens.shape == (2, 3)
    np.testing.assert_array_equal(tokens[:, 0], source.record_ids(5, 2))


def test_too_few_records_are_refused_with_the_counts() -> None:
    source = sampler(20, repeat=False)
    source.require_enough(3)
    with pytest.raises(DataError, match=r"4 steps .* need 24 sequences, the data has 20; .*repeat.*steps 3"):
        source.require_enough(4)
    sampler(20, repeat=True).require_enough(10**6)


def test_less_than_one_step_of_records_is_refused() -> None:
    with pytest.raises(DataError, match=r"need 6 sequences, the data has 5; set --data.repeat true, or fewer"):
        sampler(5, repeat=False).require_enough(1)


def test_the_end_of_the_data_is_an_error_even_unasked() -> None:
    source = sampler(20, repeat=False)
    source.record_ids(3, 0)
    with pytest.raises(DataError, match="step 3 needs sequence 22 but the data has 20"):
        source.record_ids(3, 1)


def test_no_records_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="no training sequences"):
        sampler(0)


@given(count=st.integers(0, 40), size=st.integers(1, 9))
def test_evaluation_sees_each_sequence_once_in_order(count: int, size: int) -> None:
    batches = list(evaluation_microbatches(numbered(count), size, None))
    assert all(batch.shape == (size, 3) and batch.dtype == np.int32 for batch in batches)
    rows = np.concatenate(batches)[:, 0] if batches else np.zeros(0, np.int32)
    np.testing.assert_array_equal(rows[:count], np.arange(count))
    assert np.all(rows[count:] == PAD)
    assert len(rows) - count < size


@given(count=st.integers(1, 100), size=st.integers(1, 6), limit=st.integers(1, 6))
def test_limited_evaluation_is_spread_over_all_sequences(count: int, size: int, limit: int) -> None:
    batches = list(evaluation_microbatches(numbered(count), size, limit))
    rows = np.concatenate(batches)[:, 0]
    rows = rows[rows != PAD]
    taken = min(count, size * limit)
    assert len(batches) <= limit
    assert len(set(rows)) == len(rows) == taken
    assert np.all(np.abs(np.diff(np.append(rows, count)) - count / taken) <= 1)


def test_seven_sequences_fill_one_microbatch_of_eight() -> None:
    (batch,) = evaluation_microbatches(numbered(7), 8, None)
    np.testing.assert_array_equal(batch[:, 0], [0, 1, 2, 3, 4, 5, 6, PAD])
    assert np.all(batch[7] == PAD)
