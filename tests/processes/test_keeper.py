"""What a process keeps in memory is found by the next one, or by nobody."""

import dataclasses
import json

import jax
import pytest

from mecefo_jax.config import BasisConfig, ClusterConfig, MeshConfig
from mecefo_jax.mesh import make_cluster
from mecefo_jax.processes import memory
from mecefo_jax.processes.keeper import StateKeeper
from mecefo_jax.processes.keys import run_key
from mecefo_jax.processes.worker import Worker
from mecefo_jax.progress import Progress
from mecefo_jax.state import init_sharded_state
from tests.tiny import VOCAB, assert_trees_equal, tiny_config


class Events(list):
    def event(self, kind, step, **fields):
        self.append(kind)

    def scalars(self, step, values):
        raise AssertionError


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_SHARED_MEMORY", tmp_path)


def worker_of(rank: int = 4) -> Worker:
    mesh = MeshConfig(num_nodes=8, fsdp=2, num_submeshes=1)
    config = tiny_config(mesh, cluster=ClusterConfig(compile_cache=""), basis=BasisConfig(rank=rank))
    worker = Worker(config, VOCAB, make_cluster(config.mesh).submeshes[0])
    worker.state = init_sharded_state(config, VOCAB, worker.mesh)
    return worker


def test_the_next_process_finds_the_state_its_account_and_whose_it_was(tmp_path):
    worker, progress = worker_of(), Progress(tokens=12, failures=3, last_loss=1.5, initial_loss=2.5)
    keeper = StateKeeper(tmp_path / "run", 2, worker, {"train": {"seed": 7}}, Events())
    assert keeper.newest_step() == -1
    for step in (4, 5):
        keeper.keep(step, worker.words(), dataclasses.replace(progress, tokens=step))
    keeper.wait()
    state = jax.device_get(worker.state)

    heir = worker_of()
    keeper = StateKeeper(tmp_path / "run", 2, heir, {}, Events())
    assert keeper.newest_step() == 5
    words, found, identity = keeper.read(5)
    heir.take_words(words)
    assert_trees_equal(state, jax.device_get(heir.state))
    assert found == dataclasses.replace(progress, tokens=5) and identity == {"train": {"seed": 7}}
    neighbour = StateKeeper(tmp_path / "run", 3, heir, {}, Events())  # where all have died, anybody may go on
    assert neighbour.newest_step() == 5 and neighbour.read(5)[1] == found
    assert StateKeeper(tmp_path / "other", 2, heir, {}, Events()).newest_step() == -1


def test_a_state_of_another_shape_is_not_taken(tmp_path):
    worker = worker_of()
    keeper = StateKeeper(tmp_path / "run", 1, worker, {}, Events())
    keeper.keep(1, worker.words(), Progress())
    keeper.wait()
    other = StateKeeper(tmp_path / "run", 1, worker_of(rank=8), {}, Events())
    assert other.read(1) is None and other.newest_step() == -1


def test_a_full_memory_is_told_of_once_and_stops_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    worker, events = worker_of(), Events()
    monkeypatch.setattr(memory.StateMemory, "write", full)
    keeper = StateKeeper(tmp_path / "run", 1, worker, {}, events)
    for step in (1, 2, 3):
        keeper.keep(step, worker.words(), Progress())
    keeper.wait()
    assert events == ["memory_failed"]


def test_a_run_is_named_by_its_directory_as_long_as_that_is_not_made_anew(tmp_path):
    key = run_key(tmp_path)
    assert key == run_key(tmp_path) and key != run_key(tmp_path / "other")
    (tmp_path / "processes" / "run-id").unlink()
    assert run_key(tmp_path) != key


def test_progress_survives_json():
    progress = Progress(tokens=1, initial_loss=2.0, last_loss=1.0, productive_s=2.5, first_start=100.0)
    assert Progress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress
    assert progress.goodput(105.0) == 0.5 and Progress().goodput(1.0) is None
