"""Experiment trackers: where a run's numbers go besides its own files.

Three of them are here: TensorBoard's files, always written; Weights & Biases and trackio, for those who ask for them
(``track.trackers``). ``tracker_threads.py`` keeps the latter two from ever stopping a run.
"""

import collections
import contextlib
import importlib.util
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tensorboardX import summary as tensorboard_summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from mecefo_jax.config import TrackConfig
from mecefo_jax.errors import ConfigError

_FOLDER = "tracking"


class Tracker(Protocol):
    """One attempt's reports to a tracker; it may raise anything, and take its time."""

    def start(self, workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
        """Begin, or go on with what earlier attempts reported; called once, before all others.

        Args:
          workdir: the run directory.
          config: the resolved config, nested.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Report numbers of the state after ``step`` updates; steps never descend."""

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Report a change (docs/operations.md lists them); its step may lie beside that of the last row."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send what is unsent, and end; the summary is empty where the run has not reached its end."""


class TensorBoard:
    """One event file an attempt, written at once; the queue of tensorboardX's own writer blocks once a write failed."""

    def __init__(self, attempt: int) -> None:
        """For the attempt of that number."""
        self._attempt = attempt
        self._writer: EventsWriter | None = None
        self._purge_step: int | None = None

    def start(self, workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
        """Nothing is opened before the first row: until then it is not known from where the attempt goes on."""
        del config
        self._folder = workdir / "tensorboard"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers; the first ones tell TensorBoard to forget what earlier attempts wrote from there on."""
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"), f".{self._attempt}")
            if self._attempt > 1:
                start = SessionLog(status=SessionLog.START)
                self._write(step if self._purge_step is None else self._purge_step, session_log=start)
        for name, value in values.items():
            self._write(step, summary=tensorboard_summary.scalar(name, value))
        self._writer.flush()

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Take note of where the attempt goes on; other changes are not shown."""
        del fields
        if kind in ("started", "resumed"):
            self._purge_step = step + 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        del summary
        if self._writer is not None:
            with contextlib.suppress(OSError):  # every row has been flushed before, or its failure told
                self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        assert self._writer is not None
        self._writer.write_event(Event(step=step, wall_time=time.time(), **content))


class _Counts:
    """How often each kind of event came since the last row: trackers of curves want numbers, at ascending steps."""

    def __init__(self) -> None:
        self._of: collections.Counter[str] = collections.Counter()

    def add(self, kind: str) -> None:
        self._of[f"events/{kind}"] += 1

    def take(self) -> dict[str, int]:
        taken, self._of = dict(self._of), collections.Counter()
        return taken


class WandB:
    """Weights & Biases. ``WANDB_MODE=offline`` keeps all in the run directory, for ``wandb sync``."""

    def __init__(self, project: str, run_id: str) -> None:
        """For a run that may exist already."""
        self._project, self._run_id, self._counts = project, run_id, _Counts()

    def start(self, workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
        """Begin or continue the run; its files go to ``tracking/wandb``."""
        import wandb

        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False):
            raise PermissionError("not logged in; set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline")
        (workdir / _FOLDER).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            id=self._run_id,
            name=workdir.resolve().name,
            config=dict(config),
            dir=workdir / _FOLDER,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send a row, with the number of events since the last one."""
        self._run.log({**values, **self._counts.take()}, step=step)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Count it."""
        del step, fields
        self._counts.add(kind)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary under names of its own, beside the last values of the metrics, and end."""
        self._run.summary.update({f"final/{name}": value for name, value in summary.items()})
        self._run.finish()


class Trackio:
    """trackio, kept on this machine unless ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` say otherwise."""

    def __init__(self, project: str, run_id: str) -> None:
        """For a run that may exist already."""
        self._project, self._run_id, self._counts = project, run_id, _Counts()
        self._step = 0

    def start(self, workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
        """Begin or continue the run, which trackio knows by its name."""
        import trackio

        self._run = trackio.init(
            project=self._project,
            name=f"{workdir.resolve().name}-{self._run_id}",
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send a row, with the number of events since the last one."""
        self._step = step
        self._run.log({**values, **self._counts.take()}, step=step)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Count it."""
        del step, fields
        self._counts.add(kind)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary's numbers as one more row of the last step, and end."""
        numbers = {f"final/{name}": value for name, value in summary.items() if isinstance(value, int | float)}
        if numbers:
            self._run.log(numbers, step=self._step)
        self._run.finish()


TRACKERS: dict[str, Callable[[str, str], Tracker]] = {"wandb": WandB, "trackio": Trackio}
"""What makes each tracker of ``track.trackers``, given the project and the id of its run."""


def check_installed(track: TrackConfig) -> None:
    """Refuse trackers whose package is missing, before anything is prepared.

    Raises:
      ConfigError: names the extra to install.
    """
    for name in track.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"track.trackers: got {name}, which is not installed; pip install '.[{name}]', or leave it out"
            )
