"""Tasks of GLUE's kind: texts, or pairs of texts, and their labels; from a folder, or from TensorFlow Datasets.

A folder holds ``train`` and ``dev``, each as ``.tsv`` (tabs, a header, no quoting) or ``.jsonl``, maybe gzipped. Labels
are whole numbers or words, which name classes, or numbers with a fraction, which are to be predicted themselves.
"""

import contextlib
import dataclasses
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mecefo_jax.data.files import BYTE_ORDER_MARK, json_type, not_utf8, open_bytes, parse_json
from mecefo_jax.errors import DataError

Label = int | float | str

_TEXT_FIELDS = (
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("sentence",),
)
"""Names of the texts; the first of these of which all are there."""
_LABEL_FIELDS = ("label", "gold_label", "is_duplicate", "score")
"""Names of the label, in the datasets' own files; the first that is there."""
_SUFFIXES = (".tsv", ".jsonl", ".tsv.gz", ".jsonl.gz")
_HELD_OUT = ("validation", "validation_matched")
_LABEL_LIMIT = 1e18
"""Its square, which the loss of a regression begins with, is far from the largest float32."""
_SHOWN_LABELS = 8


@dataclasses.dataclass(frozen=True)
class Example:
    """One or two texts, and what is to be predicted of them."""

    texts: tuple[str, ...]
    label: Label
    where: str = dataclasses.field(compare=False)
    """File and line, or dataset and index."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is fine-tuned on, and what it is judged by."""

    name: str
    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    labels: tuple[int | str, ...]
    """The classes, in ascending order; empty where numbers are predicted."""

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers to be predicted, and not classes."""
        return not self.labels

    @property
    def num_outputs(self) -> int:
        """Outputs of the head: one a class, or the number."""
        return len(self.labels) or 1


def open_task(name: str) -> Task:
    """Read a task.

    Args:
      name: a folder, or a dataset of TensorFlow Datasets such as ``glue/sst2``, which must be there already.

    Raises:
      DataError: there is no such task, it cannot be read, or its labels do not fit each other; names file and line.
    """
    folder = pathlib.Path(name).expanduser()
    if folder.is_dir():
        return make_task(folder.resolve().name, *(list(_read(_find(folder, split))) for split in ("train", "dev")))
    return make_task(name, *_read_tfds(name))


def make_task(name: str, train: Sequence[Example], dev: Sequence[Example]) -> Task:
    """A task of examples; the classes are those of ``train``.

    Raises:
      DataError: a part is empty, labels are of different kinds or all the same, or ``dev`` has one that is not in
        ``train``.
    """
    for split, examples in (("train", train), ("dev", dev)):
        if not examples:
            raise DataError(f"{name}: there is no example in {split}")
    parts = {len(example.texts): example for example in (*train, *dev)}
    if len(parts) > 1:
        raise DataError(f"{parts[2].where}: a pair of texts, but {parts[1].where} is a single one")
    task = Task(name=name, train=tuple(train), dev=tuple(dev), labels=_classes(name, train))
    for example in dev:
        if task.is_regression and isinstance(example.label, str):
            raise DataError(f"{example.where}: label {example.label!r} is not a number, as those of train are")
        if not task.is_regression and example.label not in task.labels:
            shown = ", ".join(repr(label) for label in task.labels[:_SHOWN_LABELS])
            more = ", ..." if len(task.labels) > _SHOWN_LABELS else ""
            raise DataError(f"{example.where}: label {example.label!r} is not in train, which has {shown}{more}")
    return task


def _classes(name: str, train: Sequence[Example]) -> tuple[int | str, ...]:
    """The labels of classes; empty if these are numbers to be predicted."""
    words = next((example for example in train if isinstance(example.label, str)), None)
    numbers = next((example for example in train if not isinstance(example.label, str)), None)
    if words is not None and numbers is not None:
        raise DataError(
            f"{words.where}: label {words.label!r} is a word, but {numbers.label!r} in {numbers.where} is a number; "
            "write all as words or all as numbers"
        )
    if any(isinstance(example.label, float) for example in train):
        return ()
    labels = sorted({example.label for example in train})  # type: ignore[type-var]  # all are of one type
    if len(labels) == 1:
        raise DataError(f"{name}: all labels of train are {labels[0]!r}, so there is nothing to learn")
    return tuple(labels)  # type: ignore[arg-type]  # no float among them


def _find(folder: pathlib.Path, split: str) -> pathlib.Path:
    found = [folder / (split + suffix) for suffix in _SUFFIXES if (folder / (split + suffix)).is_file()]
    if len(found) != 1:
        reason = " and ".join(path.name for path in found) if found else f"neither {split}.tsv nor {split}.jsonl"
        raise DataError(f"{folder}: holds {reason}; put one of {', '.join(split + s for s in _SUFFIXES)} there")
    return found[0]


def _read(path: pathlib.Path) -> Iterator[Example]:
    read_line = _of_tsv if ".tsv" in path.name else _of_json
    with open_bytes(path) as (stream, _):
        lines = enumerate(stream, start=1)
        try:
            yield from read_line(lines, path)
        except _LineError as error:
            raise DataError(f"{path}:{error.number}: {error}") from error


class _LineError(ValueError):
    """What is wrong with a line."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def _of_tsv(lines: Iterable[tuple[int, bytes]], path: pathlib.Path) -> Iterator[Example]:
    header: list[str] | None = None
    make: Callable[[Mapping[str, Any], str], Example] | None = None
    for number, line in lines:
        try:
            cells = line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").decode().rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            raise _LineError(number, not_utf8(error)) from error
        try:
            if header is None or make is None:
                header, make = cells, _maker(cells)
                continue
            if len(cells) != len(header):
                raise ValueError(f"got {len(cells)} of the header's {len(header)} columns")
            yield make(dict(zip(header, cells, strict=True)), f"{path}:{number}")
        except ValueError as error:
            raise _LineError(number, str(error)) from error


