"""Clusters of real processes that are killed, stopped, put to sleep and started late: nothing is lost or doubled."""

import contextlib
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mecefo_jax.config import (
    BasisConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from mecefo_jax.config_file import save_config
from mecefo_jax.inputs import open_inputs
from mecefo_jax.metrics import read_events, read_rows
from mecefo_jax.processes.audit import check
from mecefo_jax.processes.patience import Limits
from mecefo_jax.processes.supervisor import Supervisor

ROOT = pathlib.Path(__file__).resolve().parents[2]
NODES = 3
PATIENCE_SECONDS = 240.0
LIMITS = Limits(max_restarts=100, first_wait_seconds=0.1, longest_wait_seconds=0.5, report_seconds=1, stall_seconds=8)


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def config(tmp_path, store) -> Config:
    text = tmp_path / "words.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["alpha", "beta", "gamma"], 40_000)))
    return Config(
        name="cluster",
        model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2),
        data=DataConfig(source="files", files=(str(text),), seq_len=16, cache_dir=str(tmp_path / "prepared")),
        mesh=MeshConfig(num_nodes=NODES),
        train=TrainConfig(steps=500, microbatch_size=2, microbatches_per_node=2, log_every=1),
        basis=BasisConfig(rank=4, refresh_every=7),
        checkpoint=CheckpointConfig(every=20),
        eval=EvalConfig(every=20, batches=5),
        cluster=ClusterConfig(audit=True, compile_cache=store, progress_seconds=20, collective_seconds=4),
    )


class Cluster:
    """A run under a supervisor, in a thread."""

    def __init__(
        self, config: Config, folder: pathlib.Path, *, spares: int = 0, settings=(), name: str = "run"
    ) -> None:
        self.config, self.folder, self.workdir = config, folder, folder / name
        self.lines: list[tuple[int | None, str]] = []
        path = folder / "config.json"
        save_config(config, path)
        (folder / "slow").touch()
        number = 1 + config.mesh.num_nodes + spares

        def commands(address: str) -> list[list[str]]:
            script = [sys.executable, str(ROOT / "tests" / "cluster_process.py"), str(folder), str(path)]
            cluster = ["--workdir", str(self.workdir), "--faults.scenario", "live", *settings]
            cluster += ["--cluster.coordinator", address, "--cluster.num-processes", str(number)]
            return [[*script, *cluster, "--cluster.process-id", str(process)] for process in range(number)]

        self.supervisor = Supervisor(commands, limits=LIMITS, on_line=lambda *line: self.lines.append(line))
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.exit_code = self.supervisor.run()

    def __enter__(self) -> "Cluster":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.supervisor.close()
        self._thread.join()

    def step(self) -> int:
        """Steps that the log knows of."""
        with contextlib.suppress(Exception):
            return max((row["step"] for row in read_rows(self.workdir / "metrics.jsonl")), default=0)
        return 0

    def events(self, kind: str) -> list[dict]:
        path = self.workdir / "events.jsonl"
        return [event for event in read_events(path) if event["kind"] == kind] if path.exists() else []

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self._thread.is_alive(), f"the run ended ({self.exit_code}) before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.output()}"
            time.sleep(0.005)

    def reach(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def finish(self) -> int | None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), self.output()
        return self.exit_code

    def output(self) -> str:
        return "\n".join(f"[{process}] {line}" for process, line in self.lines[-80:])

    def check(self, *, steps_repeated: int = 0) -> None:
        """Exit 0, every microbatch of every step once, one state in all processes that ended with the run."""
        (self.folder / "slow").unlink()
        assert self.finish() == 0, self.output()
        config, inputs = self.config, open_inputs(self.config)
        verdict = check(self.workdir / "audit", inputs.sampler, config.train.steps, config.num_microbatches)
        assert verdict["steps_committed"] == config.train.steps and verdict["steps_repeated"] <= steps_repeated
        assert verdict["samples_lost"] == verdict["samples_doubled"] == verdict["wrong_records"] == 0, verdict
        assert verdict["states"] == 1 and verdict["states_told"] >= 1, verdict
        rows = read_rows(self.workdir / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, config.train.steps + 1))
        assert rows[-1]["eval/loss"] < rows[0]["train/loss"]


