"""Local text files as a source of documents: ``*.txt``, and JSON lines, each optionally gzipped.

A text file is one document. A JSON lines file (``.jsonl``, or ``.json`` as C4 is published) holds a document in
the field "text" of each line. Text is UTF-8; a leading byte order mark is dropped.
"""

import contextlib
import glob
import gzip
import hashlib
import json
import os
import pathlib
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

from mecefo_jax.config import DataConfig
from mecefo_jax.data.documents import Document, Rejects, Source, Split
from mecefo_jax.errors import DataError

_TEXT_SUFFIXES = (".txt",)
_LINES_SUFFIXES = (".jsonl", ".json")
_SETTLED_SECONDS = 2.0
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def files_source(config: DataConfig, hash_cache: pathlib.Path) -> Source:
    """Return the source of the files that ``data.files`` and ``data.validation_files`` name.

    Files named by both are held out: they are validation files only.

    Args:
      config: the data section.
      hash_cache: JSON file in which content hashes are remembered by path, size and times.

    Raises:
      DataError: a pattern matches nothing, or a file is of an unknown kind or cannot be read.
    """
    validation = expand(config.validation_files, "data.validation_files")
    held_out = {path.resolve() for path in validation}
    train = [path for path in expand(config.files, "data.files") if path.resolve() not in held_out]
    if not train:
        raise DataError("data.validation_files holds out every file of data.files; leave at least one to train on")
    files: list[tuple[pathlib.Path, Split | None]] = [(path, "train" if validation else None) for path in train]
    files += [(path, "validation") for path in validation]
    hashes = content_hashes([path for path, _ in files], hash_cache)
    content = [[_kind(path), split, sha256] for (path, split), sha256 in zip(files, hashes, strict=True)]
    return Source(
        name="files",
        identity={"source": "files", "content": content},
        paths=tuple(str(path) for path, _ in files),
        size=sum(path.stat().st_size for path, _ in files),
        has_splits=bool(validation),
        documents=lambda rejects: _documents(files, rejects),
        held_out_paths=tuple(str(path) for path in validation),
    )


def expand(patterns: Sequence[str], field: str) -> list[pathlib.Path]:
    """Return the files that paths and globs name: in the order of the patterns, sorted within each, none twice.

    Args:
      patterns: paths or globs; ``~`` and ``**`` are understood.
      field: config field that they come from, for messages.

    Raises:
      DataError: a pattern matches no file, or names one of an unknown kind.
    """
    found: dict[pathlib.Path, pathlib.Path] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        names = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
        if len(names) == 1 and os.path.isdir(names[0]):
            raise DataError(f"{field}: {pattern!r} is a folder; name its files, such as '{pattern.rstrip('/')}/*.txt'")
        paths = [pathlib.Path(name) for name in names if os.path.isfile(name)]
        if not paths:
            raise DataError(f"{field}: no file matches {pattern!r} (in {os.getcwd()})")
        for path in paths:
            if _kind(path) is None:
                raise DataError(f"{field}: {path} is neither *.txt nor *.jsonl nor *.json, with or without .gz")
            found.setdefault(path.resolve(), path)
    return list(found.values())


def content_hashes(paths: Sequence[pathlib.Path], cache: pathlib.Path) -> list[str]:
    """Return the SHA-256 of each file, read again only where its size or times differ from those remembered.

    Times younger than two seconds are not trusted: a file may change twice within a clock tick.

    Args:
      paths: the files.
      cache: JSON file of what is remembered; a missing or unreadable one is only slower.

    Raises:
      DataError: a file cannot be read.
    """
    remembered = _read_cache(cache)
    hashes = []
    changed = False
    for path in paths:
        key = str(path.resolve())
        try:
            stat = path.stat()
            known = remembered.get(key)
            stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
            if isinstance(known, list) and known[:-1] == stamp:
                hashes.append(str(known[-1]))
                continue
            with open(path, "rb") as stream:
                hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED_SECONDS:
            remembered[key] = [*stamp, hashes[-1]]
            changed = True
    if changed:
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # data prepared in a folder that is read-only now can still be opened
            temporary.write_text(json.dumps(remembered))
            temporary.replace(cache)
    return hashes


def _read_cache(cache: pathlib.Path) -> dict[str, Any]:
    try:
        remembered = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return remembered if isinstance(remembered, dict) else {}


def _kind(path: pathlib.Path) -> str | None:
    """Return "text" or "lines", with ".gz" appended for gzip, or None."""
    name = path.name.lower()
    suffix = ".gz" if name.endswith(".gz") else ""
    name = name.removesuffix(".gz")
    if name.endswith(_TEXT_SUFFIXES):
        return f"text{suffix}"
    return f"lines{suffix}" if name.endswith(_LINES_SUFFIXES) else None


def _documents(files: Sequence[tuple[pathlib.Path, Split | None]], rejects: Rejects) -> Iterator[Document]:
    start = 0
    for path, split in files:
        kind = _kind(path)
        assert kind is not None
        read = _read_text if kind.startswith("text") else _read_lines
        for text, consumed in read(path, rejects):
            yield Document(text, start + consumed, split)
        start += path.stat().st_size


def _read_text(path: pathlib.Path, rejects: Rejects) -> Iterator[tuple[str, int]]:
    with open_bytes(path) as (stream, raw):
        content = stream.read()
        try:
            yield content.removeprefix(BYTE_ORDER_MARK).decode(), raw.tell()
        except UnicodeDecodeError as error:
            rejects.add(f"{path}", not_utf8(error))


def _read_lines(path: pathlib.Path, rejects: Rejects) -> Iterator[tuple[str, int]]:
    with open_bytes(path) as (stream, raw):
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                text = _parse_line(line)
            except ValueError as error:
                rejects.add(f"{path}:{number}", str(error))
            else:
                yield text, raw.tell()


def _parse_line(line: bytes) -> str:
    """Return the field "text" of a JSON line; ValueError with the reason if there is none."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(f'not an object with a field "text" but {json_type(record)}')
    if "text" not in record:
        raise ValueError('no field "text"')
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f'field "text" is not a string but {json_type(text)}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'field "text" holds half a surrogate pair at character {error.start}') from error
    return text


def parse_json(line: bytes) -> Any:
    """Return the value of a JSON line; ValueError with the reason if there is none."""
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    if not decoded.strip():
        raise ValueError("empty line")
    try:
        return json.loads(decoded)
    except RecursionError as error:
        raise ValueError("not JSON (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error


def json_type(value: object) -> str:
    """Return in words what a value read from JSON is."""
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return in words what is wrong with bytes that are not text."""
    return f"not UTF-8 ({error.reason} at byte {error.start})"


@contextlib.contextmanager
def open_bytes(path: pathlib.Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, gzipped or not: the stream of its content, and the raw one that tells how far reading has come.

    Raises:
      DataError: it cannot be read, now or while the block lasts, or is a damaged gzip file.
    """
    try:
        with open(path, "rb") as raw:
            if path.name.lower().endswith(".gz"):
                if path.stat().st_size == 0:
                    raise EOFError("the file is empty")
                with gzip.open(raw) as stream:
                    yield stream, raw  # type: ignore[misc]
            else:
                yield raw, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: gzip file cut short or damaged ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
