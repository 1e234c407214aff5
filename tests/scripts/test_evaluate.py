"""The program that evaluates a run: the run's own number, other data, and mistakes in one line."""

import importlib.util
import json
import math

import numpy as np
import pytest

from mecefo_jax import trainer
from mecefo_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig, MeshConfig, ModelConfig, TrainConfig
from mecefo_jax.trained import open_trained
from scripts import evaluate


def write_words(path, seed, count=4000, names=("alpha", "beta", "gamma")):
    path.write_text(" ".join(np.random.default_rng(seed).choice(names, count)))
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a tokenizer of its own, evaluated on a part of the held-out text."""
    folder = tmp_path_factory.mktemp("evaluate")
    data = DataConfig(
        source="files",
        files=(write_words(folder / "words.txt", 0),),
        seq_len=8,
        tokenizer="bpe",
        bpe_vocab_size=264,
        cache_dir=str(folder / "prepared"),
        validation_fraction=0.3,
    )
    config = Config(
        model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=1, num_heads=2),
        data=data,
        mesh=MeshConfig(num_nodes=1),
        train=TrainConfig(steps=3, microbatch_size=2),
        checkpoint=CheckpointConfig(every=2),
        eval=EvalConfig(batches=5),
    )
    trainer.run(config, folder / "run")
    return folder / "run"


def perplexity(run, tmp_path, *words):
    assert evaluate.main(["perplexity", str(run), "--json", str(tmp_path / "found.json"), *words]) == 0
    return json.loads((tmp_path / "found.json").read_text())


def test_number_is_the_run_s_own(run, tmp_path, capsys):
    found = perplexity(run, tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert found["perplexity"] == pytest.approx(summary["eval_perplexity"], rel=1e-6)
    assert found["nats_per_token"] == pytest.approx(summary["eval_loss"], rel=1e-6)
    assert (found["step"], found["tokens"]) == (3, 5 * 2 * 8)
    assert f"perplexity      {found['perplexity']:.4f}" in capsys.readouterr().out
    earlier = perplexity(run, tmp_path, "--step", "2")
    assert earlier["step"] == 2 and earlier["perplexity"] != found["perplexity"]


def test_all_held_out_text_or_another_one(run, tmp_path):
    whole = perplexity(run, tmp_path, "--batches", "none")
    assert whole["tokens"] > 80
    # Words of the same vocabulary, of which the run's tokenizer is not trained anew; and their bytes are known.
    other = write_words(tmp_path / "other.txt", 1, 300, ("delta", "alpha"))
    rest = write_words(tmp_path / "rest.txt", 2)
    words = ["--data.files", other, rest, "--data.validation_files", other, "--batches", "none"]
    found = perplexity(run, tmp_path, *words)
    model, text = open_trained(run), (tmp_path / "other.txt").read_text()
    assert found["tokens"] == len(model.tokenizer.encode(text))  # BOS is not predicted
    nats = found["nats_per_token"] * found["tokens"]
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    # By hand, in windows of 8 predicted tokens.
    stream = np.asarray([model.tokenizer.bos_id, *model.tokenizer.encode(text)], np.int32)
    last = (len(stream) - 1) // 8 * 8
    inputs, targets = stream[:last].reshape(-1, 8), stream[1 : last + 1].reshape(-1, 8)
    logits = np.asarray(model.params(inputs, np.dtype("float32")), np.float64)
    by_hand = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    remaining = len(stream) - 1 - last
    assert nats == pytest.approx(by_hand.sum(), rel=1e-5) if not remaining else nats > by_hand.sum() - 1e-3


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--data.tokenizer", "bytes"], 3, "the model reads tokens of bpe (264), the data has those of bytes"),
        (["--data.filez", "x"], 2, "did you mean data.files"),
        (["--model.num_layers", "2"], 2, "settings --data.field VALUE alone"),
        (["stray"], 2, "got stray"),
        (["--data.tfds_name", "x"], 2, "data.tfds_name: has no effect with data.source files"),
        (["--batches", "0"], 2, "eval.batches"),
        (["--step", "7"], 4, "no checkpoint of step 7"),
        (["--step", "x"], 2, "got 'x'"),
        (["--json", "no/where.json"], 2, "--json no/where.json: its folder"),
    ],
)
def test_mistakes_are_one_line(run, words, code, message, capsys):
    assert evaluate.main(["perplexity", str(run), *words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_no_run_directory(tmp_path, capsys):
    assert evaluate.main(["perplexity", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_harness_says_what_to_install(run, capsys):
    assert evaluate.main(["harness", str(run), "--tasks", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the harness needs lm_eval" in line and "pip install -e '.[eval]'" in line


TASK = """
task: toy_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" alpha", " omega, which the text does not hold"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the harness and what it imports
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="not installed: lm_eval")
def test_harness_runs_a_task_of_a_folder(run, tmp_path, monkeypatch, capsys):
    for name, value in {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "data.jsonl").write_text('{"text": "alpha beta gamma"}\n' * 5)
    (tmp_path / "toy_words.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    words = ["harness", str(run), "--tasks", "toy_words", "--include-path", str(tmp_path), "--max-length", "64"]
    assert evaluate.main([*words, "--limit", "3", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["step"], found["max_length"], found["n-samples"]["toy_words"]["effective"]) == (3, 64, 3)
    assert found["results"]["toy_words"]["acc,none"] == 1.0
    assert "toy_words" in capsys.readouterr().out
    assert evaluate.main([*words[:3], "toy_wrods"]) == 2
    assert "no task toy_wrods" in capsys.readouterr().err
