"""Datasets of TensorFlow Datasets: which feature and splits are read, without TensorFlow."""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mecefo_jax.config import DataConfig
from mecefo_jax.data.documents import Document, Rejects
from mecefo_jax.data.tfds_text import find_builder, text_feature, tfds_source
from mecefo_jax.errors import DataError

TEXT = tfds.features.Text()


class TextBase(tfds.core.GeneratorBasedBuilder):
    """A dataset of numbered texts, as its subclasses say."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = pathlib.Path(__file__).parent / "none"
    skip_registration = True
    SPLITS: dict[str, int] = {}
    FEATURES: dict[str, Any] = {"title": TEXT, "text": TEXT}

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(self.FEATURES)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: object) -> dict[str, Any]:
        return {name: self._generate_examples(name, count) for name, count in self.SPLITS.items()}

    def _generate_examples(self, split: str, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for i in range(count):
            values = {name: f"{split} {name} {i}" for name in self.FEATURES}
            yield i, {name: 7 if name == "label" else value for name, value in values.items()}


class ThreeSplitText(TextBase):
    """With a validation and a test split."""

    skip_registration = False
    SPLITS = {"train": 6, "test": 2, "validation": 3}


class TestSplitText(TextBase):
    """With a test split, and a text feature of another name."""

    __test__ = False
    skip_registration = False
    SPLITS = {"train": 6, "test": 2}
    FEATURES = {"label": tfds.features.Scalar(np.int64), "body": TEXT, "title": TEXT}


class TrainOnlyText(TextBase):
    """With nothing to hold out."""

    skip_registration = False
    SPLITS = {"train": 6}


class NoTrainText(TextBase):
    """With nothing to train on."""

    skip_registration = False
    SPLITS = {"test": 2}


class NoText(TextBase):
    """With numbers alone."""

    skip_registration = False
    SPLITS = {"train": 2}
    FEATURES = {"label": tfds.features.Scalar(np.int64)}


class FailingText(TextBase):
    """That cannot be built."""

    skip_registration = False

    def _split_generators(self, dl_manager: object) -> dict[str, Any]:
        raise ConnectionError("no\nnetwork")


@pytest.fixture(autouse=True)
def data_dir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    return tmp_path


def read(name: str, rejects: Rejects | None = None) -> list[Document]:
    source = tfds_source(DataConfig(source="tfds", tfds_name=name), progress=False)
    documents = list(source.documents(rejects or Rejects(skip=False)))
    assert [document.position for document in documents] == list(range(1, source.size + 1))
    assert source.has_splits == any(document.split == "validation" for document in documents)
    assert "tensorflow" not in sys.modules
    return documents


def test_the_validation_split_is_held_out_and_the_test_split_left_alone() -> None:
    documents = read("three_split_text")
    assert [d.text for d in documents if d.split == "train"] == [f"train text {i}" for i in range(6)]
    assert [d.text for d in documents if d.split == "validation"] == [f"validation text {i}" for i in range(3)]
    assert len(documents) == 9


def test_the_test_split_stands_in_and_the_first_text_feature_is_read() -> None:
    documents = read("test_split_text")
    assert [d.text for d in documents if d.split == "train"] == [f"train body {i}" for i in range(6)]
    assert [d.text for d in documents if d.split == "validation"] == [f"test body {i}" for i in range(2)]


def test_a_dataset_without_either_leaves_the_division_open() -> None:
    assert {document.split for document in read("train_only_text")} == {None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_train_text", "no split 'train' among test"),
        ("no_text", "no text feature among .*label"),
        ("failing_text", "failing_text cannot be built .no network"),
        ("nothing_of_the_kind", "tfds knows no dataset 'nothing_of_the_kind'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(name)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_is_named(data_dir: pathlib.Path) -> None:
    read("three_split_text")
    path = next(data_dir.rglob("*validation.array_record*"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{path}: cut short or damaged"):
        read("three_split_text")


def test_c4_is_known() -> None:
    builder = find_builder("c4/en")
    assert text_feature(builder.info.features, "c4/en") == "text"
    assert "tensorflow" not in sys.modules
