"""One process at a time: a lock beside a folder, freed by the operating system when its holder dies."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator

from mecefo_jax.errors import ConfigError


@contextlib.contextmanager
def locked(folder: pathlib.Path, on_wait: Callable[[], None] = lambda: None, *, setting: str = "") -> Iterator[None]:
    """Hold the lock of ``folder`` (the file ``FOLDER.lock``, which stays), waiting for it if need be.

    Args:
      folder: what the lock protects; its parent is made if it is missing.
      on_wait: called once if another process holds the lock.
      setting: the setting that chose the folder's parent, if the user did.

    Raises:
      ConfigError: there can be no lock in the folder that ``setting`` chose; without one, OSError.
    """
    lock = folder.with_name(folder.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if not setting:
            raise
        raise ConfigError(f"{setting} {lock.parent}: cannot be locked ({error.strerror}); set another one") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
