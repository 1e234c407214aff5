"""The update: averages, held layers, skipped steps, the schedule and the bases' refresh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mecefo_jax.config import (
    BasisConfig,
    Config,
    DataConfig,
    DegradedConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from mecefo_jax.optimizer import basis_state, first_moment, learning_rate_schedule
from mecefo_jax.state import init_state
from mecefo_jax.step import Sums, average_gradients, update
from tests import naive

VOCAB, LAYERS = 32, 3
ATTENTION_LIKE = ("attention", "norm1")
CONFIG = Config(
    model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=LAYERS, num_heads=2),
    data=DataConfig(seq_len=8),
    mesh=MeshConfig(num_nodes=2),
    train=TrainConfig(microbatch_size=2, microbatches_per_node=2, steps=40),
    optim=OptimConfig(learning_rate=1e-2, warmup_steps=4, weight_decay=0.1, clip_norm=None),
    basis=BasisConfig(rank=4, refresh_every=3),
)


@pytest.fixture(scope="module")
def state():
    return jax.jit(lambda: init_state(CONFIG, VOCAB))()


@pytest.fixture(scope="module")
def apply():
    return jax.jit(update, static_argnums=2)


def sums_like(params, seed=0, exact_tokens_L=(64, 48, 32)) -> Sums:
    """Sums of four microbatches of 16 tokens with random gradients."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    grads = [64 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return Sums(
        grads=jax.tree.unflatten(structure, grads),
        losses_M=jnp.array([30.0, 40.0, 50.0, 60.0]),
        tokens_M=jnp.full((4,), 16, jnp.int32),
        computed_M=jnp.ones((4,), jnp.int32),
        exact_tokens_L=jnp.array(exact_tokens_L, jnp.int32),
    )


def test_attention_is_averaged_over_exact_contributors_layer_by_layer(state):
    sums = sums_like(state.params)
    averaged, raw = naive.to_dict(average_gradients(sums, DegradedConfig())), naive.to_dict(sums.grads)
    for name in averaged:
        for mean, total in zip(jax.tree.leaves(averaged[name]), jax.tree.leaves(raw[name]), strict=True):
            if name in ATTENTION_LIKE:
                for layer, tokens in enumerate((64, 48, 32)):
                    np.testing.assert_allclose(mean[layer], total[layer] / tokens, rtol=1e-6)
            else:
                np.testing.assert_allclose(mean, total / 64, rtol=1e-6)


def test_an_update_equals_adamw_of_optax(state, apply):
    """Against ``optax.adamw`` on plain dicts, weight decay on matrices alone, over several steps."""
    config = CONFIG
    schedule = learning_rate_schedule(config)
    reference = optax.adamw(
        lambda count: schedule(count.astype(jnp.float32)),
        b1=config.optim.beta1,
        b2=config.optim.beta2,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        mask=lambda tree: {name: jax.tree.map(lambda _, n=name: "norm" not in n, tree[name]) for name in tree},
    )
    weights = naive.to_dict(state.params)
    with jax.numpy_dtype_promotion("standard"):
        reference_state = reference.init(weights)
        for step in range(3):
            sums = sums_like(state.params, seed=step, exact_tokens_L=(64, 64, 64))
            state, metrics = apply(state, sums, config)
            gradient = jax.tree.map(lambda leaf: leaf / 64, naive.to_dict(sums.grads))
            change, reference_state = reference.update(gradient, reference_state, weights)
            weights = optax.apply_updates(weights, change)
            np.testing.assert_allclose(metrics.loss, 180 / 64, rtol=1e-6)
            np.testing.assert_allclose(metrics.learning_rate, schedule(float(step)), rtol=1e-6)
            np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(gradient), rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(naive.to_dict(state.params)), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-7)


def test_layers_without_exact_contributors_stay_bit_equal(state, apply):
    state, _ = apply(state, sums_like(state.params), CONFIG)  # moments are no longer zero
    before = state
    after, _ = apply(before, sums_like(before.params, seed=1, exact_tokens_L=(0, 64, 0)), CONFIG)
    adam_before, adam_after = (_adam(s.opt_state) for s in (before, after))
    for old, new in ((before.params, after.params), (adam_before.mu, adam_after.mu), (adam_before.nu, adam_after.nu)):
        old, new = naive.to_dict(old), naive.to_dict(new)
        for name in old:
            for a, b in zip(jax.tree.leaves(old[name]), jax.tree.leaves(new[name]), strict=True):
                if name in ATTENTION_LIKE:
                    np.testing.assert_array_equal(a[jnp.array([0, 2])], b[jnp.array([0, 2])])
                    assert (a[1] != b[1]).any(), name
                else:
                    assert (a != b).any(), name


