"""Steps on the cluster: copies that stay equal, nodes that come and go, one compilation, evaluation on any number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.batches import in_parts
from mecefo_jax.config import BasisConfig, DegradedConfig, MeshConfig
from mecefo_jax.data import evaluation_microbatches
from mecefo_jax.executor import Executor
from mecefo_jax.mesh import Work
from mecefo_jax.model import loss_sum
from mecefo_jax.node_program import Flat
from mecefo_jax.optimizer import basis_state
from mecefo_jax.takeover import make_plan
from tests.tiny import (
    FOUR_DEVICES,
    NODES,
    ONE_DEVICE,
    SEQ,
    VOCAB,
    assert_trees_equal,
    make_executor,
    plan_for,
    source,
    tiny_config,
)

# Who is dead, step by step: two neighbours at once; the neighbour dies while it covers; all but one; a node back in the
# very next step; the last holder of the state dies as another one comes back; full recovery.
HISTORY = [(), (3, 4), (3, 4, 5), (3,), (), (0, 1, 2, 3, 4, 6, 7), (0, 1, 2, 3, 5, 6, 7), (2,), ()]


def states_of(executor: Executor) -> dict:
    return {index: jax.device_get(state.tree) for index, state in executor._states.items()}


@pytest.mark.parametrize("policy", ["neighbor", "reroute", "balanced", "drop"])
def test_copies_stay_bit_equal_through_every_failure_and_nothing_recompiles(policy):
    config = tiny_config(ONE_DEVICE)
    executor = make_executor(config)
    compilations = None
    for step, dead in enumerate(HISTORY):
        plan = plan_for(dead, policy, config)
        metrics = executor.train_step(step, plan, source)
        np.testing.assert_array_equal(metrics.computed_M, plan.executor_M >= 0)
        states = states_of(executor)
        assert set(states) == set(range(NODES)) - set(dead)
        first, *others = states.values()
        for other in others:
            assert_trees_equal(first, other)
        assert first.step == step + 1
        compilations = executor.model_compilations if compilations is None else compilations
    assert executor.model_compilations == compilations


def test_bases_of_all_nodes_are_refreshed_at_the_same_time():
    """Eight devices in LAPACK at once: with batched decompositions they wait for each other for ever."""
    config = tiny_config(basis=BasisConfig(rank=4, refresh_every=1))
    executor = make_executor(config)
    for step in range(20):
        executor.train_step(step, plan_for((), "neighbor", config), source)
    assert basis_state(executor.state.opt_state).refreshes == 20


SAMPLED = DegradedConfig(skip_attention=False, low_rank=False, sampled_fractions=(0.5,))


@pytest.mark.parametrize("degraded", [DegradedConfig(), SAMPLED], ids=["paper", "sampled"])
def test_four_devices_a_node_train_as_one_device_does(degraded):
    """Bases are refreshed on the way, the last time from the first moment."""
    losses = {}
    for name, mesh in {"one": ONE_DEVICE, "four": FOUR_DEVICES}.items():
        config = tiny_config(mesh, degraded=degraded, basis=BasisConfig(rank=4, refresh_every=3, source="momentum"))
        executor = make_executor(config)
        losses[name] = [
            float(executor.train_step(step, plan_for(dead, "neighbor", config), source).loss)
            for step, dead in enumerate(HISTORY)
        ]
    np.testing.assert_allclose(losses["four"], losses["one"], rtol=1e-5)


def test_other_levels_compile_nothing():
    config = tiny_config(degraded=dataclasses.replace(SAMPLED, sampled_fractions=(0.75, 0.5, 0.25)))
    executor, seen = make_executor(config), set()
    executor.train_step(0, plan_for((), "balanced", config), source)
    compiled = executor.model_compilations
    for step, dead in enumerate([(3,), (3, 4), (3, 4, 5, 6)], start=1):
        plan = make_plan(
            np.isin(np.arange(NODES), dead, invert=True)[:, None],
            "balanced",
            microbatches_per_node=config.train.microbatches_per_node,
            degraded_costs=[0.9, 0.65, 0.5],
            slack=0.12,
        )
        seen |= set(plan.level_MS.flat)
        assert np.isfinite(executor.train_step(step, plan, source).loss)
    assert seen == {0, 1, 2, 3} and executor.model_compilations == compiled


def test_a_nan_on_one_node_skips_the_update_on_all(monkeypatch):
    config = tiny_config()
    executor = make_executor(config)
    before = states_of(executor)
    original = executor._programs.gradients.__call__

    def poisoned(index, state, batch):
        sums = original(index, state, batch)
        return (
            Flat([leaf * jnp.nan if leaf.ndim == 4 else leaf for leaf in sums.leaves], sums.structure)
            if index == 5
            else sums
        )

    class Poisoned:
        __call__ = staticmethod(poisoned)
        compilations = 0

    monkeypatch.setattr(executor._programs, "gradients", Poisoned())
    metrics = executor.train_step(0, plan_for((), "neighbor", config), source)
    assert np.isfinite(metrics.loss) and not np.isfinite(metrics.grad_norm)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 1)
    for index, after in states_of(executor).items():
        assert_trees_equal((before[index].params, before[index].opt_state), (after.params, after.opt_state))


def test_evaluation_is_the_same_on_any_number_of_nodes():
    """Seven sequences in microbatches of two, the last one padded (of eight, on one node, in all)."""
    sequences = np.random.default_rng(0).integers(0, VOCAB, (7, SEQ + 1)).astype(np.int32)
    results = {}
    for num_nodes in (1, 2, 8):
        config = tiny_config(MeshConfig(num_nodes=num_nodes))
        executor = make_executor(config)
        results[num_nodes] = executor.evaluate(evaluation_microbatches(sequences, 2, None))
    params = jax.device_get(executor.state.params)
    expected = sum(float(loss_sum(params, jnp.asarray(row[None]), jnp.dtype("float32"))[0]) for row in sequences)
    for loss, tokens in results.values():
        assert tokens == 7 * SEQ
        assert loss == pytest.approx(expected, rel=1e-6)


def test_evaluation_runs_on_the_live_nodes_alone():
    config = tiny_config()
    executor = make_executor(config)
    executor.train_step(0, plan_for((0, 1, 2), "neighbor", config), source)
    loss, tokens = executor.evaluate([source(1, 0), source(1, 1)])
    assert tokens == 4 * SEQ and np.isfinite(loss)


@pytest.mark.parametrize(
    ("exact", "degraded", "slots"), [(0, 0, 4), (3, 1, 4), (5, 6, 4), (0, 9, 4), (9, 0, 4), (4, 4, 4)]
)
def test_a_share_is_cut_into_parts_that_fit(exact, degraded, slots):
    ids = np.arange(exact + degraded)
    parts = in_parts(Work(ids[:exact], ids[exact:]), slots)
    assert all(len(part.exact) + len(part.degraded) <= slots for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.exact for part in parts]), ids[:exact])
    np.testing.assert_array_equal(np.concatenate([part.degraded for part in parts]), ids[exact:])
