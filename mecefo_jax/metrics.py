"""The record of a run: ``metrics.jsonl``, ``events.jsonl``, TensorBoard, console and ``summary.json``.

A row's ``step`` is the number of optimizer updates done when it was logged, the same number that names checkpoints:
a run resumed from checkpoint 100 has seen the row of step 100 and writes the next one for a later step. The files are
only ever appended to. Each start of a run in the same directory is an ``attempt``, and what an attempt logged beyond
the point where a later one resumed is left out by the readers.

JSON has no NaN or infinity: such a value is written as null, and named in ``nonfinite``, as in
``{"step": 7, "attempt": 1, "train/loss": null, "nonfinite": {"train/loss": "nan"}}``. The readers put it back.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console

from mecefo_jax.config_file import replace_file
from mecefo_jax.console import RunConsole
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.tracker_threads import FINISH_SECONDS, Trackers
from mecefo_jax.trackers import TensorBoard

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
_PLAN_EVENTS = ("failure", "recovery", "takeover")


class RunLog:
    """Writes everything that a run reports; a full disk or a closed terminal never stops training.

    Rows that cannot be written are kept and written with the next ones; a failing TensorBoard file is given up. Both
    are said once on the console.

    Args:
      workdir: the run directory, made if it does not exist.
      total_steps: steps of the whole run, for progress and remaining time.
      attempt: number of this start of the run; None: one more than the last in the files.
      console: whether to print, or the rich console to print on.
      tensorboard: whether to write ``tensorboard/``.
      num_nodes: nodes of the run, to show ``7/8`` for live nodes; None: the count alone.
      trackers: what else gets the metrics, started for this log alone; one that fails is told of once, as the event
        ``tracker_failed``.

    Raises:
      ConfigError: the run directory cannot be written.
      DataError: an existing file there is not one of these.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int,
        attempt: int | None = None,
        console: bool | Console = True,
        tensorboard: bool = True,
        num_nodes: int | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self._workdir = pathlib.Path(workdir)
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            self._metrics = _JsonLines(self._workdir / METRICS_FILE)
            self._events = _JsonLines(self._workdir / EVENTS_FILE)
        except OSError as error:
            raise ConfigError(
                f"run directory {self._workdir}: cannot be written ({error.strerror}); set --workdir"
            ) from error
        self.attempt = _next_attempt(self._workdir) if attempt is None else attempt
        self._console = RunConsole(console, total_steps=total_steps, num_nodes=num_nodes)
        self._trackers = Trackers() if trackers is None else trackers
        self._summary: dict[str, Any] = {}
        self._last_step = 0
        self._tensorboard = TensorBoard(self.attempt) if tensorboard else None
        if self._tensorboard is not None:
            self._tensorboard.start(self._workdir, {})

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs one row of metrics.

        Args:
          step: updates done.
          values: metric names (docs/operations.md) to numbers; 0-d arrays are fetched.
        """
        assert not {"step", "attempt", "nonfinite"} & values.keys()
        plain = {name: _plain(value) for name, value in values.items()}
        self._last_step = int(step)
        self._append(self._metrics, {"step": int(step), "attempt": self.attempt, **plain})
        numbers = {name: value for name, value in plain.items() if isinstance(value, int | float)}
        self._write_tensorboard(int(step), numbers)
        self._trackers.scalars(int(step), {**numbers, "attempt": self.attempt})
        self._console.row(int(step), plain)
        self._tell_failed_trackers(int(step))

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Logs one change: to ``events.jsonl`` with the time, and as a short line on the console.

        ``started`` (at step 0) and ``resumed`` are special: they say from which step this attempt goes on, so that what
        earlier ones logged beyond it no longer counts. ``console.py`` lists the kinds that have a line of their own.
        """
        plain = {name: _plain(value) for name, value in fields.items()}
        row = {"step": int(step), "attempt": self.attempt, "kind": kind, "time": round(time.time(), 3), **plain}
        self._append(self._events, row)
        if self._tensorboard is not None:
            self._tensorboard.event(kind, int(step), plain)
        self._trackers.event(kind, int(step), plain)
        self._console.event(kind, int(step), plain)

    def progress(self, step: int) -> None:
        """Moves the progress bar, without logging anything; cheap enough for every step."""
        self._console.progress(int(step))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Writes ``summary.json`` in one piece and prints its main numbers.

        Raises:
          ConfigError: it cannot be written.
        """
        plain = {name: _plain(value) for name, value in values.items()}
        self._summary = plain
        replace_file(self._workdir / "summary.json", (json.dumps(_finite(plain), indent=2) + "\n").encode())
        self._console.summary(plain, self._workdir)

    def close(self, *, wait_for_trackers: bool = True) -> None:
        """Writes what is still unwritten, and closes the files and the progress bar.

        Args:
          wait_for_trackers: whether to give them some seconds to send what is unsent, as this process is about to end.
        """
        self._trackers.finish(self._summary, FINISH_SECONDS if wait_for_trackers else None)
        self._tell_failed_trackers(self._last_step)
        lost = self._metrics.close() + self._events.close()
        if lost:
            self._console.warning(f"{lost} rows could not be written to {self._workdir}")
        if self._tensorboard is not None:
            self._tensorboard.finish(self._summary)
        self._console.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, file: "_JsonLines", row: dict[str, Any]) -> None:
        problem = file.append(json.dumps(_finite(row)))
        if problem is not None and not file.problem_said:
            self._console.warning(f"{file.path} cannot be written ({problem}); its rows are kept in memory")
        file.problem_said = problem is not None

    def _write_tensorboard(self, step: int, values: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            try:
                self._tensorboard.scalars(step, values)
            except OSError as error:
                self._tensorboard = None
                self._console.warning(f"TensorBoard gets no more data: {error}")

    def _tell_failed_trackers(self, step: int) -> None:
        for tracker, reason in self._trackers.take_failures():
            self.event("tracker_failed", step, tracker=tracker, reason=reason)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl`` as the curve that it stands for: ascending steps, one row each.

    Rows of an attempt beyond the step from which a later one resumed are left out (the ``resumed`` event in the
    ``events.jsonl`` beside it, or else the later attempt's first row); rows of the same step are merged, the later
    values winning. A last line that a crash cut short is ignored.

    Raises:
      DataError: the file cannot be read, or a line other than the last is not a row.
    """
    merged: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for row in _surviving(pathlib.Path(path)):
        merged[row["step"]].update(row)
    return [merged[step] for step in sorted(merged)]


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads ``events.jsonl`` in the order of writing, without what was undone by resuming from an earlier step.

    Raises:
      DataError: the file cannot be read, or a line other than the last is not an event.
    """
    return _surviving(pathlib.Path(path))


class _JsonLines:
    """An append-only file of JSON lines, whose lines are whole or absent."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.problem_said = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._unwritten = b""
        self._drop_cut_line()

    def append(self, line: str) -> str | None:
        """Writes a line and those that could not be written before it; returns the reason if it cannot be."""
        self._unwritten += line.encode() + b"\n"
        return self._flush()

    def close(self) -> int:
        """Returns how many lines were lost."""
        self._flush()
        os.close(self._descriptor)
        return self._unwritten.count(b"\n")

    def _flush(self) -> str | None:
        try:
            while self._unwritten:
                # A write that ends within a line is continued by the next one, so that the file stays in order.
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except OSError as error:
            return error.strerror
        return None

    def _drop_cut_line(self) -> None:
        """Removes the rest of a line that a crash cut short, so that the next one starts a line of its own."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end == len(content):
            return
        try:
            _parse(content[end:])
        except ValueError:
            os.ftruncate(self._descriptor, end)
        else:
            self._unwritten = b"\n"


def _surviving(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file that no later attempt undid."""
    rows = _read_lines(path)
    starts: dict[int, int] = {}
    for event in _read_lines(path.with_name(EVENTS_FILE)) if path.with_name(EVENTS_FILE).exists() else []:
        if event.get("kind") in ("started", "resumed"):
            starts[event["attempt"]] = event["step"] + 1
    for row in rows:
        if row["attempt"] not in starts:
            starts[row["attempt"]] = row["step"]
    return [row for row in rows if all(_update_of(row) < start for a, start in starts.items() if a > row["attempt"])]


