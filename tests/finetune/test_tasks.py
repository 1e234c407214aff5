"""Tasks read from files and from TensorFlow Datasets, and what is wrong with them, named by file and line."""

import gzip
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mecefo_jax.errors import DataError
from mecefo_jax.finetune.tasks import Example, open_task

SINGLE = [('he said "no', 1), ("", 0), ("it's \u00e9t\u00e9", 1)]
PAIRS = [("one", "two, three", "not_entailment"), ("a", "b", "entailment")]


def write(folder: pathlib.Path, split: str, header: list[str], rows: list, kind: str = "tsv") -> None:
    folder.mkdir(exist_ok=True)
    if kind == "tsv":
        lines = ["\t".join(map(str, row)) for row in [header, *rows]]
    else:
        lines = [json.dumps(dict(zip(header, row, strict=True))) for row in rows]
    (folder / f"{split}.{kind}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def folder_with(path: pathlib.Path, train: str, dev: str = "sentence\tlabel\nx\t1\n", kind: str = "tsv") -> str:
    for split, content in (("train", train), ("dev", dev)):
        (path / f"{split}.{kind}").write_bytes(content.encode("latin-1"))
    return str(path)


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        (["sentence", "label"], SINGLE),
        (["sentence1", "sentence2", "label"], PAIRS),
        (["question", "sentence", "label"], PAIRS),
        (["premise", "hypothesis", "label"], PAIRS),
        (["question1", "question2", "label"], PAIRS),
        (["index", "sentence1", "sentence2", "score"], [(0, "a", "b", 3.8), (1, "c", "d", 5.0)]),
    ],
)
def test_tsv_and_jsonl_are_the_same_task(tmp_path, fields, rows):
    for kind in ("tsv", "jsonl"):
        for split in ("train", "dev"):
            write(tmp_path / kind, split, fields, rows, kind)
    tsv, jsonl = (open_task(str(tmp_path / kind)) for kind in ("tsv", "jsonl"))
    assert (tsv.train, tsv.dev, tsv.labels) == (jsonl.train, jsonl.dev, jsonl.labels)
    texts = [tuple(str(value) for name, value in zip(fields, row, strict=True) if name[0] in "sqph") for row in rows]
    if fields[-1] == "score":
        texts = [row[:2] for row in texts]
        assert tsv.is_regression and tsv.num_outputs == 1
    else:
        assert tsv.labels == tuple(sorted({row[-1] for row in rows})) and tsv.num_outputs == 2
    assert [example.texts for example in tsv.train] == texts
    assert [example.label for example in tsv.train] == [row[-1] for row in rows]
    assert tsv.name == "tsv" and tsv.train[1].where.endswith("train.tsv:3")


def test_gzip_and_a_byte_order_mark(tmp_path):
    folder_with(tmp_path, "sentence\tlabel\r\nx\t1\r\ny\t0\r\n")
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + (tmp_path / "train.tsv").read_bytes()))
    (tmp_path / "train.tsv").unlink()
    assert [(example.texts, example.label) for example in open_task(str(tmp_path)).train] == [(("x",), 1), (("y",), 0)]


GOOD = "sentence\tlabel\nx\t1\ny\t0\n"


