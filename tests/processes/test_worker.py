"""A node by itself computes what the emulated cluster computes, and its state moves bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest

from mecefo_jax.config import ClusterConfig, MeshConfig
from mecefo_jax.executables import open_store
from mecefo_jax.mesh import Work, make_cluster
from mecefo_jax.processes.worker import Worker
from mecefo_jax.state import init_sharded_state
from tests.tiny import (
    LAYERS,
    SEQ,
    VOCAB,
    assert_trees_equal,
    make_executor,
    microbatches,
    plan_for,
    source,
    tiny_config,
)


def config_of(mesh: MeshConfig, store: str = ""):
    return tiny_config(mesh, cluster=ClusterConfig(compile_cache=store))


ONE, FOUR = MeshConfig(num_nodes=8, num_submeshes=1), MeshConfig(num_nodes=8, fsdp=2, tensor=2, num_submeshes=1)


def make_worker(config) -> Worker:
    mesh = make_cluster(config.mesh).submeshes[0]
    worker = Worker(config, VOCAB, mesh, open_store(config.cluster.compile_cache))
    worker.state = init_sharded_state(config, VOCAB, mesh)
    return worker


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ONE, FOUR], ids=["one device", "fsdp 2 x tensor 2"])
def test_a_step_in_pieces_is_the_step_of_the_emulated_cluster(mesh):
    config = config_of(mesh)
    worker, number = make_worker(config), config.num_microbatches
    worker.compile()
    degraded = np.arange(number) >= number - 4
    level_ML = np.repeat(degraded[:, None], LAYERS, axis=1)
    first = worker.sums(0, Work(np.arange(5), np.arange(0)), level_ML, source)
    both = worker.sums(0, Work(np.arange(5, number - 4), np.arange(number - 4, number)), level_ML, source, onto=first)
    metrics = worker.update(both)
    assert worker.model_compilations == 2 and (metrics.computed_M == 1).all()

    executor = make_executor(config)
    plan = plan_for([], "neighbor", config)
    expected = executor.train_step(0, dataclasses.replace(plan, level_MS=degraded[:, None].astype(np.int8)), source)
    assert float(expected.loss) == float(metrics.loss)  # by microbatch, so the pieces do not matter
    # Sums of 16 gradients in another order: some ulp of their largest term.
    np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=1e-5)


def test_no_microbatch_sums_to_nothing():
    worker = make_worker(config_of(ONE))
    nothing = np.arange(0)
    sums = worker.sums(0, Work(nothing, nothing), np.zeros((16, LAYERS), bool), source)
    assert all((np.asarray(vector) == 0).all() for vector in sums.vectors.values())


@pytest.mark.slow
def test_words_are_the_state():
    worker = make_worker(config_of(FOUR))
    before, words = jax.device_get(worker.state), worker.words()
    worker.update(worker.sums(0, Work(np.arange(16), np.arange(0)), np.zeros((16, LAYERS), bool), source))
    with pytest.raises(AssertionError):
        assert_trees_equal(before, jax.device_get(worker.state))
    worker.take_words(words)
    assert_trees_equal(before, jax.device_get(worker.state))
    assert worker.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(before))
    assert all((np.asarray(vector) == 0).all() for vector in worker.no_words().vectors.values())


def test_evaluation_by_microbatch():
    worker = make_worker(config_of(ONE))
    results = worker.evaluate([microbatches()[0], microbatches()[6]])
    assert [tokens for _, tokens in results] == [2 * SEQ, 4]  # the second is mostly padding
    assert all(np.isfinite(loss) and loss > 0 for loss, _ in results)


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    config = config_of(FOUR, str(tmp_path / "store"))
    workers = [make_worker(config) for _ in range(2)]
    for worker in workers:
        worker.compile()
    assert [worker.model_compilations for worker in workers] == [2, 0]
    works = (Work(np.arange(9), np.arange(9, 16)), np.repeat((np.arange(16) >= 9)[:, None], LAYERS, axis=1))
    totals = [worker.sums(0, *works, source) for worker in workers]
    metrics = [worker.update(total) for worker, total in zip(workers, totals, strict=True)]
    assert_trees_equal(*metrics)
    assert_trees_equal(*(jax.device_get(worker.state) for worker in workers))
