"""What makes a saved directory trustworthy: a manifest of its files, and a rename that commits it.

``manifest.json`` is written last. It holds the caller's facts and the size and CRC-32 of every other file, and
carries its own CRC-32, so that a directory that is incomplete, cut short or altered is told from an intact one.
"""

import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Mapping
from typing import Any

_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20


class UnreadableError(Exception):
    """A saved directory is torn, incomplete or corrupt; the message is the reason."""


def write_manifest(directory: pathlib.Path, contents: Mapping[str, Any]) -> int:
    """Forces every file of ``directory`` to the disk and seals them with a manifest.

    Args:
      directory: a directory to which nothing more is written.
      contents: JSON-able facts to keep beside the files.

    Returns:
      The size of the files in bytes.
    """
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / _MANIFEST]
    files = {path.relative_to(directory).as_posix(): _checksum(path, sync=True) for path in paths}
    body = json.dumps({**contents, "files": files})
    with (directory / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"contents": body, "crc32": zlib.crc32(body.encode())}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(directory)
    return sum(size for size, _ in files.values())


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of the manifest, with the sizes and checksums under ``files``.

    Raises:
      UnreadableError: there is none, or it is not what was written.
    """
    try:
        envelope = json.loads((directory / _MANIFEST).read_bytes())
        body = envelope["contents"]
        intact = zlib.crc32(body.encode()) == envelope["crc32"]
    except OSError as error:
        raise UnreadableError(f"{_MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{_MANIFEST} is not what was written") from error
    if not intact:
        raise UnreadableError(f"{_MANIFEST} does not have the checksum it was saved with")
    return json.loads(body)


def verify_files(directory: pathlib.Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Compares every file with its size and checksum in the manifest.

    Raises:
      UnreadableError: names the first file that is missing, cut short or altered.
    """
    for name, (size, checksum) in files.items():
        try:
            found_size, found_checksum = _checksum(directory / name)
        except OSError as error:
            raise UnreadableError(f"{name}: {error.strerror}") from error
        if found_size != size:
            raise UnreadableError(f"{name} has {found_size} bytes instead of {size}")
        if found_checksum != checksum:
            raise UnreadableError(f"{name} does not have the checksum it was saved with")


def promote(sealed: pathlib.Path, final: pathlib.Path) -> None:
    """Gives a sealed directory its final name, in place of an older one; repeatable after a kill at any point."""
    if final.exists():
        shutil.rmtree(final)
    sealed.rename(final)
    _sync_directory(final.parent)


def _checksum(path: pathlib.Path, *, sync: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file, which is forced to the disk if ``sync``."""
    size, checksum = 0, 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(file.fileno())
    return size, checksum


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
