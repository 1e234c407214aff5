"""A run's checkpoints: what identifies it, what is saved beside the state, and whether a run may be continued."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree

from mecefo_jax.checkpoint import Checkpointer
from mecefo_jax.config import Config
from mecefo_jax.config_file import from_dict, to_dict
from mecefo_jax.data import PreparedData
from mecefo_jax.identity import check_identity
from mecefo_jax.journal import Log
from mecefo_jax.optimizer import learning_rate_schedule
from mecefo_jax.progress import Progress
from mecefo_jax.state import TrainState


def run_identity(config: Config, vocab_size: int, prepared: PreparedData) -> dict[str, Any]:
    """The config and what the data added to it, as checkpoints hold them."""
    identity = to_dict(config)
    identity["model"] |= {"vocab_size": vocab_size}
    identity["data"] |= {"fingerprint": prepared.fingerprint}
    return identity


class Snapshots:
    """Saves and restores the state and the progress of one run."""

    def __init__(self, config: Config, identity: Mapping[str, Any], workdir: pathlib.Path, log: Log) -> None:
        """For the run directory ``workdir``."""
        self._config, self._identity, self._log = config, identity, log
        self._saved_step: int | None = None
        self._checkpoints = Checkpointer(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            on_event=lambda kind, fields: self._log.event(kind, fields.pop("step"), **fields),
        )

    def restore(self, abstract: PyTree) -> tuple[TrainState, Progress] | None:
        """The newest checkpoint that can be read; None if there is none. Logs ``resumed`` or ``started``.

        Args:
            abstract: shapes, dtypes and shardings of the state.

        Raises:
            ConfigError: the checkpoint is of another run.
            CheckpointError: there are checkpoints, and none can be read.
        """
        changes: list[str] = []

        def validate(metadata: dict[str, Any]) -> None:
            changes.extend(self.check(metadata["config"], metadata["step"]))

        restored = self._checkpoints.restore(abstract, validate=validate)
        if restored is None:
            self._log.event("started", 0)
            return None
        step, state, metadata = restored
        self._log.event("resumed", step)
        for change in changes:
            self._log.event("config_changed", step, change=change)
        return state, Progress(**metadata["progress"])

    def check(self, saved: Mapping[str, Any], step: int) -> list[str]:
        """What has changed since a state was saved; refuses what may not change (``check_identity``)."""
        rate = lambda identity: float(learning_rate_schedule(_run_config(identity))(jnp.float32(step)))  # noqa: E731
        return check_identity(saved, self._identity, learning_rate=rate)

    def save(self, step: int, state: TrainState, progress: Progress) -> None:
        """Start to save; once for a step. The state may be donated once this returns."""
        if self._saved_step == step:
            return
        metadata = {"step": step, "config": self._identity, "progress": dataclasses.asdict(progress)}
        self._checkpoints.save(step, state, metadata)
        self._saved_step = step
        if self._config.checkpoint.required:
            self._checkpoints.wait()

    def save_and_wait(self, step: int, state: TrainState, progress: Progress) -> None:
        """Save, and return once it is durable.

        Raises:
            CheckpointError: it is not.
        """
        self.save(step, state, progress)
        self._checkpoints.wait()

    def newest_step(self) -> int:
        """Step of the newest checkpoint, intact or not; -1 if there is none."""
        return max(self._checkpoints.steps(), default=-1)

    def poll(self) -> None:
        """Report the save under way if it has ended."""
        self._checkpoints.poll()

    def close(self) -> None:
        """Wait for the save under way."""
        self._checkpoints.close()


def _run_config(identity: Mapping[str, Any]) -> Config:
    """The config in a checkpoint's identity, without what the run added to it."""
    data = {name: value for name, value in identity["data"].items() if name != "fingerprint"}
    return from_dict({**identity, "data": data})
