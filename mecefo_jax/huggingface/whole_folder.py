"""A folder that appears complete or not at all."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import safetensors

from mecefo_jax.errors import CheckpointError, ConfigError


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a hidden folder beside ``folder`` to write into, which takes its name once the body has ended well.

    Args:
        folder: where the result belongs; it may exist if it is empty.

    Raises:
        ConfigError: there is something in ``folder`` already, or no folder can be made there.
        CheckpointError: the body could not write a file.
    """
    folder = folder.absolute()
    torn = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder}: exists already, and nothing is overwritten; name a new folder or an empty one"
            )
        torn.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}); name another folder") from error
    try:
        yield torn
        torn.rename(folder)  # fails if somebody has put something there meanwhile
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); make room, or name another folder") from error
    finally:
        shutil.rmtree(torn, ignore_errors=True)  # nothing is left where it has become the result