@pytest.mark.slow
def test_nodes_killed_at_any_moment(config, tmp_path):
    """In mid-step, while starting, while another one comes back, during saves, two at once, whoever writes the log."""
    seed = time.time_ns()
    print(f"seed of the random moments: {seed}")
    rng = random.Random(seed)
    with Cluster(config, tmp_path, spares=1) as cluster:
        cluster.until(lambda: len(cluster.supervisor.pids) == 5, "all processes")
        time.sleep(rng.uniform(0, 3))
        cluster.supervisor.kill(2)  # while it starts, compiles, or has just begun
        cluster.reach(10)
        cluster.supervisor.kill(1)  # whoever writes the log
        cluster.reach(19)
        time.sleep(rng.uniform(0, 0.3))
        cluster.supervisor.kill(min(p for p in cluster.supervisor.pids if p))  # near a save
        cluster.reach(45)
        cluster.supervisor.kill(3)
        died = len(cluster.supervisor.events)
        cluster.until(lambda: any(e["kind"] == "restarted" for e in cluster.supervisor.events[died:]), "a restart")
        time.sleep(rng.uniform(0, 2))
        for process in rng.sample([p for p in cluster.supervisor.pids if p], 2):  # two at once, while one comes back
            cluster.supervisor.kill(process)
        cluster.check(steps_repeated=1)
        failures = cluster.events("failure")  # of nodes: who is killed on its way in was none
        assert failures
        assert all(event["noticed"] < event["time"] < event["noticed"] + 60 for event in failures)


@pytest.mark.slow
def test_alive_but_stuck_and_a_dead_coordinator(config, tmp_path):
    with Cluster(config, tmp_path, settings=("--cluster.progress_seconds", "11")) as cluster:
        cluster.reach(10)
        cluster.supervisor.kill(2, signal.SIGSTOP)
        cluster.until(lambda: cluster.events("recovery"), "the stopped process to be back")
        assert any(event["kind"] == "stalled" and event["process"] == 2 for event in cluster.supervisor.events)

        (tmp_path / "asleep-3").touch()
        cluster.until(lambda: cluster.events("failure")[1:], "the sleeping process to be taken for dead")
        (tmp_path / "asleep-3").unlink()
        stacks = (cluster.workdir / "processes" / "stacks-3.txt").read_text()
        assert "read_or_sleep" in stacks and "no progress for 11 s" in stacks

        before = cluster.step()
        cluster.reach(before + 1)
        cluster.supervisor.kill(0)
        cluster.until(lambda: cluster.events("resumed"), "the restart in place")
        (resumed,) = cluster.events("resumed")
        assert resumed["source"] == "memory" and resumed["step"] >= before
        cluster.check(steps_repeated=1)


@pytest.mark.slow
def test_late_at_the_start_in_compiling_and_at_the_end(config, tmp_path):
    """Longer than heartbeats: start-up, heartbeats and progress have times of their own."""
    (tmp_path / "late-start-2").write_text("5")
    (tmp_path / "late-compile-3").write_text("6")
    (tmp_path / "late-end-1").write_text("3")
    with Cluster(config, tmp_path, settings=("--cluster.heartbeat_seconds", "4")) as cluster:
        cluster.check()
        assert not cluster.events("failure")
    said = [line for process, line in cluster.lines if process is None and line.startswith("waiting for process")]
    assert "waiting for process 2 to come up" in said, cluster.output()


@pytest.mark.slow
def test_stopped_on_request_and_without_its_launcher(config, tmp_path):
    """SIGTERM saves; a killed launcher leaves no process behind; the next start goes on, from the disk if it must."""
    with Cluster(config, tmp_path) as cluster:
        cluster.reach(5)
        cluster.supervisor.stop(signal.SIGTERM)
        assert cluster.finish() == 75, cluster.output()
        stopped = cluster.step()
        assert (cluster.workdir / "checkpoints" / str(stopped)).is_dir()

    settings = ["--workdir", str(cluster.workdir), "--mesh.num_nodes", str(NODES), "--cluster.memory_every", "0"]
    command = [sys.executable, "-m", "mecefo_jax.launch", "--nodes", str(NODES), "--", str(tmp_path / "config.json")]
    launcher = subprocess.Popen([*command, *settings], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        cluster_of = lambda: processes_of(cluster.workdir)  # noqa: E731
        deadline = time.monotonic() + PATIENCE_SECONDS
        while cluster.step() < 45:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert len(cluster_of()) == 1 + NODES
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 30
    while cluster_of():
        assert time.monotonic() < deadline, f"orphans: {cluster_of()}"
        time.sleep(0.05)

    with Cluster(config, tmp_path) as again:
        again.check(steps_repeated=100)
        resumed = again.events("resumed")[-1]
        assert resumed["step"] % config.checkpoint.every == 0 and "source" not in resumed


def processes_of(workdir: pathlib.Path) -> list[int]:
    """Processes whose command line names the run directory as theirs, apart from launchers."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(workdir).encode() in words and b"--cluster.process-id" in words:
                found.append(int(path.parent.name))
    return found