def _of_json(lines: Iterable[tuple[int, bytes]], path: pathlib.Path) -> Iterator[Example]:
    make: Callable[[Mapping[str, Any], str], Example] | None = None
    for number, line in lines:
        try:
            record = parse_json(line.removeprefix(BYTE_ORDER_MARK if number == 1 else b""))
            if not isinstance(record, dict):
                raise ValueError(f"not an object but {json_type(record)}")
            make = _maker(record) if make is None else make
            yield make(record, f"{path}:{number}")
        except ValueError as error:
            raise _LineError(number, str(error)) from error


def _maker(names: Iterable[str]) -> Callable[[Mapping[str, Any], str], Example]:
    """What makes examples of records with these fields; ValueError if the texts or the label are not among them."""
    given = list(names)
    texts = next((fields for fields in _TEXT_FIELDS if set(fields) <= set(given)), None)
    if texts is None:
        known = ", ".join(" + ".join(fields) for fields in reversed(_TEXT_FIELDS))
        raise ValueError(f"no text among the fields {', '.join(map(repr, given))}; they are named {known}")
    label = next((field for field in _LABEL_FIELDS if field in given), None)
    if label is None:
        raise ValueError(f"no field 'label' among {', '.join(map(repr, given))}")

    def make(record: Mapping[str, Any], where: str) -> Example:
        for field in (*texts, label):
            if field not in record:
                raise ValueError(f"no field {field!r}")
        for field in texts:
            if not isinstance(record[field], str):
                raise ValueError(f"field {field!r} is not a string but {json_type(record[field])}")
            record[field].encode()  # half a surrogate pair, which JSON may hold, is no text
        return Example(tuple(record[field] for field in texts), _label(record[label]), where)

    return make


def _label(value: Any) -> Label:
    """A label as JSON or a TSV file has it: numbers may be written as text; ValueError if it is none."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the label is empty")
        if re.fullmatch(r"[+-]?[0-9]+", value):
            return int(value)
        if not re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?", value):
            return value
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the label is neither a number nor a string but {json_type(value)}")
    if not abs(value) < _LABEL_LIMIT:
        raise ValueError(f"the label is {value}, expected a number below {_LABEL_LIMIT:g}")
    return value


def _read_tfds(name: str) -> tuple[list[Example], list[Example]]:
    import tensorflow_datasets as tfds  # takes seconds, which folders need not

    from mecefo_jax.data import tfds_text

    try:
        with _silent_warnings():
            builder = tfds_text.find_builder(name)
            is_prepared = builder.is_prepared()
    except (tfds.core.DatasetNotFoundError, ValueError) as error:  # the latter: not spelled as a dataset's name
        raise DataError(f"--task {name}: neither a folder nor a dataset of TensorFlow Datasets") from error
    if not is_prepared:
        raise DataError(
            f"--task {name}: not prepared on this machine ({builder.data_path} is not there); run `tfds build {name} "
            "--file_format=array_record` where there is a network, or name a folder with train.tsv and dev.tsv"
        )
    held_out = next((split for split in _HELD_OUT if split in builder.info.splits), None)
    if held_out is None or "train" not in builder.info.splits:
        raise DataError(f"--task {name}: no splits train and validation among {', '.join(builder.info.splits)}")
    return _tfds_split(builder, "train"), _tfds_split(builder, held_out)


@contextlib.contextmanager
def _silent_warnings() -> Iterator[None]:
    """Without the warning of a dataset that is not prepared, which the error says better."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tfds_split(builder: Any, split: str) -> list[Example]:
    from mecefo_jax.data import tfds_text

    name = f"{builder.info.full_name} {split}"
    tfds_text.check_files(builder, split)
    source, found = builder.as_data_source(split=split), []
    try:
        make = _maker(builder.info.features)
        for index in range(len(source)):
            record = {field: _plain(value) for field, value in source[index].items()}
            found.append(make(record, f"{name}[{index}]"))
    except (ValueError, RuntimeError, OSError) as error:
        raise DataError(f"{name}: example {len(found)} cannot be read ({error})") from error
    return found


def _plain(value: Any) -> Any:
    """A feature as JSON would have it."""
    return value.decode() if isinstance(value, bytes) else value.item() if hasattr(value, "item") else value