@pytest.mark.parametrize(
    ("train", "dev", "message"),
    [
        ("sentence\tlabel\nx\t1\ny\n", GOOD, r"train.tsv:3: got 1 of the header's 2 columns"),
        ("sentence\tlabel\nx\t1\n\ny\t0\n", GOOD, r"train.tsv:3: got 1 of the header's 2 columns"),
        (
            "text\tlabel\nx\t1\n",
            GOOD,
            r"train.tsv:1: no text among the fields 'text', 'label'; they are named sentence, ",
        ),
        ("sentence\tclass\nx\t1\n", GOOD, r"train.tsv:1: no field 'label' among 'sentence', 'class'"),
        ("sentence\tlabel\nx\t\n", GOOD, r"train.tsv:2: the label is empty"),
        ("sentence\tlabel\nx\t1\n\xe9\t0\n", GOOD, r"train.tsv:3: not UTF-8"),
        (
            "sentence\tlabel\nx\t1\ny\tno\n",
            GOOD,
            r"train.tsv:3: label 'no' is a word, but 1 in .*train.tsv:2 is a number",
        ),
        ("sentence\tlabel\nx\t1\ny\t1\n", GOOD, r"all labels of train are 1, so there is nothing to learn"),
        ("sentence\tlabel\nx\t1.5\n", "sentence\tlabel\nx\thigh\n", r"dev.tsv:2: label 'high' is not a number"),
        ("sentence\tlabel\nx\t1e300\n", GOOD, r"train.tsv:2: the label is 1e\+300, expected a number below 1e\+18"),
        (GOOD, "sentence\tlabel\nx\t2\n", r"dev.tsv:2: label 2 is not in train, which has 0, 1"),
        (GOOD, "sentence\tlabel\n", r"there is no example in dev"),
        ("", GOOD, r"there is no example in train"),
        (
            GOOD,
            "sentence1\tsentence2\tlabel\nx\ty\t1\n",
            r"dev.tsv:2: a pair of texts, but .*train.tsv:3 is a single one",
        ),
    ],
)
def test_what_is_wrong_with_a_tsv_file(tmp_path, train, dev, message):
    with pytest.raises(DataError, match=message) as caught:
        open_task(folder_with(tmp_path, train, dev))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train.jsonl:2: not JSON"),
        ("[]", r"train.jsonl:2: not an object but a list"),
        ("", r"train.jsonl:2: empty line"),
        ('{"sentence": "x"}', r"train.jsonl:2: no field 'label'"),
        ('{"sentence": 3, "label": 1}', r"train.jsonl:2: field 'sentence' is not a string but a number"),
        (
            '{"sentence": "x", "label": true}',
            r"train.jsonl:2: the label is neither a number nor a string but a boolean",
        ),
        ('{"sentence": "x", "label": null}', r"train.jsonl:2: the label is neither a number nor a string but null"),
        ('{"sentence": "x", "label": NaN}', r"train.jsonl:2: the label is nan, expected a number below"),
        ('{"sentence": "\\ud800", "label": 1}', r"train.jsonl:2: .*surrogates not allowed"),
    ],
)
def test_what_is_wrong_with_a_jsonl_file(tmp_path, line, message):
    first = '{"sentence": "w", "label": 0}\n'
    with pytest.raises(DataError, match=message):
        open_task(folder_with(tmp_path, first + line + "\n", first, kind="jsonl"))


def test_folder_without_a_file_or_with_two(tmp_path):
    with pytest.raises(DataError, match=r"holds neither train.tsv nor train.jsonl; put one of train.tsv, "):
        open_task(str(tmp_path))
    folder_with(tmp_path, GOOD)
    (tmp_path / "dev.jsonl").write_text("")
    with pytest.raises(DataError, match=r"holds dev.tsv and dev.jsonl; put one of"):
        open_task(str(tmp_path))


class GlueLike(tfds.core.GeneratorBasedBuilder):
    """As TensorFlow Datasets holds a task of GLUE, with its test split, whose labels are hidden."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = pathlib.Path(__file__).parent / "none"

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(names=["not_equivalent", "equivalent"])
        text = tfds.features.Text()
        features = {"sentence1": text, "sentence2": text, "label": label, "idx": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Any]:
        return {name: self._generate_examples(name) for name in ("train", "validation_matched", "test")}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in range(4):
            label = -1 if split == "test" else number % 2
            yield number, {"sentence1": f"{split} \u00e9", "sentence2": "b", "label": label, "idx": number}


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    return tmp_path


def test_dataset_of_tensorflow_datasets(data_dir):
    with pytest.raises(DataError, match=r"--task glue_like: not prepared on this machine .*or name a folder with"):
        open_task("glue_like")
    tfds.builder("glue_like", file_format="array_record").download_and_prepare()
    task = open_task("glue_like")
    assert task.train == tuple(Example(("train \u00e9", "b"), number % 2, "") for number in range(4))
    assert [example.texts[0] for example in task.dev] == ["validation_matched \u00e9"] * 4
    assert (task.labels, task.name) == ((0, 1), "glue_like")
    assert task.dev[3].where == "glue_like/1.0.0 validation_matched[3]"
    assert "tensorflow" not in sys.modules
    next(data_dir.rglob("*train.array_record*")).unlink()
    with pytest.raises(DataError, match=r"train.array_record.*: missing"):
        open_task("glue_like")


@pytest.mark.parametrize("name", ["nowhere", "no such/place", "./glue"])
def test_neither_a_folder_nor_a_dataset(data_dir, name):
    with pytest.raises(DataError, match=rf"--task {name}: neither a folder nor a dataset of TensorFlow Datasets"):
        open_task(name)


def test_glue_is_known(data_dir, caplog):
    with pytest.raises(DataError, match=r"--task glue/sst2: not prepared .*`tfds build glue/sst2 "):
        open_task("glue/sst2")
    assert not caplog.records
