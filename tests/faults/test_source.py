"""Fault sources by config: none, persistent, and settings that do not fit."""

import numpy as np
import pytest

from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError
from mecefo_jax.faults import make_fault_source
from mecefo_jax.faults.timeline import live_history, statistics


@pytest.mark.parametrize(("options", "num_stages"), [({}, 1), ({"granularity": "stage", "num_stages": 4}, 4)])
def test_without_failures_every_unit_lives_at_every_step(options, num_stages):
    source = make_fault_source(FaultsConfig(**options), num_nodes=3, seed=0)
    for step in (0, 10**9):
        live = source.live(step)
        assert live.shape == (3, num_stages) and live.dtype == bool and live.all()


def test_persistent_nodes_are_dead_at_every_step_in_all_stages():
    config = FaultsConfig(scenario="persistent", persistent_nodes=(1, 3), granularity="stage", num_stages=2)
    source = make_fault_source(config, num_nodes=4, seed=0)
    for step in (0, 1, 10**9):
        np.testing.assert_array_equal(source.live(step), [[True] * 2, [False] * 2, [True] * 2, [False] * 2])


@pytest.mark.parametrize("node", [-1, 4])
def test_a_persistent_node_that_does_not_exist_is_refused(node):
    with pytest.raises(ConfigError, match=f"persistent_nodes={node}.*0 to 3"):
        make_fault_source(FaultsConfig(scenario="persistent", persistent_nodes=(node,)), num_nodes=4, seed=0)


def test_frequency_is_not_silently_ignored():
    config = FaultsConfig(scenario="script", script="fail 0 at 1", frequency=2.0)
    with pytest.raises(ConfigError, match="frequency=2 has no meaning"):
        make_fault_source(config, num_nodes=4, seed=0)


def test_changing_what_live_returned_does_not_change_the_source():
    for config in (FaultsConfig(), FaultsConfig(scenario="steps")):
        source = make_fault_source(config, num_nodes=4, seed=0)
        source.live(0)[:] = False
        assert source.live(0).all()


@pytest.mark.parametrize("scenario", ["low", "mid", "high", "steps"])
def test_scenarios_start_healthy_and_use_the_stages(scenario):
    config = FaultsConfig(scenario=scenario, granularity="stage", num_stages=4, step_seconds=600.0)
    source = make_fault_source(config, num_nodes=8, seed=0)
    assert source.live(0).all()
    live = np.stack([source.live(step) for step in range(300)])
    assert live.shape == (300, 8, 4)
    # Single stages fail: at some step a node has both live and dead ones.
    assert np.any(live.any(axis=2) & ~live.all(axis=2))


def test_statistics_count_what_a_run_would_see():
    config = FaultsConfig(scenario="script", script="fail 0 at 0, back at 2; fail 1 at 1; fail 0 at 3, back at 4")
    seen = statistics(live_history(make_fault_source(config, num_nodes=4, seed=0), 5))
    # Units down at steps 0 to 4: 1, 2, 1, 2, 1.
    assert (seen.failures, seen.recoveries, seen.max_down, seen.healthy_fraction) == (3, 2, 2, 0.0)
    assert seen.mean_down == pytest.approx(7 / 5)
