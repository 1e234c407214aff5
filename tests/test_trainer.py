"""Whole runs: failures, resumption, refusals, and what the run directory says of them."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from mecefo_jax import trainer
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
    OptimConfig,
    TrainConfig,
)
from mecefo_jax.config_file import read_config
from mecefo_jax.data import Sampler
from mecefo_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InterruptedRunError,
    NonFiniteError,
    PreemptedError,
    TooFewLiveNodesError,
)
from mecefo_jax.locking import locked
from mecefo_jax.mesh import make_cluster
from mecefo_jax.metrics import read_events, read_rows
from mecefo_jax.state import abstract_state

STEPS, SEQ, MICROBATCHES = 12, 16, 24
BYTE_VOCABULARY = 258
PLAN_EVENTS = ("failure", "recovery", "takeover")
SCRIPT = "fail 1 at 2, back at 5; fail 2 at 3, back at 8; fail 3 at 9"


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 100 kB of words, so that losses fall."""
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "omega"], 16_000)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def config(text_file, tmp_path_factory) -> Config:
    return Config(
        name="tiny",
        model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2),
        data=DataConfig(
            source="files",
            files=(str(text_file),),
            seq_len=SEQ,
            cache_dir=str(tmp_path_factory.getbasetemp() / "prepared"),
        ),
        mesh=MeshConfig(num_nodes=4),
        train=TrainConfig(steps=STEPS, microbatch_size=1, microbatches_per_node=MICROBATCHES // 4, log_every=1),
        optim=OptimConfig(learning_rate=3e-3),
        basis=BasisConfig(rank=4, refresh_every=4),
        faults=FaultsConfig(scenario="script", script=SCRIPT, policy="neighbor"),
        checkpoint=CheckpointConfig(every=4, keep=9),
        eval=EvalConfig(every=6, batches=4),
    )


def changed(config: Config, **sections: dict) -> Config:
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    )


def losses(workdir) -> np.ndarray:
    return np.array([row["train/loss"] for row in read_rows(workdir / "metrics.jsonl") if "train/loss" in row])


def final_state(config, workdir):
    """The arrays of the newest checkpoint."""
    mesh = make_cluster(config.mesh).submeshes[0]
    checkpoints = Checkpointer(workdir / "checkpoints", keep=9, on_event=lambda kind, fields: None)
    step, state, _ = checkpoints.restore(abstract_state(config, BYTE_VOCABULARY, mesh))
    assert step == config.train.steps
    return jax.device_get(state)


def assert_bit_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


class StopAt:
    """Makes the sampler do something once, when it is asked for a microbatch of a step."""

    def __init__(self, monkeypatch, step, action):
        original, self.done = Sampler.microbatch, False

        def microbatch(sampler, at, microbatch_id):
            if at == step and not self.done:
                self.done = True
                action()
            return original(sampler, at, microbatch_id)

        monkeypatch.setattr(Sampler, "microbatch", microbatch)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_through_failures_leaves_a_complete_record(config, tmp_path):
    summary = trainer.run(config, tmp_path)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["tokens"] == STEPS * MICROBATCHES * SEQ
    assert (summary["failures"], summary["recoveries"]) == (3, 2)
    assert summary["model_compilations_after_first_step"] == 0
    assert summary["final_loss"] < summary["initial_loss"] == pytest.approx(np.log(BYTE_VOCABULARY), rel=0.05)
    assert summary["basis_refreshes"] == STEPS // 4
    # One of four nodes down: its slice and its neighbour's are degraded; both 1 and 2 down at steps 3 and 4: three.
    shares = {2: 0.5, 3: 0.75, 4: 0.75, 5: 0.5, 6: 0.5, 7: 0.5, 9: 0.5, 10: 0.5, 11: 0.5}
    assert summary["degraded_token_fraction"] == pytest.approx(sum(shares.values()) / STEPS)

    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["ft/degraded_token_fraction"] for row in rows] == [shares.get(step, 0.0) for step in range(STEPS)]
    assert [row["ft/live_nodes"] for row in rows] == [4, 4, 3, 2, 2, 3, 3, 3, 4, 3, 3, 3]
    expected = {
        *("train/loss", "train/grad_norm", "train/learning_rate", "train/skipped_steps"),
        *("perf/step_time_s", "perf/tokens_per_s", "perf/compilations"),
        *("ft/live_nodes", "ft/degraded_token_fraction", "ft/critical_load", "ft/failures_total"),
    }
    assert expected <= rows[0].keys()
    assert {"eval/loss", "eval/perplexity"} <= rows[5].keys() & rows[-1].keys()
    assert [row["ft/failures_total"] for row in rows] == [0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert read_config(tmp_path / "config.json") == config
    events = read_events(tmp_path / "events.jsonl")
    assert [(e["step"], e["node"], e["covered_by"]) for e in events if e["kind"] == "failure"] == [
        (2, 1, [2]),
        (3, 2, [3]),
        (9, 3, [0]),
    ]
    kinds = [event["kind"] for event in events]
    assert [kinds.count(kind) for kind in ("failure", "recovery", "saved", "basis_refresh")] == [3, 2, 3, 3]
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 8, 12]
    assert (tmp_path / "report.png").read_bytes()[1:4] == b"PNG"