def test_where_attention_is_not_skipped_it_moves_without_exact_contributors(state, apply):
    config = dataclasses.replace(CONFIG, degraded=DegradedConfig(skip_attention=False))
    after, _ = apply(state, sums_like(state.params, exact_tokens_L=(0, 64, 0)), config)
    for old, new in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        assert (old != new).any()


@pytest.mark.parametrize("bad", ["nan_gradient", "inf_loss"])
def test_a_non_finite_step_changes_nothing_but_the_counters(state, apply, bad):
    state, _ = apply(state, sums_like(state.params), CONFIG)
    sums = sums_like(state.params, seed=1)
    if bad == "nan_gradient":
        poisoned = sums.grads.blocks.norm2.scale[...].at[1, 2].set(jnp.nan)
        is_target = jax.tree_util.tree_map_with_path(lambda p, _: "norm2" in jax.tree_util.keystr(p), sums.grads)
        grads = jax.tree.map(lambda leaf, hit: poisoned if hit else leaf, sums.grads, is_target)
        sums = dataclasses.replace(sums, grads=grads)
    else:
        sums = dataclasses.replace(sums, losses_M=sums.losses_M.at[0].set(jnp.inf))
    once, _ = apply(state, sums, CONFIG)
    twice, metrics = apply(once, sums, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, (twice.params, twice.opt_state), (state.params, state.opt_state))
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row), int(twice.step)) == (2, 2, 3)
    recovered, metrics = apply(twice, sums_like(state.params, seed=2), CONFIG)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (2, 0)
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(recovered.params), jax.tree.leaves(state.params), strict=True)
    )


@pytest.mark.parametrize("source", ["weight", "momentum"])
def test_bases_are_refreshed_each_tau_updates_from_their_source(source):
    config = dataclasses.replace(CONFIG, basis=BasisConfig(rank=4, refresh_every=3, source=source, method="svd"))
    apply = jax.jit(update, static_argnums=2)
    state = jax.jit(lambda: init_state(config, VOCAB))()
    for step in range(1, 7):
        before = state
        state, _ = apply(state, sums_like(state.params, seed=step), config)
        old, new = (jax.tree.leaves(basis_state(s.opt_state).bases) for s in (before, state))
        changed = [bool((a != b).any()) for a, b in zip(old, new, strict=True)]
        assert changed == [step % 3 == 0] * 3
        if step == 6:
            tree = before.params if source == "weight" else first_moment(before.opt_state)
            matrix = np.asarray(tree.blocks.feed_forward.down.kernel[...][1], np.float64)
            u = np.linalg.svd(matrix)[0][:, :4]
            v = np.asarray(basis_state(state.opt_state).bases.blocks.feed_forward.down.kernel[...][1], np.float64)
            np.testing.assert_allclose(v @ v.T, u @ u.T, atol=1e-4)


def test_the_schedule_warms_up_and_decays_to_its_end():
    schedule = learning_rate_schedule(CONFIG)
    rates = [float(schedule(float(step))) for step in range(41)]
    assert 0 < rates[0] < rates[1] < rates[4] == pytest.approx(1e-2)
    assert all(later < earlier for earlier, later in zip(rates[4:], rates[5:], strict=False))
    assert rates[40] == pytest.approx(1e-3)


def test_clipping_bounds_the_applied_gradient(state):
    """Adam's first moment after one step is (1 - beta1) times the clipped gradient."""
    config = dataclasses.replace(CONFIG, optim=dataclasses.replace(CONFIG.optim, clip_norm=0.5))
    after, metrics = jax.jit(update, static_argnums=2)(state, sums_like(state.params), config)
    assert metrics.grad_norm > 0.5
    np.testing.assert_allclose(optax.tree.norm(first_moment(after.opt_state)), 0.1 * 0.5, rtol=1e-5)


def _adam(opt_state) -> optax.ScaleByAdamState:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    return next(leaf for leaf in leaves if isinstance(leaf, optax.ScaleByAdamState))
