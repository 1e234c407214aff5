"""Any TensorFlow Datasets name with a text feature as a source of documents, without TensorFlow.

The dataset is built or opened in the ArrayRecord format, which needs no TensorFlow. It lies where tfds keeps its
datasets (the environment variable TFDS_DATA_DIR, by default ~/tensorflow_datasets).
"""

import contextlib
import functools
import importlib
import io
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow_datasets as tfds

from mecefo_jax.config import DataConfig
from mecefo_jax.data.documents import Document, Rejects, Source, Split
from mecefo_jax.data.records import count_records
from mecefo_jax.errors import DataError

_COLLECTIONS = ("text", "summarization", "question_answering", "text_simplification", "translate", "structured")


def tfds_source(config: DataConfig, *, progress: bool) -> Source:
    """Return the source of the dataset that ``data.tfds_name`` names.

    Its feature "text" is read, or else its first text feature. Its split "validation" is held out, or else "test".

    Args:
      config: the data section.
      progress: whether tfds shows its own progress while it builds the dataset.

    Raises:
      DataError: the dataset is unknown, cannot be built, or has no text feature or no split "train".
    """
    name = config.tfds_name
    builder = _open_builder(name, progress=progress)
    feature = text_feature(builder.info.features, name)
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    if not sizes.get("train"):
        raise DataError(f"tfds dataset {name}: no split 'train' among {', '.join(sizes) or 'none'}")
    held_out = next((split for split in ("validation", "test") if sizes.get(split)), None)
    splits: dict[str, Split | None] = {"train": "train" if held_out else None}
    if held_out:
        splits[held_out] = "validation"
    hashes = {split: [list(info.shard_lengths), info.num_bytes] for split, info in builder.info.splits.items()}
    return Source(
        name=f"tfds {name}",
        identity={"source": "tfds", "name": builder.info.full_name, "feature": feature, "splits": hashes},
        paths=(str(builder.data_path),),
        size=sum(sizes[split] for split in splits),
        has_splits=held_out is not None,
        documents=functools.partial(documents_of, builder, feature, splits),
    )


def text_feature(features: Any, name: str) -> str:
    """Return the feature to read: the text feature "text", or else the first text feature.

    Args:
      features: the dataset's features.
      name: the dataset, for messages.

    Raises:
      DataError: there is none.
    """
    found = []
    if isinstance(features, tfds.features.FeaturesDict):
        found = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
    if not found:
        raise DataError(f"tfds dataset {name}: no text feature among {features}".replace("\n", " "))
    return "text" if "text" in found else found[0]


def documents_of(
    builder: Any, feature: str, splits: Mapping[str, Split | None], rejects: Rejects
) -> Iterator[Document]:
    """Yield the documents of a prepared tfds dataset, split after split in the order of the files.

    Args:
      builder: tfds builder whose data is prepared.
      feature: name of the text feature.
      splits: split of the dataset -> split of its documents; absent or empty splits of the dataset are passed over.
      rejects: where texts that are not UTF-8 go.

    Raises:
      DataError: a file is cut short or damaged.
    """
    position = 0
    for name, split in splits.items():
        if name not in builder.info.splits or not builder.info.splits[name].num_examples:
            continue
        check_files(builder, name)
        examples = builder.as_data_source(split=name)
        for index in range(len(examples)):
            position += 1
            try:
                value = examples[index][feature]
            except (RuntimeError, OSError) as error:
                files = ", ".join(str(path) for path in builder.info.splits[name].filepaths)
                raise DataError(f"{files}: example {index} cannot be read ({error})") from error
            try:
                text = value.decode() if isinstance(value, bytes) else str(value)
            except UnicodeDecodeError as error:
                rejects.add(f"{builder.info.full_name} {name}[{index}]", f"not UTF-8 ({error.reason})")
            else:
                yield Document(text, position, split)


def check_files(builder: Any, split: str) -> None:
    """Raise DataError, naming the file, unless each file of a split holds as many examples as were written."""
    info = builder.info.splits[split]
    for path, length in zip(info.filepaths, info.shard_lengths, strict=True):
        if not pathlib.Path(path).is_file():
            raise DataError(f"{path}: missing; delete {builder.data_path} to build the dataset again")
        found = count_records(pathlib.Path(path))
        if found != length:
            raise DataError(
                f"{path}: cut short or damaged ({found} records found, {length} were written); "
                f"delete {builder.data_path} to build the dataset again"
            )


def find_builder(name: str) -> Any:
    """Return the tfds builder of a name such as ``c4/en``; it neither downloads nor builds anything.

    Raises:
      DatasetNotFoundError: tfds knows no such dataset.
    """
    try:
        return tfds.builder(name, file_format="array_record")
    except tfds.core.DatasetNotFoundError:
        # tfds registers its older datasets, C4 among them, only when their collection is imported.
        for collection in _COLLECTIONS:
            importlib.import_module(f"tensorflow_datasets.{collection}")
        return tfds.builder(name, file_format="array_record")


def _open_builder(name: str, *, progress: bool) -> Any:
    try:
        builder = find_builder(name)
        with contextlib.ExitStack() as quiet:
            if not progress:
                quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
                quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except tfds.core.DatasetNotFoundError as error:
        raise DataError(f"data.tfds_name: tfds knows no dataset {name!r}; see tensorflow.org/datasets") from error
    except Exception as error:  # whatever a dataset's own code, its download or its disk may raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"tfds dataset {name} cannot be built ({reason[:300]}); supply what it needs, or read files of text with "
            "--data.source files"
        ) from error
    return builder
