"""Records on disk: ArrayRecord files of packed tokens, and random access to them.

Tokens are little-endian uint16, or uint32 for vocabularies that need it; padding is not stored. A split of up to
128 MiB is read into memory when it is opened (random access to single records costs about 60 us each, to memory
less than 1 us); a larger one is read record by record through grain.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from grain.sources import ArrayRecordDataSource
from jaxtyping import Int32

from mecefo_jax.data.packing import Packer, pad_record
from mecefo_jax.errors import DataError

SET_CACHE_DIR = "set --data.cache_dir to a folder that can be written to, with room enough"
"""What to do where prepared data cannot be written."""
_RECORDS_PER_FILE = 2**20
_IN_MEMORY_BYTES = 2**27


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that tokens of a vocabulary are stored in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file of records: its name, its size in bytes, and how many records it holds."""

    name: str
    num_bytes: int
    num_records: int


class RecordWriter:
    """Packs a stream of tokens and writes it as the files ``NAME-00000.array_record`` ... of a folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        *,
        seq_len: int,
        vocab_size: int,
        records_per_file: int = _RECORDS_PER_FILE,
    ) -> None:
        self._folder = folder
        self._name = name
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._packer = Packer(seq_len)
        self._records_per_file = records_per_file
        self._writer: Any = None
        self._open_records = 0
        self._files: list[RecordFile] = []
        self.num_tokens = 0

    def write(self, tokens: Int32[np.ndarray, " T"]) -> None:
        """Append tokens to the stream."""
        assert not len(tokens) or (tokens.min() >= 0 and tokens.max() < self._vocab_size), "token out of range"
        self.num_tokens += len(tokens)
        for record in self._packer.push(tokens).astype(self._dtype):
            self._write_record(record)

    def close(self) -> list[RecordFile]:
        """Write the last record and return the files."""
        last = self._packer.finish()
        if last is not None:
            self._write_record(last.astype(self._dtype))
        self._close_file()
        return self._files

    def _write_record(self, record: np.ndarray) -> None:
        if self._writer is None:
            # Groups of one record are what grain reads without unpacking neighbours.
            self._writer = ArrayRecordWriter(str(self._path()), "group_size:1,uncompressed")
        try:
            self._writer.write(record.tobytes())
        except RuntimeError as error:
            raise self._unwritable(error) from error
        self._open_records += 1
        if self._open_records == self._records_per_file:
            self._close_file()

    def _path(self) -> pathlib.Path:
        return self._folder / f"{self._name}-{len(self._files):05d}.array_record"

    def _close_file(self) -> None:
        if self._writer is not None:
            path = self._path()
            try:
                self._writer.close()
            except RuntimeError as error:
                raise self._unwritable(error) from error
            self._files.append(RecordFile(path.name, path.stat().st_size, self._open_records))
            self._writer, self._open_records = None, 0

    def _unwritable(self, error: RuntimeError) -> DataError:
        reason = " ".join(str(error).split())
        return DataError(f"{self._path()}: cannot be written ({reason}); {SET_CACHE_DIR}")


class Records(Sequence[np.ndarray]):
    """Random access to the records of a split: ``records[i]`` is int32[seq_len + 1]."""

    def __init__(
        self,
        folder: pathlib.Path,
        files: Sequence[RecordFile],
        *,
        seq_len: int,
        vocab_size: int,
        in_memory_bytes: int = _IN_MEMORY_BYTES,
    ) -> None:
        """Open the files of a split and check that they are whole.

        Args:
          folder: where the files are.
          files: the files, as written.
          seq_len: tokens that a record predicts.
          vocab_size: bound on the tokens.
          in_memory_bytes: size up to which the split is read into memory.

        Raises:
          DataError: a file is missing, cut short or damaged, or holds a token outside the vocabulary.
        """
        self._folder = folder
        self._files = tuple(files)
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._ends = np.cumsum([file.num_records for file in files], dtype=np.int64)
        for file in files:
            _check_file(folder / file.name, file)
        self._table: np.ndarray | None = None
        self._source: ArrayRecordDataSource | None = None
        if sum(file.num_bytes for file in files) <= in_memory_bytes:
            self._table = self._read_all()
        else:
            self._source = ArrayRecordDataSource([str(folder / file.name) for file in files])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._files else 0

    def __getitem__(self, index: int) -> Int32[np.ndarray, " T+1"]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        if self._table is not None:
            return self._table[index].copy()
        assert self._source is not None
        try:
            content = self._source[int(index)]
        except (RuntimeError, OSError) as error:
            raise self._damaged(self._path_of(index), error) from error
        record = np.frombuffer(content, token_dtype(self._vocab_size)).astype(np.int32)
        self._check_range(record[None], index)
        return pad_record(record, self._seq_len)

    def _read_all(self) -> Int32[np.ndarray, "N T+1"]:
        parts = [np.zeros((0, self._seq_len + 1), np.int32)]
        first = 0
        for file in self._files:
            path = self._folder / file.name
            try:
                contents = ArrayRecordReader(str(path)).read_all()
            except (RuntimeError, OSError) as error:
                raise self._damaged(path, error) from error
            dtype = token_dtype(self._vocab_size)
            whole = np.frombuffer(b"".join(contents[:-1]), dtype).astype(np.int32)
            last = np.frombuffer(contents[-1], dtype).astype(np.int32)
            for part in (whole.reshape(-1, self._seq_len + 1), last[None]):
                self._check_range(part, first)
                first += len(part)
                parts.append(part)
            parts[-1] = pad_record(last, self._seq_len)[None]
        return np.concatenate(parts)

    def _check_range(self, records: Int32[np.ndarray, "N T"], first: int) -> None:
        """Refuse tokens outside the vocabulary: on the device they would silently read another row."""
        if records.size and records.max() >= self._vocab_size:
            index = first + int(np.argmax((records >= self._vocab_size).any(axis=1)))
            raise DataError(
                f"{self._path_of(index)}: record {index} holds token {records.max()}, but the tokenizer has "
                f"{self._vocab_size} entries; delete {self._folder} to prepare the data again"
            )

    def _path_of(self, index: int) -> pathlib.Path:
        return self._folder / self._files[int(np.searchsorted(self._ends, index, side="right"))].name

    def _damaged(self, path: pathlib.Path, error: Exception) -> DataError:
        reason = " ".join(str(error).split())
        return DataError(f"{path}: damaged ({reason}); delete {self._folder} to prepare the data again")


def count_records(path: pathlib.Path) -> int:
    """Return how many records an ArrayRecord file holds; 0 for one that is cut short."""
    reader = ArrayRecordReader(str(path))
    found = reader.num_records()
    with contextlib.suppress(RuntimeError):  # a damaged file opens as an empty one, and complains when it is closed
        reader.close()
    return found


def _check_file(path: pathlib.Path, file: RecordFile) -> None:
    again = f"delete {path.parent} to prepare the data again"
    if not path.is_file():
        raise DataError(f"{path}: missing; {again}")
    size = os.path.getsize(path)
    if size != file.num_bytes:
        raise DataError(f"{path}: {size} bytes, but {file.num_bytes} were written; {again}")
    found = count_records(path)
    if found != file.num_records:
        raise DataError(f"{path}: damaged ({found} records found, {file.num_records} were written); {again}")
