"""A run killed with SIGKILL at random moments, twice over, equals one that nobody disturbed."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mecefo_jax.checkpoint import Checkpointer
from mecefo_jax.config import (
    BasisConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FaultsConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from mecefo_jax.config_file import save_config
from mecefo_jax.mesh import make_cluster
from mecefo_jax.metrics import read_events, read_rows
from mecefo_jax.state import abstract_state

STEPS = 120


@pytest.fixture
def config(tmp_path) -> Config:
    text = tmp_path / "words.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["alpha", "beta", "gamma"], 20_000)))
    return Config(
        name="killable",
        model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2),
        data=DataConfig(source="files", files=(str(text),), seq_len=16, cache_dir=str(tmp_path / "prepared")),
        mesh=MeshConfig(num_nodes=4),
        train=TrainConfig(steps=STEPS, microbatch_size=2, microbatches_per_node=2, log_every=1),
        basis=BasisConfig(rank=4, refresh_every=7),
        faults=FaultsConfig(scenario="steps", fail_every_steps=8, back_after_steps=5),
        checkpoint=CheckpointConfig(every=5, keep=3),
        eval=EvalConfig(every=0, batches=4),
    )


def start(config_path: pathlib.Path, workdir: pathlib.Path, records: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, str(pathlib.Path(__file__).with_name("killable_run.py")), config_path, workdir, records]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_at_a_random_moment(process: subprocess.Popen, workdir: pathlib.Path, attempt: int, rng: random.Random) -> None:
    """SIGKILL at a random time after the process has reported a save of its own."""
    try:
        while not has_saved(workdir, attempt):
            assert process.poll() is None, process.stdout.read().decode()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def has_saved(workdir: pathlib.Path, attempt: int) -> bool:
    """Whether an attempt has saved; a directory may also be the save of an earlier one, completed by a later one."""
    events = workdir / "events.jsonl"
    if not events.exists():
        return False
    return any(event["kind"] == "saved" and event["attempt"] == attempt for event in read_events(events))


def committed_records(path: pathlib.Path) -> dict[tuple[int, int], list[int]]:
    """Record ids by (step, microbatch id); a step that was computed again must have asked for the same."""
    records: dict[tuple[int, int], list[int]] = {}
    for line in path.read_bytes().splitlines():
        try:
            step, microbatch_id, ids = json.loads(line)
        except ValueError:  # the line that was being written
            continue
        assert records.setdefault((step, microbatch_id), ids) == ids
    return records


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_killed_twice_ends_bit_equal_with_the_same_records(config, tmp_path):
    config_path = tmp_path / "config.json"
    save_config(config, config_path)
    undisturbed = start(config_path, tmp_path / "whole", tmp_path / "whole.jsonl")
    output, _ = undisturbed.communicate()
    assert undisturbed.returncode == 0, output.decode()

    arguments = (config_path, tmp_path / "cut", tmp_path / "cut.jsonl")
    seed = time.time_ns()
    print(f"seed of the random moments: {seed}")
    rng = random.Random(seed)
    for attempt in (1, 2):
        kill_at_a_random_moment(start(*arguments), tmp_path / "cut", attempt, rng)
    last = start(*arguments)
    output, _ = last.communicate()
    assert last.returncode == 0, output.decode()

    rows = read_rows(tmp_path / "cut" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["attempt"] for row in rows} == {1, 2, 3}
    resumed = [event["step"] for event in read_events(tmp_path / "cut" / "events.jsonl") if event["kind"] == "resumed"]
    assert len(resumed) == 2 and 0 < resumed[0] < resumed[1] < STEPS

    states = [restore(config, tmp_path / name) for name in ("whole", "cut")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    whole, cut = (committed_records(tmp_path / f"{name}.jsonl") for name in ("whole", "cut"))
    assert whole == cut and len(whole) == STEPS * config.num_microbatches
    seen = [record for ids in whole.values() for record in ids]
    assert len(seen) == len(set(seen)), "a record was seen twice within an epoch"


def restore(config: Config, workdir: pathlib.Path):
    checkpoints = Checkpointer(workdir / "checkpoints", keep=3, on_event=lambda kind, fields: None)
    step, state, _ = checkpoints.restore(abstract_state(config, 258, make_cluster(config.mesh).submeshes[0]))
    assert step == STEPS
    return jax.device_get(state)
