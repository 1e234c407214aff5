"""Seeded failures: reproducible, independent of how they are asked for, and as frequent as the paper says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError
from mecefo_jax.faults.scenario import HOURS, SeededFailures
from mecefo_jax.faults.source import make_fault_source

TIMINGS = st.sampled_from(["random", "regular"])


def make(**changes):
    settings_ = {"fail_every": 5.0, "back_after": 12.0, "timing": "random", "seed": 0} | changes
    return SeededFailures(8, 2, **settings_)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    timing=TIMINGS,
    fail_every=st.floats(0.1, 30),
    back_after=st.floats(0.01, 60),
    steps=st.lists(st.integers(0, 300), min_size=1, max_size=30),
)
def test_live_is_a_pure_function_of_the_step(seed, timing, fail_every, back_after, steps):
    options = {"seed": seed, "timing": timing, "fail_every": fail_every, "back_after": back_after}
    ascending = make(**options)
    expected = {step: ascending.live(step) for step in sorted(steps)}
    any_order = make(**options)
    for step in steps:
        np.testing.assert_array_equal(any_order.live(step), expected[step])
        restarted = make(**options)
        np.testing.assert_array_equal(restarted.live(step), expected[step])


@settings(max_examples=60, deadline=None)
@given(
    num_nodes=st.integers(1, 12),
    fail_every=st.floats(1, 10),
    back_after=st.floats(0.01, 30),
    timing=TIMINGS,
    seed=st.integers(0, 999),
)
def test_every_outage_hits_a_live_unit_and_lasts_as_configured(num_nodes, fail_every, back_after, timing, seed):
    source = SeededFailures(num_nodes, 1, fail_every=fail_every, back_after=back_after, timing=timing, seed=seed)
    live = np.stack([source.live(step)[:, 0] for step in range(200)])
    down = 200 - live.sum(axis=0)
    assert live.shape == (200, num_nodes)
    for node in range(num_nodes):
        edges = np.flatnonzero(np.diff(live[:, node].astype(int), prepend=1))
        for start, end in zip(edges[::2], edges[1::2], strict=False):
            # Outages of a unit may touch, so that several look like one; none is cut short.
            assert end - start >= math.floor(back_after)
    # At most one unit fails at a time: over 200 steps, no more outages than gaps fit in when they are regular.
    if timing == "regular":
        assert down.sum() <= math.ceil(199 / fail_every) * math.ceil(back_after)


def test_a_unit_is_dead_from_its_failure_until_just_before_it_is_back():
    source = SeededFailures(1, 1, fail_every=10.0, back_after=4.0, timing="regular", seed=3)
    dead = [step for step in range(30) if not source.live(step).all()]
    assert dead == [10, 11, 12, 13, 20, 21, 22, 23]


def test_fractional_times_round_to_the_steps_that_they_contain():
    source = SeededFailures(1, 1, fail_every=2.5, back_after=1.0, timing="regular", seed=0)
    # Dead in [2.5, 3.5), [5, 6), [7.5, 8.5).
    assert [step for step in range(9) if not source.live(step).all()] == [3, 5, 8]


def test_a_failure_with_nobody_left_to_fail_is_skipped():
    source = SeededFailures(2, 1, fail_every=1.0, back_after=5.0, timing="regular", seed=0)
    down = [int((~source.live(step)).sum()) for step in range(13)]
    # Two fail at 1 and 2; those of 3, 4 and 5 find nobody; the unit back at 6 fails again at 6, and so on.
    assert down == [0, 1] + [2] * 11


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), timing=TIMINGS, factor=st.sampled_from([2, 4, 8]))
def test_frequency_replays_the_same_failures_faster(seed, timing, factor):
    # Powers of two, so that the times scale without rounding.
    config = FaultsConfig(scenario="steps", fail_every_steps=40.0, back_after_steps=64.0, timing=timing)
    slow = make_fault_source(config, num_nodes=8, seed=seed)
    options = {"scenario": "steps", "fail_every_steps": 40.0, "back_after_steps": 64.0, "timing": timing}
    fast = make_fault_source(FaultsConfig(**options, frequency=float(factor)), num_nodes=8, seed=seed)
    for step in range(60):
        np.testing.assert_array_equal(fast.live(step), slow.live(factor * step))


@pytest.mark.parametrize(("scenario", "mean_down"), [("low", 2.0), ("mid", 3.0), ("high", 4.0)])
def test_paper_scenarios_have_the_paper_s_mean_of_nodes_down(scenario, mean_down):
    # The number down is that of an M/D/infinity queue with rate 1/G and time D, so its time average over T has
    # variance below (D / G) D / T; sampling each quarter of D adds little. Five deviations: one in 10^6.
    gap, outage = HOURS[scenario]
    config = FaultsConfig(scenario=scenario, step_seconds=3600 * outage / 4)
    source = make_fault_source(config, num_nodes=32, seed=7)
    num_steps = 8000
    down = np.array([np.sum(~source.live(step)) for step in range(8, 8 + num_steps)])
    hours = num_steps * outage / 4
    tolerance = 5 * math.sqrt(outage / gap * outage / hours)
    assert tolerance < 0.25
    assert abs(down.mean() - mean_down) < tolerance
    # Poisson: the variance equals the mean; a constant number down would show here.
    assert 0.8 * mean_down < down.var() < 1.2 * mean_down


def test_random_gaps_are_exponential_and_victims_uniform():
    source = SeededFailures(16, 1, fail_every=4.0, back_after=0.5, timing="random", seed=1)
    source.live(80_000)
    starts, victims = np.array(source._starts), np.array(source._units)
    gaps = np.diff(starts)
    deviation = 1 / math.sqrt(len(gaps))
    assert abs(gaps.mean() / 4.0 - 1) < 5 * deviation
    assert abs(np.mean(gaps > 4.0) - math.exp(-1)) < 5 * deviation * 0.5
    counts = np.bincount(victims, minlength=16)
    expected = len(victims) / 16
    # Chi-square with 15 degrees of freedom exceeds 50 once in 10^5.
    assert np.sum((counts - expected) ** 2 / expected) < 50


def test_seeds_differ():
    histories = {tuple(np.packbits([make(seed=seed).live(step) for step in range(60)])) for seed in range(10)}
    assert len(histories) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "train.seed=-1"),
        ({"back_after": 0.0}, "positive"),
        ({"back_after": math.inf}, "positive"),
        ({"fail_every": 0.01}, "more than once a step"),
        ({"fail_every": math.nan}, "more than once a step"),
    ],
)
def test_times_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)
