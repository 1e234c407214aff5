"""The step's gradients against a naive reference, for every policy, on nodes of one and of four devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.config import BasisConfig, Config, DegradedConfig, FaultsConfig
from mecefo_jax.degraded.basis import low_rank_ffn
from mecefo_jax.executor import Executor
from mecefo_jax.model import ffn_kernel_mask, init_model
from mecefo_jax.optimizer import basis_state
from mecefo_jax.step import NodeBatch, average_gradients, node_gradients
from tests import naive
from tests.tiny import (
    FOUR_DEVICES,
    LAYERS,
    ONE_DEVICE,
    VOCAB,
    assert_trees_equal,
    make_executor,
    microbatches,
    plan_for,
    source,
    tiny_config,
)

DEAD_SETS = {"healthy": (), "one": (3,), "three": (2, 3, 7), "all_but_one": (0, 1, 2, 3, 4, 6, 7)}
# Sums of 16 microbatches in float32 in another order: each of the two sides is off by a few ulp of the largest terms.
RELATIVE_ERROR = 1e-5


@functools.cache
def random_params_and_bases(config: Config):
    params = init_model(config.model, VOCAB, seed=0)
    bases = low_rank_ffn(4, 100, ffn_mask=ffn_kernel_mask, method="svd").init(params).bases
    return params, bases


_EXECUTORS: dict[Config, Executor] = {}


def executor_for(config: Config) -> Executor:
    """One executor a config: these tests read sums and leave the state as it is."""
    if config not in _EXECUTORS:
        _EXECUTORS[config] = make_executor(config)
    return _EXECUTORS[config]


def check_against_naive(config: Config, plan) -> None:
    """All sub-meshes hold the same sums, and they are those of the naive reference."""
    executor = executor_for(config)
    first, *others = jax.device_get([sums.tree for sums in executor.step_sums(0, plan, source).values()])
    for other in others:
        assert_trees_equal(first, other)
    bases = basis_state(executor.state.opt_state).bases
    sums = jax.tree.map(lambda leaf: leaf[0], first)
    check_sums(config, sums, executor.state.params, bases, plan.layer_levels(LAYERS) > 0, plan.executor_M >= 0)


def check_sums(config: Config, sums, params, bases, degraded_ML, computed_M) -> None:
    expected_loss, expected = naive.step_gradients(
        params,
        bases,
        microbatches(),
        degraded_ML,
        computed_M,
        config.model,
        skip=config.degraded.skip_attention,
        low_rank=config.degraded.low_rank,
    )
    np.testing.assert_allclose(sums.losses_M.sum() / sums.tokens_M.sum(), expected_loss, rtol=1e-6)
    np.testing.assert_array_equal(sums.computed_M, computed_M)
    actual = naive.to_dict(average_gradients(sums, config.degraded))
    for (path, grad), reference in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(np.asarray(grad, np.float64) - reference)
        assert error <= RELATIVE_ERROR * np.linalg.norm(reference), jax.tree_util.keystr(path)


@pytest.mark.parametrize("mesh", [ONE_DEVICE, FOUR_DEVICES], ids=["one_device", "fsdp2_tensor2"])
@pytest.mark.parametrize("policy", ["neighbor", "reroute", "balanced", "drop"])
@pytest.mark.parametrize("dead", DEAD_SETS)
def test_gradients_equal_the_naive_reference(mesh, policy, dead):
    config = tiny_config(mesh)
    plan = plan_for(DEAD_SETS[dead], policy, config)
    if policy in ("reroute", "drop") or dead == "healthy":
        assert not plan.degraded.size
    check_against_naive(config, plan)


@pytest.mark.parametrize(
    ("switches", "remat"),
    [(s, "none") for s in ("mrl", "ml", "m", "rl", "l", "r", "", "s", "sf", "ms", "ls")]
    + [("mrl", "block"), ("l", "block"), ("m", "ffn"), ("s", "block"), ("sf", "block")],
)
def test_each_switch_alone_and_together(switches, remat):
    """One exact and one degraded microbatch through ``node_gradients`` alone; a sample of all tokens is exact."""
    degraded = DegradedConfig(
        skip_attention="m" in switches,
        remat_ffn="r" in switches,
        low_rank="l" in switches,
        sampled_fractions=(1.0,) if "s" in switches else (),
        sample_ffn="f" in switches,
    )
    config = tiny_config(degraded=degraded)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
    params, bases = random_params_and_bases(config)
    batch = NodeBatch(
        tokens_SBT=jnp.asarray(microbatches()[5:7]),
        ids_S=jnp.array([5, 6]),
        level_SL=jnp.array([[0] * LAYERS, [1] * LAYERS], jnp.int8),
        num_exact=jnp.int32(1),
        num_degraded=jnp.int32(1),
    )
    sums = jax.device_get(jax.jit(node_gradients, static_argnums=(3, 4))(params, bases, batch, config, "all"))
    degraded_ML = np.repeat(np.arange(16) == 6, LAYERS).reshape(16, LAYERS)
    computed_M = np.isin(np.arange(16), [5, 6])
    check_sums(config, sums, params, bases, degraded_ML, computed_M)


ALL_SAMPLED = DegradedConfig(skip_attention=False, low_rank=False, sampled_fractions=(1.0,))


@pytest.mark.parametrize(
    ("layer_masks", "sample_ffn"), [("all", False), ("by_layer", False), ("all", True), ("by_layer", True)]
)
def test_each_microbatch_has_its_own_level(layer_masks, sample_ffn):
    """In one call with two fractions to choose from: what calls with one fraction each give, together."""

    def gradients(fractions, ids, levels):
        level_SL = np.repeat(np.array(levels, np.int8)[:, None], LAYERS, axis=1)
        return sampled_gradients(fractions, ids, level_SL, layer_masks, sample_ffn)

    found = gradients((0.5, 0.25), [5, 6, 7], [2, 1, 2])
    expected = jax.tree.map(jnp.add, gradients((0.25,), [5, 7], [1, 1]), gradients((0.5,), [6], [1]))
    for left, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(left - right) <= RELATIVE_ERROR * np.linalg.norm(right)


def test_each_layer_has_its_own_level():
    """Input gradients are exact, so a layer's weight gradients do not depend on the levels of others."""
    levels = [1, 0, 2]
    found = sampled_gradients((0.5, 0.25), [5], np.array([levels], np.int8), "by_layer")
    alone = [sampled_gradients(fractions, [5], np.ones((1, LAYERS), np.int8), "all") for fractions in ((0.5,), (0.25,))]
    exact = sampled_gradients((0.5,), [5], np.zeros((1, LAYERS), np.int8), "by_layer")
    for layer, level in enumerate(levels):
        expected = [exact, *alone][level]
        for left, right in zip(*map(jax.tree.leaves, (found.blocks, expected.blocks)), strict=True):
            assert np.linalg.norm(left[layer] - right[layer]) <= RELATIVE_ERROR * np.linalg.norm(right[layer])


