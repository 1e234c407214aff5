"""Tasks of local files through EleutherAI's harness, against its own Hugging Face backend on the same weights."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from mecefo_jax.data.tokenizer import train_bpe
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.evaluation.text_model import TextModel
from mecefo_jax.huggingface.exporting import write_model
from tests.evaluation.toy import LONGEST, toy_model

MISSING = [name for name in ("lm_eval", "torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("default"),  # of the harness and what it imports
    pytest.mark.slow,
]
TASKS = ("toy_choice", "toy_text", "toy_answer")
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on; what a fox! "

CHOICE = """
task: toy_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WHOLE = """
task: toy_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
ANSWER = """
task: toy_answer
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["o", "qu"], max_gen_toks: 20, do_sample: false}
metric_list:
  - metric: exact_match
"""


def model_of(kind):
    """Random weights, with bytes as tokens or with some of many lengths."""
    if kind == "bytes":
        return toy_model()
    tokenizer = train_bpe(iter([TEXT * 20]), 290)
    return dataclasses.replace(toy_model(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    words = TEXT.split()

    def some(least, most):
        return " ".join(rng.choice(words, rng.integers(least, most)))

    documents = [
        {
            "question": some(1, 60) + ("" if number % 2 else " "),
            "choices": [some(1, 6) for _ in range(3)],
            "label": int(rng.integers(3)),
            "text": some(1, 250),
            "answer": some(1, 3),
        }
        for number in range(10)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, text in zip(TASKS, (CHOICE, WHOLE, ANSWER), strict=True):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")))
    return folder


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


def run_ours(model, tasks, num_fewshot, **options):
    from mecefo_jax.evaluation.harness import results_table, run_tasks

    texts = TextModel(model, batch_size=4, **options)
    results = run_tasks(texts, TASKS, include_path=tasks, num_fewshot=num_fewshot)
    assert all(name in results_table(results) for name in TASKS)
    return results


def run_theirs(model, tasks, num_fewshot, folder, **options):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_model(folder, model)
    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(folder), dtype="float32", batch_size=1, device="cpu", **options),
        tasks=list(TASKS),
        num_fewshot=num_fewshot,
        task_manager=TaskManager(include_path=str(tasks)),
    )


def answers(results, task):
    """What the model answered to each document of a task."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [[response[0] for response in sample["resps"]] for sample in samples]


def assert_same(ours, theirs):
    for name in TASKS:
        assert len(answers(ours, name)) == len(answers(theirs, name)) == 10
    assert answers(ours, "toy_answer") == answers(theirs, "toy_answer")
    for mine, other in zip(answers(ours, "toy_choice"), answers(theirs, "toy_choice"), strict=True):
        np.testing.assert_allclose([pair[0] for pair in mine], [pair[0] for pair in other], atol=1e-4, rtol=0)
        assert [bool(pair[1]) for pair in mine] == [bool(pair[1]) for pair in other]
    # Sums over up to 1,500 tokens, float32 in their case: relative to the sum.
    mine, other = (np.asarray(answers(results, "toy_text"), float) for results in (ours, theirs))
    np.testing.assert_allclose(mine, other, atol=1e-4, rtol=1e-6)
    for name in ("toy_choice", "toy_answer"):
        assert ours["results"][name] == pytest.approx(theirs["results"][name], nan_ok=True)
    for metric, value in theirs["results"]["toy_text"].items():
        expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-6)
        assert ours["results"]["toy_text"][metric] == expected, metric


@pytest.mark.parametrize(("kind", "num_fewshot", "max_length"), [("bpe", 0, LONGEST), ("bytes", 2, 400)])
def test_numbers_and_texts_are_those_of_the_hugging_face_backend(kind, num_fewshot, max_length, tasks, tmp_path):
    model = model_of(kind)
    ours = run_ours(model, tasks, num_fewshot, max_length=max_length)
    theirs = run_theirs(model, tasks, num_fewshot, tmp_path, max_length=max_length)
    assert_same(ours, theirs)
    # That the comparison is not about nothing: answers differ, end early and late, and both outcomes occur.
    texts = [answer for (answer,) in answers(ours, "toy_answer")]
    assert len(set(texts)) > 2 and not any("o" in text or "qu" in text for text in texts)
    assert 0 < ours["results"]["toy_choice"]["acc,none"] < 1


def test_tasks_that_cannot_be_had_are_named(tasks, tmp_path):
    from mecefo_jax.evaluation.harness import run_tasks

    texts = TextModel(toy_model(), batch_size=2)
    with pytest.raises(ConfigError, match="--tasks: the harness and .* has no task toy_chioce"):
        run_tasks(texts, ["toy_text", "toy_chioce"], include_path=tasks)
    (tmp_path / "toy_lost.yaml").write_text(WHOLE.replace("DATA", "lost.jsonl").replace("toy_text", "toy_lost"))
    with pytest.raises(DataError, match="--tasks toy_lost: cannot be loaded .*lost.jsonl"):
        run_tasks(texts, ["toy_lost"], include_path=tmp_path)
