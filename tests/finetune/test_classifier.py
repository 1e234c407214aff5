"""The classifier's loss in the machinery of pre-training: against plain gradients, and a naive reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.config import BasisConfig, Config, FaultsConfig, MeshConfig
from mecefo_jax.executor import Executor
from mecefo_jax.finetune.classifier import classification_loss, make_classifier, outputs, regression_loss
from mecefo_jax.mesh import make_cluster
from mecefo_jax.model import init_model
from mecefo_jax.optimizer import basis_state
from mecefo_jax.state import fresh_state
from mecefo_jax.step import average_gradients
from tests import naive
from tests.tiny import LAYERS, NODES, PER_NODE, SEQ, VOCAB, plan_for, tiny_config

CLASSES = 3
ONE_SUBMESH = MeshConfig(num_nodes=NODES, num_submeshes=1)
F32 = jnp.dtype("float32")
compiled = jax.jit(outputs, static_argnums=2)
compiled_state = jax.jit(fresh_state, static_argnums=0)
# As in tests/test_step.py: sums of 16 microbatches in float32 in another order, a few ulp of the largest terms.
RELATIVE_ERROR = 1e-5


@functools.cache
def batch(regression: bool = False) -> np.ndarray:
    """``[M, B, T+1]``: sequences of all lengths, a microbatch with one real row, and one without."""
    rng = np.random.default_rng(5)
    rows = np.full((NODES * PER_NODE, 2, SEQ + 1), -1, np.int32)
    for row in rows.reshape(-1, SEQ + 1)[:-3]:
        length = rng.integers(1, SEQ + 1)
        row[:length] = rng.integers(1, VOCAB, length)
    rows[..., -1] = 0
    real = rows[..., 0] >= 0
    labels = rng.normal(size=real.shape).astype(np.float32) if regression else rng.integers(0, CLASSES, real.shape)
    rows[..., -1] = np.where(real, labels.view(np.int32) if regression else labels, 0)
    return rows


def classifier(config: Config, num_outputs: int = CLASSES):
    params = make_classifier(init_model(config.model, VOCAB, seed=0), num_outputs, seed=3)
    # A head of its usual size gives gradients of the trunk that are mostly those of a uniform guess.
    return jax.tree.map(lambda leaf: leaf * 20 if leaf.shape[-1] == num_outputs else leaf, params)


def sums_under(config: Config, plan, objective, rows: np.ndarray, num_outputs: int = CLASSES):
    cluster = make_cluster(config.mesh)
    executor = Executor(
        config, cluster, compiled_state(config.compiled_part, classifier(config, num_outputs)), objective
    )
    sums = executor.step_sums(0, plan, lambda _, number: rows[number])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], next(iter(sums.values())).tree), executor


def assert_close(actual, expected) -> None:
    for (path, left), right in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(left, np.float64) - np.asarray(right, np.float64))
        assert error <= RELATIVE_ERROR * np.linalg.norm(right), jax.tree_util.keystr(path)


def naive_loss(weights, rows, skipped_layers, config):
    """Independent of the package: the state at the last token that is not padding, picked by its index."""
    tokens, labels = rows[:, :-1], rows[:, -1]
    lengths = jnp.sum(tokens >= 0, axis=1)
    states = naive.hidden(weights, tokens, skipped_layers, config)
    last = jnp.take_along_axis(states, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(last @ weights["head"]), labels[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(lengths > 0, losses, 0.0))


def num_real(rows) -> int:
    return int((rows[:, 0] >= 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("regression", [False, True], ids=["classes", "numbers"])
def test_a_healthy_step_has_the_plain_gradient(regression):
    """That of the mean over all sequences, differentiated at once; padding rows neither count nor spoil it."""
    config, objective = tiny_config(ONE_SUBMESH), regression_loss if regression else classification_loss
    rows, num_outputs = batch(regression), 1 if regression else CLASSES
    sums, executor = sums_under(config, plan_for((), "neighbor", config), objective, rows, num_outputs)

    def mean_loss(params):
        flat = rows.reshape(-1, SEQ + 1)
        real = flat[flat[:, 0] >= 0]
        found = outputs(params, jnp.asarray(real[:, :-1]), F32)
        if regression:
            return jnp.mean((found[:, 0] - real[:, -1].view(np.float32)) ** 2)
        return -jnp.mean(jax.nn.log_softmax(found)[jnp.arange(len(real)), real[:, -1]])

    params = jax.device_get(executor.state.params)
    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    assert sums.tokens_M.sum() == (batch()[..., 0] >= 0).sum() == 2 * NODES * PER_NODE - 3
    np.testing.assert_allclose(sums.losses_M.sum() / sums.tokens_M.sum(), loss, rtol=1e-5)
    assert_close(average_gradients(sums, config.degraded), grads)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["neighbor", "reroute", "balanced", "drop"])
@pytest.mark.parametrize("stages", [1, 3], ids=["nodes", "stages"])
def test_failures_have_the_gradient_of_the_naive_reference(policy, stages):
    """Attention over the sequences of ``N_l``, the rest over all; low-rank feed-forwards; or exact."""
    faults = FaultsConfig(granularity="stage", num_stages=3) if stages > 1 else FaultsConfig()
    config = tiny_config(ONE_SUBMESH, basis=BasisConfig(rank=4), faults=faults)
    plan = plan_for(((3, 1), (5, 0)) if stages > 1 else (3, 5), policy, config)
    sums, executor = sums_under(config, plan, classification_loss, batch())
    state = executor.state
    bases = basis_state(state.opt_state).bases
    expected_loss, expected = naive.step_gradients(
        state.params,
        bases,
        batch(),
        plan.layer_levels(LAYERS),
        plan.executor_M >= 0,
        config.model,
        objective=naive_loss,
        count=num_real,
    )
    assert plan.degraded.size if policy == "neighbor" else policy == "balanced" or not plan.degraded.size
    np.testing.assert_allclose(sums.losses_M.sum() / sums.tokens_M.sum(), expected_loss, rtol=1e-5)
    assert_close(naive.to_dict(average_gradients(sums, config.degraded)), expected)


@pytest.fixture(scope="module")
def model():
    return classifier(tiny_config())


def padded(*rows) -> jax.Array:
    array = np.full((len(rows), SEQ), -1, np.int32)
    for number, row in enumerate(rows):
        array[number, : len(row)] = row
    return jnp.asarray(array)


def test_padding_changes_no_output(model):
    """Another width, other neighbours: the same sums, but XLA may order them otherwise."""
    rows = [[7, 3, 9, 4, 1], [5, 2], [8]]
    together = compiled(model, padded(*rows), F32)
    for row, output in zip(rows, together, strict=True):
        alone = compiled(model, jnp.asarray([row], jnp.int32), F32)[0]
        np.testing.assert_allclose(output, alone, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(together[0] - together[1])).max() > 1e-2


def test_the_last_real_token_decides(model):
    """The gradient with respect to what stands at later positions (id 0, as which padding is read) is zero."""
    of_first = lambda params: outputs(params, padded([7, 3, 9], [5, 3]), F32)[0, 0]  # noqa: E731
    gradient = jax.jit(jax.grad(of_first))(model)
    of_token = np.abs(np.asarray(gradient.embedding[...])).max(axis=1)
    assert all(of_token[token] > 0 for token in (7, 3, 9))
    assert of_token[0] == 0 and of_token[5] == 0
    changed = [[7, 3, 9], [7, 3, 8], [2, 3, 9]]
    first, other_last, other_first = np.asarray(compiled(model, padded(*changed), F32))
    assert np.abs(first - other_last).max() > 1e-3 and np.abs(first - other_first).max() > 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_the_trunk_is_copied_and_the_head_is_new(tied):
    config = tiny_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_embeddings=tied))
    trained = init_model(config.model, VOCAB, seed=0)
    made, again, other = (make_classifier(trained, 2, seed) for seed in (1, 1, 2))
    assert (trained.head is None) == tied
    assert made.head.kernel[...].shape == (config.model.hidden_size, 2)
    np.testing.assert_array_equal(made.head.kernel[...], again.head.kernel[...])
    assert (made.head.kernel[...] != other.head.kernel[...]).all()
    np.testing.assert_array_equal(made.embedding[...], trained.embedding[...])
    donating = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    donating(made)
    assert np.isfinite(trained.embedding[...]).all()  # its buffers are its own
