"""The drill: what it refuses, what it shows, and one of them for real, with a node and the coordinator killed."""

import json

import numpy as np
import pytest

from mecefo_jax.config import (
    BasisConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from mecefo_jax.config_file import save_config
from mecefo_jax.drill.conductor import Outcome
from mecefo_jax.metrics import read_events, read_rows
from scripts import drill

STEPS = 60


def refusal(argv, capsys):
    """The line that a wrong command line prints."""
    assert drill.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule", "kil 2 @ step 30"], "expected 'kill 2 @ step 30'"),
        (["--schedule", "kill 5 @ step 30"], "expected 1 to 4"),
        (["--schedule", "kill 2 @ step 240"], "expected a step before the last one, 240"),
        (["--schedule", "kill 2 @ step 30", "--nodes", "3"], "--nodes: got 3, expected a divisor"),
        (["--schedule", "kill 2 @ step 30", "--limit", "0"], "--limit: got 0"),
        (["--schedule", "kill 2 @ step 30", "--json", "no/where.json"], "--json no/where.json: its folder"),
        (["--schedule", "kill 2 @ step 30", "--", "--train.log_every", "2"], "a drill sets it to 1"),
        (["--schedule", "kill 2 @ step 30", "--", "--workdir", "x"], "a drill's own --workdir"),
        (["--schedule", "kill 2 @ step 30", "--", "--train.stepz", "2"], "train.stepz"),
        (["--schedule", "random mtbf 2s for 9s", "--", "--train.steps", "2"], "a random schedule sets it"),
        ([], "--schedule"),
    ],
)
def test_mistakes_are_answered_in_a_line_before_anything_starts(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [] if "--nodes" in words else ["--nodes", "4"]
    assert message in refusal(["quickstart", *nodes, *words], capsys)
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use_is_refused(capsys, tmp_path):
    (tmp_path / "drill").mkdir()
    words = ["quickstart", "--nodes", "4", "--schedule", "kill 2 @ step 30", "--workdir", str(tmp_path)]
    assert "a drill begins afresh" in refusal(words, capsys)


@pytest.fixture
def conducted(monkeypatch):
    """Replaces the runs by a recorder: their names, configs and strikes; ends with the losses given to it."""
    calls, losses = [], {"drill": 2.0, "undisturbed-0": 2.1, "undisturbed-1": 2.05, "undisturbed-2": 2.3}

    def conduct(self, run, strikes, *, restarts_all=False):
        calls.append((run, self.config(run), tuple(strikes), restarts_all))
        rows = [{"step": step, "attempt": 1, "seen": step / 4} for step in range(1, 41)]
        return Outcome(began=0.0, ended=20.0, exit_code=0, rows=rows)

    audit = {"steps_committed": 1, "steps_repeated": 0, "samples_lost": 0, "samples_doubled": 0, "wrong_records": 0}
    monkeypatch.setattr(drill.Drill, "conduct", conduct)
    monkeypatch.setattr(drill.Drill, "summary", lambda self, run: {"eval_loss": losses.get(run, 9.0)})
    monkeypatch.setattr(drill, "_check", lambda *_: audit | {"states": 1, "states_told": 4, "lost_at": {}})
    return calls


def run_drill(tmp_path, *words):
    file = tmp_path / "drill.json"
    own = ["--workdir", str(tmp_path / "runs"), "--json", str(file)]
    code = drill.main(["quickstart", "--nodes", "4", *own, *words])
    return code, json.loads(file.read_text())


def test_loss_is_compared_with_what_seeds_make_of_it(conducted, tmp_path):
    words = ["--schedule", "kill 2 @ step 30", "--no-baselines"]
    code, results = run_drill(tmp_path, *words)
    assert [(run, config.train.seed) for run, config, *_ in conducted] == [
        ("undisturbed-0", 0),
        ("undisturbed-1", 1),
        ("undisturbed-2", 2),
        ("drill", 0),
    ]
    assert all(config.train.log_every == 1 and config.cluster.audit for _, config, *_ in conducted)
    final = results["final"]
    assert final["undisturbed"]["noise"] == pytest.approx(0.25)
    assert final["loss_difference"] == pytest.approx(-0.1)
    assert final["within_noise"] is True
    # The strike never came, as nothing ran.
    assert code == 1 and final["failed_because"] == ["1 of 1 strikes did not come before the end"]
    assert results["run"]["command"].startswith("python scripts/drill.py quickstart --nodes 4")


@pytest.mark.parametrize(("seeds", "runs"), [("0", 0), ("1", 1)])
def test_without_seeds_the_loss_is_not_judged(seeds, runs, conducted, tmp_path):
    words = ["--schedule", "kill 2 @ step 30", "--no-baselines", "--noise-seeds", seeds]
    _, results = run_drill(tmp_path, *words)
    assert len(conducted) == runs + 1
    assert results["final"]["within_noise"] is None
    assert (results["final"]["loss_difference"] is None) == (runs == 0)


def test_baselines_meet_the_same_strikes(conducted, tmp_path):
    words = ["--schedule", "random mtbf 2s for 30s", "--noise-seeds", "0", "--seed", "5"]
    code, results = run_drill(tmp_path, *words)
    assert code == 0 and results["final"]["strikes_planned"] > results["final"]["strikes"] == 0
    (probe, _, no_strikes, _), *runs = conducted
    assert probe == "probe" and no_strikes == ()
    assert [(run, restarts_all) for run, _, _, restarts_all in runs] == [
        ("drill", False),
        ("drop", False),
        ("restart", True),
    ]
    assert runs[0][2] == runs[1][2] == runs[2][2] != ()
    configs = [config for _, config, *_ in runs]
    # Steps of 0.25 s for 30 s, however they are dealt with.
    assert [config.train.steps for config in configs] == [120] * 3
    assert [config.faults.policy for config in configs] == ["neighbor", "drop", "neighbor"]
    assert configs[2].cluster.memory_every == 0 and configs[2].checkpoint.every == 20
    assert results["final"]["baselines"]["restart_from_checkpoint"]["how"].endswith("(each 20 steps)")


@pytest.fixture
def config_file(tmp_path):
    text = tmp_path / "words.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["alpha", "beta", "gamma"], 20_000)))
    config = Config(
        name="drillable",
        model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2),
        data=DataConfig(source="files", files=(str(text),), seq_len=16, cache_dir=str(tmp_path / "prepared")),
        mesh=MeshConfig(num_nodes=3),
        train=TrainConfig(steps=STEPS, microbatch_size=2, microbatches_per_node=2),
        basis=BasisConfig(rank=4, refresh_every=7),
        checkpoint=CheckpointConfig(every=0),
        eval=EvalConfig(every=0, batches=4),
    )
    save_config(config, tmp_path / "drillable.json")
    return tmp_path / "drillable.json"