def _update_of(row: Mapping[str, Any]) -> int:
    """The update that a row belongs to: for an event of the plan of step s that is update ``s + 1``."""
    return row["step"] + (row.get("kind") in _PLAN_EVENTS)


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parse(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not a row of this file ({error}); move the file away") from error
    with contextlib.suppress(ValueError):  # not ended by a newline: cut short, or only its newline is missing
        rows.append(_parse(last))
    return rows


def _parse(line: bytes) -> dict[str, Any]:
    """A row, with its non-finite values put back; ValueError if it is none."""
    row = json.loads(line)
    if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("attempt"), int)):
        raise ValueError("no step and attempt")
    row.update({name: float(value) for name, value in row.pop("nonfinite", {}).items()})
    return row


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as JSON can hold it: non-finite values as null, named in ``nonfinite``."""
    bad = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**row, **dict.fromkeys(bad), "nonfinite": bad} if bad else dict(row)


def _plain(value: Any) -> Any:
    """Arrays as the numbers they hold; containers likewise, their own non-finite numbers as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _nested(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_nested(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _nested(value: Any) -> Any:
    plain = _plain(value)
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain


def _next_attempt(workdir: pathlib.Path) -> int:
    rows = itertools.chain(_read_lines(workdir / METRICS_FILE), _read_lines(workdir / EVENTS_FILE))
    return 1 + max((row["attempt"] for row in rows), default=0)
