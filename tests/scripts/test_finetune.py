"""The command: a run directory and a folder in, a directory of results out, and mistakes in one line."""

import json

import pytest

from mecefo_jax.checkpoint import Checkpointer
from mecefo_jax.config_file import save_config
from mecefo_jax.finetune.kept import open_fine_tuned
from mecefo_jax.state import fresh_state
from mecefo_jax.trained import keep_tokenizer
from scripts import finetune
from tests.finetune.small import counting_task, small_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory, as far as a trained model needs one."""
    workdir, model = tmp_path_factory.mktemp("run"), small_model()
    save_config(model.config, workdir / "config.json")
    keep_tokenizer(workdir, model.tokenizer)
    checkpoints = Checkpointer(workdir / "checkpoints", keep=1, on_event=lambda *_: None)
    checkpoints.save(7, fresh_state(model.config, model.params), {})
    checkpoints.close()
    return workdir


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("counting"), counting_task(num_train=70, num_dev=20)
    for split, examples in (("train", made.train), ("dev", made.dev)):
        lines = ["sentence\tlabel", *(f"{example.texts[0]}\t{example.label}" for example in examples)]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_fine_tunes_through_failures(run, task, tmp_path, capsys):
    words = [str(run), "--task", str(task), "--epochs", "2", "--learning-rate", "5e-3", "--metric", "matthews"]
    words += ["--policy", "neighbor", "--scenario", "script", "--faults.script", "fail 3 at 2, back at 5"]
    words += ["--basis.rank", "4", "--json", str(tmp_path / "summary.json")]
    assert finetune.main(words) == 0
    out = run / "finetune" / task.name
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"best epoch {summary['best_epoch']}: matthews {summary['best']:.4f}"
    )
    assert (summary["steps"], summary["failures"], summary["recoveries"], summary["model_step"]) == (6, 1, 1, 7)
    # Node 3 and its neighbour work for three steps of six: a half of 32 examples in each, but for the last, part full.
    assert 0.2 < summary["degraded_example_fraction"] < 0.3
    kept = open_fine_tuned(out)
    assert (kept.config.basis.rank, kept.config.optim.decay, kept.labels) == (4, "linear", ("a", "b"))
    assert finetune.main(words) == 2
    assert "is not empty; set another directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (["--task", "nowhere"], 3, "--task nowhere: neither a folder nor a dataset of TensorFlow Datasets"),
        (["--batch-size", "9"], 2, "--batch-size: got 9, expected a multiple"),
        (["--faults.script", "fail 1 at 2"], 2, "faults.script: has no effect with faults.scenario none"),
        (
            ["--optim.beta1", "0.5"],
            2,
            "besides the flags of --help there are settings of faults.*, degraded.* and basis.*",
        ),
        (["--policy", "drop", "--faults.policy", "reroute"], 2, "faults.policy: given twice"),
        (["--scenario", "script"], 2, "faults.script: "),
        (["--scenario", "script", "--faults.script", "fail 9 at 2"], 2, "9"),
        (["--step", "3"], 4, "no checkpoint of step 3 in"),
        (["--json", "no/where.json"], 2, "--json no/where.json: its folder does not exist"),
        (["stray"], 2, "got stray"),
    ],
)
def test_mistakes_take_one_line(run, task, tmp_path, capsys, words, exit_code, message):
    given = [] if "--task" in words else ["--task", str(task)]
    assert finetune.main([str(run), *given, "--out", str(tmp_path / "out"), *words]) == exit_code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert not (tmp_path / "out").exists()  # which would have to be cleared away first


def test_what_is_no_run_directory(task, tmp_path, capsys):
    assert finetune.main([str(tmp_path), "--task", str(task)]) == 2
    assert "so it is not a run directory" in capsys.readouterr().err


def test_help_tells_the_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        finetune.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "sequences of a step, over all nodes (32)" in shown and "who takes over (auto)" in shown