@pytest.mark.slow
def test_a_node_and_the_coordinator_are_killed_and_nothing_is_lost(config_file, tmp_path, capfd):
    file = tmp_path / "results.json"
    schedule = "kill 2 @ step 20; kill coordinator @ step 40"
    code = drill.main(
        [str(config_file), "--nodes", "3", "--spares", "1", "--schedule", schedule, "--no-baselines"]
        + ["--noise-seeds", "0", "--workdir", str(tmp_path / "runs"), "--json", str(file), "--limit", "300"]
        + ["--", "--cluster.compile_cache", str(tmp_path / "compiled")]
    )
    log = (tmp_path / "runs" / "drill" / "output.log").read_text()
    results = json.loads(file.read_text())
    final, (node, coordinator) = results["final"], results["events"]
    assert code == 0 and final["passed"], log
    assert "passed" in capfd.readouterr().out

    assert (node["target"], node["node"], node["was_member"]) == (2, 1, True)
    assert 0 < node["detect_s"] < node["recover_s"]
    assert 20 <= node["step"] < coordinator["step"] < STEPS
    assert coordinator["target"] == "coordinator"
    assert 0 < coordinator["detect_s"] < coordinator["recover_s"]

    zeros = ("samples_lost", "samples_doubled", "wrong_records")
    assert [final[name] for name in zeros] == [0, 0, 0]
    assert final["steps_committed"] == final["steps"] == STEPS
    assert final["states_equal"] and final["states_compared"] >= 1
    assert final["restarts_in_place"] == 1 and final["deaths"] == 2
    rows = read_rows(tmp_path / "runs" / "drill" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    events = read_events(tmp_path / "runs" / "drill" / "events.jsonl")
    (failed,) = [event for event in events if event["kind"] == "failure"]
    assert failed["process"] == 2 and failed["noticed"] - node["killed_at"] == pytest.approx(node["detect_s"], abs=0.01)
    assert any(event["kind"] == "resumed" and event["source"] == "memory" for event in events)
