"""The last states of a process, kept in shared memory so that they outlive it: two slots, each sealed by a mark.

One file per process, which only its owner may open::

    mark of slot 0 | mark of slot 1 | ... a page ... | payload | payload

A mark holds the step of its slot, where its payload lies and the payload's checksums, and carries its own. It is the
last thing to be written and the first to be taken away, so that a process may be killed at any byte: the slot that
was being written is then not found, and the other one is whole. A payload is placed where it does not touch the other
slot's, wherever that lies; states may therefore change their size between writes and runs, and the older one stays
readable while the file grows.

Everything goes through reads and writes of the file, never through a mapping: where shared memory is full they raise
an OSError, whereas a mapping would end the process with SIGBUS. Nothing here survives a reboot; that is what
checkpoints are for.
"""

import glob
import hashlib
import json
import math
import os
import pathlib
import stat
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (importing it teaches NumPy the names bfloat16, float8_... )
import numpy as np

State = tuple[int, dict[str, Any], list[np.ndarray]]

_SHARED_MEMORY = pathlib.Path("/dev/shm")
_MAGIC = b"MeCeFO 1"
_MARK = struct.Struct("<8sqQQIQI")
_CHECKSUM = struct.Struct("<I")
_MARK_BYTES = 64
_PAGE_BYTES = 4096
# What is copied is checksummed while it is still in the processor's cache.
_CHUNK_BYTES = 1 << 18


class _Mark(NamedTuple):
    """What is known of a slot without reading its payload: a description in JSON, then the bytes of the arrays."""

    step: int
    offset: int
    description_bytes: int
    description_checksum: int
    array_bytes: int
    array_checksum: int

    @property
    def end(self) -> int:
        return self.offset + self.description_bytes + self.array_bytes