def sampled_gradients(fractions, ids, level_SL, layer_masks, sample_ffn=False):
    switches = dataclasses.replace(ALL_SAMPLED, sampled_fractions=fractions, sample_ffn=sample_ffn)
    config = tiny_config(degraded=switches)
    params, bases = random_params_and_bases(config)
    batch = NodeBatch(
        tokens_SBT=jnp.asarray(microbatches()[ids]),
        ids_S=jnp.array(ids),
        level_SL=jnp.asarray(level_SL),
        num_exact=jnp.int32(0),
        num_degraded=jnp.int32(len(ids)),
    )
    return jax.jit(node_gradients, static_argnums=(3, 4))(params, bases, batch, config, layer_masks).grads


@pytest.mark.parametrize("sample_ffn", [False, True])
def test_the_same_tokens_are_drawn_inside_sharded_nodes(sample_ffn):
    half = dataclasses.replace(ALL_SAMPLED, sampled_fractions=(0.75, 0.5), sample_ffn=sample_ffn)
    sums = []
    for mesh in (ONE_DEVICE, FOUR_DEVICES):
        config = tiny_config(mesh, degraded=half)
        plan = plan_for(DEAD_SETS["three"], "balanced", config)
        assert plan.degraded.size
        sums.append(jax.device_get(executor_for(config).step_sums(0, plan, source)[0].tree.grads))
    for left, right in zip(*map(jax.tree.leaves, sums), strict=True):
        assert np.linalg.norm(left - right) <= RELATIVE_ERROR * np.linalg.norm(right)


def test_full_rank_recovers_the_exact_ffn_gradient():
    config = tiny_config(basis=BasisConfig(rank=48), degraded=DegradedConfig(skip_attention=False))
    executor = executor_for(config)
    degraded = executor.step_sums(0, plan_for((3,), "neighbor", config), source)[0].tree.grads
    exact = executor.step_sums(0, plan_for((3,), "reroute", config), source)[0].tree.grads
    for left, right in zip(jax.tree.leaves(degraded), jax.tree.leaves(exact), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert np.linalg.norm(left - right) <= RELATIVE_ERROR * np.linalg.norm(right)


@pytest.mark.parametrize("policy", ["neighbor", "reroute", "balanced", "drop"])
@pytest.mark.parametrize("dead", [(), ((3, 1),), ((3, 1), (4, 0), (5, 0), (5, 1))], ids=["none", "one", "four"])
def test_stages_degrade_layer_by_layer(policy, dead):
    check_stages(dead, policy, DegradedConfig())


def test_stages_with_samples_in_degraded_layers():
    check_stages(((3, 1), (4, 0), (5, 0), (5, 1)), "neighbor", ALL_SAMPLED)


def check_stages(dead, policy, degraded: DegradedConfig) -> None:
    config = tiny_config(faults=FaultsConfig(granularity="stage", num_stages=3), degraded=degraded)
    plan = plan_for(dead, policy, config)
    degraded_ML = plan.layer_levels(LAYERS) > 0
    if policy == "neighbor" and dead:
        assert degraded_ML.any() and not degraded_ML[degraded_ML.any(axis=1)].all()
    check_against_naive(config, plan)


def test_more_microbatches_than_slots_take_several_calls():
    config = tiny_config()
    assert executor_for(config).slots < config.num_microbatches
    check_against_naive(config, plan_for(DEAD_SETS["all_but_one"], "neighbor", config))


def test_the_loss_does_not_depend_on_who_computes():
    config = tiny_config()
    executor = executor_for(config)
    losses = {
        policy: [sums.tree for sums in executor.step_sums(0, plan_for(dead, policy, config), source).values()]
        for policy, dead in {"neighbor": (3,), "balanced": (2, 3, 7), "reroute": ()}.items()
    }
    healthy = losses["reroute"][0].losses_M
    for policy, (sums, *_) in losses.items():
        np.testing.assert_allclose(sums.losses_M, healthy, rtol=1e-6, err_msg=policy)
