"""Locks: one holder at a time; a folder that cannot be locked is named with its setting."""

import re

import pytest

from mecefo_jax.errors import ConfigError
from mecefo_jax.locking import locked


class _WaitedError(Exception):
    pass


def _give_up():
    raise _WaitedError


def test_second_holder_waits_and_the_lock_is_free_afterwards(tmp_path):
    with locked(tmp_path / "new" / "run"), pytest.raises(_WaitedError), locked(tmp_path / "new" / "run", _give_up):
        pass
    with locked(tmp_path / "new" / "run", _give_up):
        assert (tmp_path / "new" / "run.lock").is_file()


@pytest.mark.parametrize("parent", ["x" * 300, "file", "folder"])
def test_folder_that_cannot_be_locked_is_named_with_its_setting(parent, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "run.lock").mkdir(parents=True)
    folder = tmp_path / parent / "run"
    with (
        pytest.raises(ConfigError, match=rf"^--workdir {re.escape(str(folder.parent))}: cannot be locked \(.*set"),
        locked(folder, setting="--workdir"),
    ):
        pass
    with pytest.raises(OSError), locked(folder):
        pass