class StateMemory:
    """The last two states of one process of a run, in a file in shared memory.

    The file lies in ``/dev/shm`` where there is one, else in the folder of temporary files. It is opened at the first
    use and made by the first write. One process writes; any process of the same user may read meanwhile.
    """

    def __init__(self, key: str, process: int) -> None:
        """Opens nothing yet.

        Args:
          key: identifies the run, such as its resolved directory.
          process: number of the process in the cluster.
        """
        self.process = process
        self.path = _folder() / f"{_stem(key)}{process}.state"
        self._descriptor: int | None = None

    def write(self, step: int, facts: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Keeps the state after ``step``, and with it the newest one before that step.

        States of this step or later ones belong to a past that was given up; they are gone before the first byte of
        the new one is written.

        Args:
          step: what the state is found by.
          facts: JSON-able facts to keep beside the arrays.
          arrays: any shapes, any dtypes of NumPy or ml_dtypes but objects.

        Raises:
          OSError: shared memory is full (all kept states are still there), or the file is not this user's own.
          TypeError: facts are not JSON-able, or a dtype has no name.
        """
        shapes = [[_dtype_name(array.dtype), list(array.shape)] for array in arrays]
        description = json.dumps({"facts": dict(facts), "arrays": shapes}).encode()
        array_bytes = sum(array.nbytes for array in arrays)
        file = self._open(create=True)
        assert file is not None
        marks = [_read_mark(file, slot) for slot in (0, 1)]
        kept = max((mark for mark in marks if mark and mark.step < step), default=None, key=lambda mark: mark.step)
        target = 1 if kept is not None and kept == marks[0] else 0
        offset = _place(len(description) + array_bytes, kept)
        _reserve(file, offset + len(description) + array_bytes)
        for slot in (0, 1):
            if kept is None or slot == target:
                _write_all(file, bytes(_MARK_BYTES), slot * _MARK_BYTES)
        description_checksum = _write_all(file, description, offset)
        array_checksum, position = 0, offset + len(description)
        for array in arrays:
            array_checksum = _write_all(file, _bytes_of(np.ascontiguousarray(array)), position, array_checksum)
            position += array.nbytes
        mark = _Mark(step, offset, len(description), description_checksum, array_bytes, array_checksum)
        packed = _MARK.pack(_MAGIC, *mark)
        _write_all(file, packed + _CHECKSUM.pack(zlib.crc32(packed)), target * _MARK_BYTES)

    def newest(self) -> State | None:
        """Step, facts and arrays of the newest state that is intact, or None; the arrays are the caller's own.

        Raises:
          OSError: the file is not this user's own, or cannot be read.
        """
        return self._first_intact(None)

    def read(self, step: int) -> State | None:
        """What ``newest`` returns, of the state after ``step``: processes that go on together agree on a common one."""
        return self._first_intact(step)

    def steps(self) -> list[int]:
        """Steps of the states that there are, ascending, by their marks alone: a payload may yet be corrupt.

        Raises:
          OSError: the file is not this user's own, or cannot be read.
        """
        file = self._open()
        return [] if file is None else sorted(mark.step for mark in _read_marks(file))

    def remove(self) -> None:
        """Frees the shared memory; a later write begins anew."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file, which stays; a later use opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _first_intact(self, step: int | None) -> State | None:
        """The newest intact state, of ``step`` alone unless that is None."""
        file = self._open()
        if file is None:
            return None
        while True:
            marks = _read_marks(file)
            for mark in sorted(marks, key=lambda mark: mark.step, reverse=True):
                if step in (None, mark.step) and (state := _read_state(file, mark)) is not None:
                    return state
            if _read_marks(file) == marks:  # else another process has written over what was being read
                return None

    def _open(self, *, create: bool = False) -> int | None:
        """The open file, or None where there is none and none is to be made."""
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            try:
                descriptor = os.open(self.path, flags, 0o600)
            except FileNotFoundError:
                if create:
                    raise
                return None
            try:
                _check_own(descriptor, self.path)
            except OSError:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._descriptor


def processes_of(key: str) -> list[int]:
    """Processes of a run that keep states on this machine, ascending."""
    stem = _stem(key)
    return sorted(int(path.stem.removeprefix(stem)) for path in _folder().glob(f"{glob.escape(stem)}*.state"))


def remove_all(key: str) -> None:
    """Frees the shared memory of all processes of the run that ``key`` identifies; none of them may be writing."""
    for path in _folder().glob(f"{glob.escape(_stem(key))}*.state"):
        path.unlink(missing_ok=True)


def _folder() -> pathlib.Path:
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    return _SHARED_MEMORY if usable else pathlib.Path(tempfile.gettempdir())


def _stem(key: str) -> str:
    """What the names of a run's files begin with."""
    return f"mecefo_jax-{hashlib.sha256(key.encode()).hexdigest()[:24]}-"


def _check_own(descriptor: int, path: pathlib.Path) -> None:
    """Refuses what another user may have put there: anyone may make files in shared memory."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{path}: expected a file of user {os.geteuid()} with mode 600, got user {found.st_uid} and "
            f"{stat.filemode(found.st_mode)}; remove it"
        )


def _place(size: int, kept: _Mark | None) -> int:
    """Where a payload of ``size`` bytes begins so that it does not touch the one that is kept."""
    if kept is None or _PAGE_BYTES + size <= kept.offset:
        return _PAGE_BYTES
    return -(-kept.end // _PAGE_BYTES) * _PAGE_BYTES


def _reserve(file: int, end: int) -> None:
    """Makes the file at least ``end`` bytes long, all of them backed: a full memory is noticed before anything is lost.

    Where the system cannot reserve, the writes themselves raise.
    """
    size = os.fstat(file).st_size
    if end > size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, size, end - size)


def _dtype_name(dtype: np.dtype) -> str:
    """The name that NumPy finds the dtype by."""
    for name in (dtype.name, dtype.str):  # ml_dtypes have a name alone, other byte orders only show in the string
        try:
            if np.dtype(name) == dtype and not dtype.hasobject:
                return name
        except TypeError:
            continue
    raise TypeError(f"arrays: got dtype {dtype}, expected one that a name stands for and that holds no objects")


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array, without a copy; ml_dtypes have no buffers of their own."""
    return array.reshape(-1).view(np.uint8).data


def _write_all(file: int, data: bytes | memoryview, offset: int, checksum: int = 0) -> int:
    """Writes at an offset; returns the checksum of what the given one stands for and ``data``."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view[:_CHUNK_BYTES], offset)
        checksum = zlib.crc32(view[:written], checksum)
        view, offset = view[written:], offset + written
    return checksum


def _read_into(file: int, view: memoryview, offset: int, checksum: int = 0) -> int:
    """Fills ``view`` from an offset, as far as the file goes; returns the checksum as ``_write_all`` does."""
    while view and (count := os.preadv(file, [view[:_CHUNK_BYTES]], offset)):
        checksum = zlib.crc32(view[:count], checksum)
        view, offset = view[count:], offset + count
    return checksum


def _read_marks(file: int) -> list[_Mark]:
    """Marks of the slots that have one."""
    return [mark for slot in (0, 1) if (mark := _read_mark(file, slot)) is not None]


def _read_mark(file: int, slot: int) -> _Mark | None:
    """The mark of a slot, or None if it has none, or one that was cut short."""
    data = os.pread(file, _MARK.size + _CHECKSUM.size, slot * _MARK_BYTES)
    packed, checksum = data[: _MARK.size], data[_MARK.size :]
    if len(checksum) != _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != zlib.crc32(packed):
        return None
    magic, *fields = _MARK.unpack(packed)
    return _Mark(*fields) if magic == _MAGIC else None


def _read_state(file: int, mark: _Mark) -> State | None:
    """What a mark stands for, or None if it is not what was written."""
    buffer = bytearray(mark.description_bytes)
    if _read_into(file, memoryview(buffer), mark.offset) != mark.description_checksum:
        return None
    description = json.loads(buffer)
    specs = [(np.dtype(name), tuple(shape)) for name, shape in description["arrays"]]
    assert sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs) == mark.array_bytes
    arrays, checksum, offset = [], 0, mark.offset + mark.description_bytes
    for dtype, shape in specs:
        array = np.empty(shape, dtype)
        checksum = _read_into(file, _bytes_of(array), offset, checksum)
        offset += array.nbytes
        arrays.append(array)
    return (mark.step, description["facts"], arrays) if checksum == mark.array_checksum else None
