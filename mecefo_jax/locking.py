"""One process at a time: a lock beside a folder, freed by the operating system when its holder dies."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def locked(folder: pathlib.Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of ``folder`` (the file ``FOLDER.lock``, which stays), waiting for it if need be.

    Args:
      folder: what the lock protects; its parent is made if it is missing.
      on_wait: called once if another process holds the lock.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