def test_reroute_follows_the_failure_free_run_and_neighbor_starts_from_its_loss(config, tmp_path):
    config = changed(config, train={"steps": 50}, checkpoint={"every": 0}, eval={"every": 0})
    healthy = changed(config, faults={"scenario": "none", "script": ""})
    script = "fail 0 2 at 0, back at 20; fail 1 2 3 at 25, back at 40; fail 3 at 41"
    reroute = changed(config, faults={"policy": "reroute", "script": script})
    neighbor = changed(config, faults={"script": "fail 0 at 0"}, train={"steps": 2})
    for name, run in {"healthy": healthy, "reroute": reroute, "neighbor": neighbor}.items():
        trainer.run(run, tmp_path / name)
    expected = losses(tmp_path / "healthy")
    # Sums of 24 microbatches in another order differ by some ulp (6e-8); training may grow that a hundredfold.
    np.testing.assert_allclose(losses(tmp_path / "reroute"), expected, rtol=6e-6)
    assert losses(tmp_path / "neighbor")[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("stop", [8, 6], ids=["at_a_refresh_and_a_recovery", "between_two"])
def test_a_preempted_run_ends_bit_equal(config, tmp_path, monkeypatch, stop):
    config = changed(config, basis={"refresh_every": 4, "source": "momentum"}, checkpoint={"every": 0})
    trainer.run(config, tmp_path / "whole")
    StopAt(monkeypatch, stop - 1, terminate)
    with pytest.raises(PreemptedError):
        trainer.run(config, tmp_path / "cut")
    summary = trainer.run(config, tmp_path / "cut")
    assert_bit_equal(final_state(config, tmp_path / "whole"), final_state(config, tmp_path / "cut"))
    np.testing.assert_array_equal(losses(tmp_path / "whole"), losses(tmp_path / "cut"))
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    for name in whole.keys() - {"wall_time_s"}:
        assert summary[name] == whole[name], name
    changes = [
        [(e["kind"], e["step"]) for e in read_events(tmp_path / run / "events.jsonl") if e["kind"] in PLAN_EVENTS]
        for run in ("whole", "cut")
    ]
    assert changes[0] == changes[1]


@pytest.mark.parametrize("num_nodes", [2, 3, 8])
def test_a_checkpoint_of_four_nodes_goes_on_with_others(config, tmp_path, monkeypatch, num_nodes):
    config = changed(config, faults={"scenario": "none", "script": ""})
    trainer.run(config, tmp_path / "four")
    StopAt(monkeypatch, 6, terminate)
    with pytest.raises(PreemptedError):
        trainer.run(config, tmp_path / "other")
    other = changed(config, mesh={"num_nodes": num_nodes}, train={"microbatches_per_node": MICROBATCHES // num_nodes})
    trainer.run(other, tmp_path / "other")
    np.testing.assert_allclose(losses(tmp_path / "other"), losses(tmp_path / "four"), rtol=1e-5)


def test_ctrl_c_saves_once_and_stops_at_once_when_repeated(config, tmp_path, monkeypatch):
    StopAt(monkeypatch, 5, interrupt)
    with pytest.raises(InterruptedRunError, match="SIGINT after step 6"):
        trainer.run(config, tmp_path)
    assert (tmp_path / "checkpoints" / "6").is_dir()
    StopAt(monkeypatch, 7, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(config, tmp_path)
    assert trainer.run(config, tmp_path)["steps"] == STEPS
    still_down = [(e["step"], e["nodes"]) for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "still_down"]
    assert still_down[-1] == (6, [2])


def test_too_few_live_nodes_saves_and_a_later_start_goes_on(config, tmp_path):
    starved = changed(config, faults={"min_live_nodes": 3})
    with pytest.raises(TooFewLiveNodesError, match=r"2 of 4 nodes.*step 3.*min_live_nodes"):
        trainer.run(starved, tmp_path)
    assert (tmp_path / "checkpoints" / "3").is_dir()
    failures = [(e["step"], e["node"]) for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "failure"]
    assert failures == [(2, 1), (3, 2)]
    assert trainer.run(config, tmp_path)["tokens"] == STEPS * MICROBATCHES * SEQ
    assert [row["attempt"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1] * 3 + [2] * 9


def test_gives_up_after_too_many_non_finite_steps(config, tmp_path):
    config = changed(config, optim={"learning_rate": 1e30, "warmup_steps": 0}, train={"max_skipped_in_a_row": 3})
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer.run(config, tmp_path)
    assert [event["in_a_row"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "skipped"] == [
        1,
        2,
        3,
    ]


def test_a_finished_run_says_so_and_reports_again(config, tmp_path):
    first = trainer.run(config, tmp_path)
    (tmp_path / "report.png").unlink()
    rows = read_rows(tmp_path / "metrics.jsonl")
    again = trainer.run(changed(config, faults={"policy": "drop"}), tmp_path)
    assert again == first
    assert read_config(tmp_path / "config.json") == config
    assert (tmp_path / "report.png").exists()
    assert read_rows(tmp_path / "metrics.jsonl") == rows
    assert "already_finished" in [event["kind"] for event in read_events(tmp_path / "events.jsonl")]


def test_another_identity_is_refused_and_another_schedule_warned_of(config, tmp_path, monkeypatch):
    StopAt(monkeypatch, 4, terminate)
    with pytest.raises(PreemptedError):
        trainer.run(config, tmp_path)
    for other, name in (
        (changed(config, train={"seed": 1}), "train.seed"),
        (changed(config, data={"seq_len": 8}), "data.seq_len"),
        (changed(config, basis={"rank": 5}), "basis.rank"),
        (changed(config, model={"hidden_size": 32}), "model.hidden_size"),
        (changed(config, train={"microbatches_per_node": 3}), "microbatches"),
    ):
        with pytest.raises(ConfigError, match=name):
            trainer.run(other, tmp_path)
    assert read_config(tmp_path / "config.json") == config
    trainer.run(changed(config, optim={"learning_rate": 1e-3}), tmp_path)
    changes = [e["change"] for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "config_changed"]
    assert any("0.003" in change and "0.001" in change for change in changes)
    assert any(change.startswith("learning rate from here") for change in changes)


def test_a_damaged_newest_checkpoint_falls_back_and_none_left_stops(config, tmp_path):
    trainer.run(config, tmp_path)
    whole = final_state(config, tmp_path)
    for step in (12, 8):
        _damage(tmp_path / "checkpoints" / str(step))
    trainer.run(config, tmp_path)
    assert_bit_equal(whole, final_state(config, tmp_path))
    unreadable = [e["step"] for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "checkpoint_unreadable"]
    assert unreadable == [12, 8]
    for path in (tmp_path / "checkpoints").iterdir():
        _damage(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError):
        trainer.run(config, tmp_path)
    assert set(before) <= set(tmp_path.rglob("*"))


def test_a_second_process_in_the_same_directory_is_refused(config, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process.*--workdir"):
        trainer.run(config, tmp_path)


def test_a_corpus_shorter_than_the_run_is_refused_or_repeated(config, tmp_path):
    long = changed(config, train={"steps": 100_000})
    with pytest.raises(DataError, match=r"100000 steps.*data.repeat"):
        trainer.run(long, tmp_path)
    small = changed(config, data={"repeat": True}, train={"microbatch_size": 100, "steps": 4}, eval={"every": 0})
    assert trainer.run(small, tmp_path)["tokens"] == pytest.approx(4 * 100 * MICROBATCHES * SEQ, rel=0.01)


@pytest.mark.parametrize("policy", ["neighbor", "reroute", "balanced", "drop", "auto"])
def test_stages_fail_in_a_run(config, tmp_path, policy):
    config = changed(
        config,
        faults={"granularity": "stage", "num_stages": 2, "policy": policy, "script": "fail 1.0 at 1, back at 3"},
        train={"steps": 4},
        eval={"every": 0},
    )
    summary = trainer.run(config, tmp_path)
    computed = 4 * MICROBATCHES - (2 * MICROBATCHES // 4 if policy == "drop" else 0)
    assert summary["tokens"] == computed * SEQ
    assert (summary["failures"], summary["recoveries"]) == (1, 1)
    takeovers = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "takeover"]
    if policy == "auto":
        failed, back = takeovers
        assert "extra time" in failed["chosen_for"] and failed["policy"] in failed["prospects"]
        assert {"reroute", "neighbor", "drop"} <= set(failed["prospects"])
        assert "chosen_for" not in back and back["critical_load"] == 1
    else:
        assert all(event["policy"] == policy and "chosen_for" not in event for event in takeovers)


def _damage(checkpoint) -> None:
    payload = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    payload.unlink()
