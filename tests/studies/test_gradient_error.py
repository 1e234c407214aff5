"""The gradient under a plan, put together from parts, is the one that the executor computes."""

import dataclasses

import jax
import numpy as np
import pytest

from mecefo_jax.config import BasisConfig, FaultsConfig, MeshConfig
from mecefo_jax.model import init_model
from mecefo_jax.optimizer import basis_state
from mecefo_jax.step import Sums, average_gradients
from mecefo_jax.studies import gradient_error
from mecefo_jax.studies.gradient_error import GROUPS, StepError, Trial, relative_norms
from tests.tiny import NODES, VOCAB, make_executor, plan_for, source, tiny_config

ONE = MeshConfig(num_nodes=NODES, num_submeshes=1)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "policy"), [(3, "neighbor"), (1, "balanced"), (1, "drop")])
def test_agrees_with_the_executor(stages, policy, monkeypatch):
    granularity = {"granularity": "stage", "num_stages": stages} if stages > 1 else {}
    config = tiny_config(ONE, faults=FaultsConfig(**granularity), basis=BasisConfig(rank=4, method="svd"))
    executor = make_executor(config)
    dead = [(3, 1)] if stages > 1 else [3]
    plan = plan_for(dead, policy, config)
    healthy = plan_for([], policy, config)
    state = executor.state
    exact, under = (
        average_gradients(_whole(executor.step_sums(0, plan, source)[0].tree), config.degraded)
        for plan in (healthy, plan)
    )
    expected = relative_norms(jax.tree.map(np.subtract, under, exact), exact)
    monkeypatch.setattr(gradient_error, "_draw", lambda config, step, down: plan.live_NS)
    monkeypatch.setattr(gradient_error, "_plan", lambda *arguments: plan)
    error = StepError(config, VOCAB, source)
    error.remember(0, state, [1])
    trial = Trial(1, policy, "paper", "weight", 4, 1)
    rows = error(0, state, [trial])
    found, of_mean = ({row["group"]: row[what] for row in rows} for what in ("error", "of_mean"))
    assert set(found) == set(GROUPS)
    # The bases of the executor come from iteration, those of the study from an SVD: the same spans but for rounding.
    np.testing.assert_allclose([found[g] for g in GROUPS], [expected[g] for g in GROUPS], rtol=5e-3, atol=1e-6)
    assert found["all"] > 1e-3
    assert of_mean["all"] < 0.7 * found["all"], "gradients of random tokens are noise"
    assert basis_state(state.opt_state).refreshes == 0


def test_of_batches_that_are_alike_the_mean_error_is_each_ones():
    config = tiny_config(ONE, basis=BasisConfig(rank=4))
    error = StepError(config, VOCAB, lambda step, number: source(0, number))
    state = make_executor(config).state
    error.remember(0, state, [1])
    rows = error(0, state, [Trial(1, "neighbor", "paper", "weight", 4, 1)])
    assert [row["of_mean"] for row in rows] == pytest.approx([row["error"] for row in rows], rel=1e-5)


def _whole(sums: Sums) -> Sums:
    return jax.tree.map(lambda leaf: leaf[0], sums)


def test_relative_norms_by_group():
    params = init_model(tiny_config().model, VOCAB, 0)
    exact = jax.tree.map(lambda leaf: np.ones_like(leaf), params)
    assert relative_norms(exact, exact) == dict.fromkeys(GROUPS, 1.0)
    embedding_off = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (2 if "embedding" in jax.tree_util.keystr(path) else 0), exact
    )
    errors = relative_norms(embedding_off, exact)
    assert (errors["feed-forward"], errors["attention"]) == (0.0, 0.0)
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in (("all", exact),)}
    assert errors["all"] == pytest.approx(np.sqrt(4 * params.embedding[...].size / sizes["all"]))


def test_trials_cover_policies_sources_ranks_and_periods():
    trials = gradient_error.trials(dataclasses.replace(tiny_config(), basis=BasisConfig(rank=8, refresh_every=5)))
    assert {trial.policy for trial in trials} == {"neighbor", "balanced", "drop"}
    assert {trial.rank for trial in trials} == {None, 2, 4, 8, 16, 32}
    assert {trial.period for trial in trials} == {None, 1, 5, 20, 80}
    assert all((trial.backward is None) == (trial.policy == "drop") for trial in trials)
    sampled = {"sampled 1/2", "sampled", "sampled to 1/8"}
    assert {trial.backward for trial in trials if trial.source is None} == {None, *sampled}
    assert len(set(trials)) == len(trials)


def test_some_node_is_always_whole():
    config = dataclasses.replace(tiny_config(), faults=FaultsConfig(granularity="stage", num_stages=3))
    for step in range(30):
        live_NS = gradient_error._draw(config, step, NODES)
        assert (~live_NS).sum() == NODES and live_NS.all(axis=1).any()
