"""Runs of studies see the failures of their scenario, without the steps that a cluster would wait out."""

import dataclasses

import numpy as np
import pytest

from mecefo_jax.config import FaultsConfig
from mecefo_jax.faults import make_fault_source
from mecefo_jax.membership import plan_for, run_degraded_costs
from mecefo_jax.studies.small_runs import HOURS, NODES, small_run, wait_out


def live(config):
    source = make_fault_source(config.faults, num_nodes=config.mesh.num_nodes, seed=config.train.seed)
    return np.stack([source.live(step) for step in range(config.train.steps)])


def test_an_eighth_of_the_units_is_down_under_high():
    down = [1 - live(small_run("1M", "node", seed=seed, scenario="high")).mean() for seed in range(20)]
    assert np.mean(down) == pytest.approx(1 / 8, abs=0.02)


def test_each_unit_fails_as_often_as_the_papers():
    config = small_run("1M", "node", seed=0, scenario="high")
    failures = config.train.steps / config.faults.fail_every_steps
    assert failures / NODES == pytest.approx(HOURS / 0.5 / 32)


@pytest.mark.parametrize("dead", range(1, 7))
def test_with_the_papers_pass_auto_does_what_balanced_does_where_whole_nodes_fail(dead):
    plans = {}
    for policy in ("auto", "balanced"):
        config = small_run("1M", "node", seed=0, variant=(policy, "paper", "momentum"))
        live_NS = np.ones((NODES, 1), bool)
        live_NS[:dead] = False
        plans[policy] = plan_for(config, live_NS, run_degraded_costs(config, 258))
    assert plans["auto"].policy == "balanced"
    for name in ("assignee_MS", "level_MS"):
        np.testing.assert_array_equal(getattr(plans["auto"], name), getattr(plans["balanced"], name))


def test_auto_expects_noise_of_samples():
    config = small_run("1M", "node", seed=0, variant=("auto", "sampled 1/2", None))
    live_NS = np.ones((NODES, 1), bool)
    live_NS[3] = False
    plan = plan_for(config, live_NS, run_degraded_costs(config, 258))
    balanced = plan_for(
        dataclasses.replace(config, faults=dataclasses.replace(config.faults, policy="balanced")),
        live_NS,
        run_degraded_costs(config, 258),
    )
    assert plan.choice.prospects["balanced"].error == pytest.approx(7 * np.sqrt(0.2 * balanced.degraded_share / 128))


def test_steps_without_a_plan_are_left_out_and_no_others():
    """Two nodes of two stages; both are cut in steps 2 to 5, and stage 0 is missing in steps 4 and 5."""
    config = small_run("1M", "stage", seed=0, quick=True)
    script = "fail 0.0 at 2, back at 6; fail 1.1 at 1, back at 5; fail 1.0 at 4, back at 7"
    mesh = dataclasses.replace(config.mesh, num_nodes=2)
    kept_by = {"drop": [0, 1, *range(6, 12)], "reroute": [0, 1, 2, 3, *range(6, 10)], "neighbor": range(8)}
    for policy, kept in kept_by.items():
        faults = FaultsConfig(scenario="script", script=script, granularity="stage", num_stages=2, policy=policy)
        whole = dataclasses.replace(config, mesh=mesh, faults=faults)
        longer = dataclasses.replace(whole, train=dataclasses.replace(whole.train, steps=12))
        np.testing.assert_array_equal(live(wait_out(whole)), live(longer)[list(kept)])
