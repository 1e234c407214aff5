"""Fine-tuning as a whole: it learns, with and without failures, and keeps what it says it keeps."""

import json
import math

import numpy as np
import pytest

from mecefo_jax import checkpoint
from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError, NonFiniteError, TooFewLiveNodesError
from mecefo_jax.finetune import loop
from mecefo_jax.finetune.kept import open_fine_tuned
from mecefo_jax.finetune.loop import FineTuning
from mecefo_jax.finetune.rows import encode
from mecefo_jax.finetune.settings import Settings
from mecefo_jax.finetune.tasks import Example, make_task
from mecefo_jax.metrics import read_events, read_rows
from tests.finetune.small import MAX_LENGTH, counting_task, equality_task, small_model, tune
from tests.tiny import assert_trees_equal

EPOCHS = 6
POLICIES = ("none", "neighbor", "reroute", "drop")


def failures(policy: str) -> FaultsConfig:
    """A failure each ten steps on average; back after four. On four nodes, of which two work degraded for each."""
    return FaultsConfig(scenario="steps", policy=policy, fail_every_steps=10, back_after_steps=4)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Summaries and directories of the counting task: without failures, and under the same ones by each policy."""
    folder = tmp_path_factory.mktemp("counting")
    task = counting_task()
    faults = {policy: None if policy == "none" else failures(policy) for policy in POLICIES}
    return {
        policy: (tune(folder / policy, task, faults=faults[policy], epochs=EPOCHS), folder / policy)
        for policy in faults
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_learns_to_count(counting, policy):
    summary, _ = counting[policy]
    assert summary["best"] >= 0.9 and summary["metric"] == "accuracy"
    assert (summary["steps"], summary["labels"]) == (EPOCHS * 16, ["a", "b"])
    assert (summary["failures"] > 3) == (policy != "none")
    assert (summary["degraded_example_fraction"] > 0.1) == (policy == "neighbor")
    lost = EPOCHS * 512 - summary["examples_trained_on"]
    assert lost > 100 if policy == "drop" else lost == 0


@pytest.mark.slow
def test_the_best_epoch_is_kept(counting):
    """Read back, the kept parameters have the score that the summary names as the best."""
    summary, out = counting["neighbor"]
    kept = open_fine_tuned(out)
    task = counting_task()
    assert (kept.labels, kept.step) == (task.labels, summary["best_epoch"] * 16)
    dev = encode(task.dev, task, kept.tokenizer, kept.config.data.seq_len)
    scores = FineTuning(kept.config, task, kept.params, log=_Silent()).evaluate(dev)
    row = summary["each_epoch"][summary["best_epoch"] - 1]
    assert scores["accuracy"] == row["accuracy"] == summary["best"]
    assert scores["loss"] == pytest.approx(row["loss"], rel=1e-6)


@pytest.mark.slow
def test_what_is_written(counting):
    summary, out = counting["neighbor"]
    assert json.loads((out / "summary.json").read_text()) == summary
    rows = read_rows(out / "metrics.jsonl")
    evaluated = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluated] == [16 * epoch for epoch in range(1, EPOCHS + 1)]
    assert [row["eval/accuracy"] for row in evaluated] == [row["accuracy"] for row in summary["each_epoch"]]
    rates = [row["train/learning_rate"] for row in rows if "train/learning_rate" in row]
    assert max(rates) == pytest.approx(3e-3) and rates[-1] < rates[0] < rates[1]
    kinds = [event["kind"] for event in read_events(out / "events.jsonl")]
    assert kinds.count("failure") == summary["failures"] and kinds.count("epoch") == EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "neighbor", "reroute"])
def test_learns_to_compare_pairs(tmp_path, policy):
    faults = None if policy == "none" else failures(policy)
    assert tune(tmp_path / "out", equality_task(), faults=faults, epochs=EPOCHS)["best"] >= 0.9


@pytest.mark.slow
def test_learns_numbers(tmp_path):
    """The share of a letter, times three, under failures."""
    examples = [
        Example(example.texts, 3 * example.texts[0].count("a") / len(example.texts[0]), example.where)
        for task in (counting_task(),)
        for example in (*task.train, *task.dev)
    ]
    task = make_task("share", examples[:512], examples[512:])
    summary = tune(tmp_path / "out", task, faults=failures("neighbor"), epochs=EPOCHS)
    assert (summary["metric"], summary["labels"]) == ("pearson", [])
    assert summary["best"] >= 0.9
    best = summary["each_epoch"][summary["best_epoch"] - 1]
    assert best["loss"] < 0.5 * np.var([example.label for example in task.dev])


def short_task(longer: bool = False):
    """Three steps an epoch, the last of them not full; ``longer``: one text of a bucket of its own."""
    task = counting_task(num_train=70, num_dev=20)
    if not longer:
        return task
    long = Example(("ab" * 10 + "a",), "a", "here")
    return make_task("longer", (*task.train, long), task.dev)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(tmp_path):
    faults = FaultsConfig(scenario="script", script="fail 1 at 1")
    first, again = (tune(tmp_path / name, short_task(), epochs=3, faults=faults) for name in ("first", "again"))
    assert first["each_epoch"] == again["each_epoch"]
    assert_trees_equal(*(open_fine_tuned(tmp_path / name).params for name in ("first", "again")))


@pytest.mark.slow
def test_reroute_is_the_failure_free_run_but_for_rounding(tmp_path):
    """A node is dead throughout. Its microbatches are added to the others' in another order.

    So a gradient is off by some 1e-7 of itself, and after nine steps, few enough for this not to grow, so is a loss:
    1e-6 is ten roundings.
    """
    dead = {policy: FaultsConfig(scenario="script", script="fail 0 at 0", policy=policy) for policy in POLICIES[1:]}
    losses = {
        name: [row["train_loss"] for row in tune(tmp_path / name, short_task(), epochs=3, faults=faults)["each_epoch"]]
        for name, faults in (("none", None), ("reroute", dead["reroute"]), ("neighbor", dead["neighbor"]))
    }
    np.testing.assert_allclose(losses["reroute"], losses["none"], rtol=1e-6)
    assert (np.abs(np.divide(losses["neighbor"], losses["none"]) - 1) > 1e-2).all()


@pytest.mark.slow
def test_a_later_epoch_that_is_worse_is_not_kept(tmp_path, monkeypatch):
    accuracies = iter([0.5, 0.9, 0.7])
    monkeypatch.setattr(loop, "class_scores", lambda *_: {"accuracy": next(accuracies)})
    summary = tune(tmp_path / "out", short_task(), epochs=3)
    assert (summary["best_epoch"], summary["best"]) == (2, 0.9)
    assert open_fine_tuned(tmp_path / "out").step == 6
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["6"]


@pytest.mark.slow
def test_one_compilation_a_bucket(tmp_path, monkeypatch):
    """The one long text comes in another batch each epoch; all batches without it are short."""
    made, original = [], FineTuning._make_executor

    def make(self, length, state):
        made.append((length, original(self, length, state)))
        return made[-1][1]

    monkeypatch.setattr(FineTuning, "_make_executor", make)
    faults = FaultsConfig(scenario="script", script="fail 2 at 2, back at 7")
    summary = tune(tmp_path / "out", short_task(longer=True), epochs=3, max_length=2 * MAX_LENGTH, faults=faults)
    assert summary["truncated_examples"] == 0
    lengths = [length for length, _ in made]
    assert len(lengths) >= 4 and set(lengths) == {MAX_LENGTH, 2 * MAX_LENGTH}
    programs = {executor._programs for _, executor in made}
    assert [program.gradients.compilations for program in programs] == [1, 1]


class _Silent:
    def event(self, kind, step, **fields) -> None:
        pass


def test_too_few_nodes_end_it(tmp_path):
    with pytest.raises(TooFewLiveNodesError, match="0 of 4 nodes are live at step 0"):
        tune(tmp_path / "out", short_task(), faults=FaultsConfig(scenario="script", script="fail 0 1 2 3 at 0"))


@pytest.mark.slow
def test_a_loss_that_stays_infinite_ends_it(tmp_path):
    examples = [Example(("a",), 1.5, "here")] * 512
    poisoned = make_task("poisoned", examples, examples[:100])
    model = small_model()
    model.params.final_norm.scale[...] = model.params.final_norm.scale[...] * math.inf
    with pytest.raises(NonFiniteError, match="set a lower --learning-rate"):
        tune(tmp_path / "out", poisoned, model=model, epochs=EPOCHS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch_size": 20},
            r"--batch-size: got 20, expected a multiple of --nodes x --microbatches-per-node \(8\), such as 16 or 24",
        ),
        ({"batch_size": 4}, r"--batch-size: got 4, .* such as 8$"),
        ({"epochs": 0}, r"--epochs: got 0"),
        ({"learning_rate": 0.0}, r"--learning-rate: got 0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 3}, r"--max-length: got 3"),
        ({"max_length": 2049}, r"--max-length: got 2049"),
        ({"metric": "pearson"}, r"--metric: got pearson for a task of 2 classes, expected accuracy or f1 or matthews"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        tune(tmp_path / "out", short_task(), **settings)
    assert not (tmp_path / "out").exists()


def test_directory_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty; set another directory"):
        tune(tmp_path, short_task())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_failed_save_is_told(tmp_path, monkeypatch):
    """The best epoch could not be kept: an error at the end, and not a word of success."""
    monkeypatch.setattr(checkpoint, "promote", _refuse)
    with pytest.raises(checkpoint.CheckpointError, match="could not be saved"):
        tune(tmp_path / "out", short_task(), epochs=3)
    assert not (tmp_path / "out" / "summary.json").exists()


def _refuse(*_):
    raise OSError("no room")
