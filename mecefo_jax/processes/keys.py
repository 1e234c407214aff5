"""What names a run to its processes."""

import pathlib
import secrets

from mecefo_jax.config_file import replace_file


def run_key(workdir: pathlib.Path) -> str:
    """What names a run's states in shared memory: not its directory, which may be deleted and made again."""
    path = workdir / "processes" / "run-id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, secrets.token_hex(16).encode())
        return path.read_text().strip()
