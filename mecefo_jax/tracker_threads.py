"""Trackers cannot stop or slow a run: each is called by a thread of its own, from a bounded queue.

A tracker that raises, or leaves its queue to fill up, gets no more calls. What it misses is in the run directory.
"""

import contextlib
import functools
import json
import pathlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mecefo_jax.config import Config
from mecefo_jax.config_file import replace_file, to_dict
from mecefo_jax.trackers import TRACKERS, Tracker, check_installed

_MOST_WAITING = 1000
_LONGEST_REASON = 300
FINISH_SECONDS = 15.0


class TrackerThread:
    """A tracker, and the thread that calls it.

    The run directory keeps the tracker's run id, and the last step that it was told: an attempt that resumes before
    that step continues the same run, and repeats none of it.

    Args:
      name: of the tracker.
      make: given the id of its run, makes it; called in the thread.
      workdir: the run directory.
      config: the resolved config, nested.
      project: where the run belongs there; in another one it is another run.
      most_waiting: calls that may wait before the tracker is given up.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[str], Tracker],
        workdir: pathlib.Path,
        config: Mapping[str, Any],
        *,
        project: str = "",
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self.name = name
        self._make, self._workdir, self._config, self._project = make, workdir, config, project
        self._kept = workdir / "tracking" / f"{name}.json"
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(most_waiting)
        self._reason: str | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *arguments: Any) -> None:
        """Have a method of the tracker called, soon."""
        if self._reason is None:
            try:
                self._calls.put_nowait((method, arguments))
            except queue.Full:
                self._give_up(f"it does not keep up: {self._calls.maxsize} calls are waiting")

    def wait(self, until: float) -> None:
        """Wait for the end of the thread, at most until a time of ``time.monotonic``."""
        if self._reason is None:
            self._thread.join(max(until - time.monotonic(), 0.0))
            if self._thread.is_alive():
                self._give_up("it did not end in time; what it has not sent is lost to it")

    def take_failure(self) -> str | None:
        """Why the tracker was given up, the first time that this is asked; else None."""
        if self._reason is None or self._told:
            return None
        self._told = True
        return self._reason

    def _give_up(self, reason: str) -> None:
        if self._reason is None:
            self._reason = " ".join(reason.split())[:_LONGEST_REASON]

    def _run(self) -> None:
        tracker: Tracker | None = None
        try:
            run_id, sent_step = self._read_kept()
            self._keep(run_id, sent_step)
            made = self._make(run_id)
            made.start(self._workdir, self._config)
            tracker = made
            method = ""
            while self._reason is None and method != "finish":
                method, arguments = self._calls.get()
                if method == "finish":
                    tracker = None
                elif method == "scalars":
                    step = arguments[0]
                    if step <= sent_step:
                        continue
                    self._keep(run_id, step)
                getattr(made, method)(*arguments)
        except BaseException as error:  # SystemExit too: nothing that a tracker does may reach the run
            self._give_up(f"{type(error).__name__}: {error}")
        if tracker is not None:  # given up before its end: it may still send what it holds, and free it
            with contextlib.suppress(BaseException):
                tracker.finish({})

    def _read_kept(self) -> tuple[str, int]:
        """The tracker's run id and the last step that it was told, by any attempt."""
        try:
            kept = json.loads(self._kept.read_bytes())
        except FileNotFoundError:
            return secrets.token_hex(8), -1
        if kept["project"] != self._project:
            return secrets.token_hex(8), -1
        return kept["run"], kept["step"]

    def _keep(self, run_id: str, step: int) -> None:
        """Before the tracker is told: a row that a crash keeps from it is missing there, and not doubled."""
        replace_file(self._kept, json.dumps({"project": self._project, "run": run_id, "step": step}).encode())


class Trackers:
    """All trackers that a run has been asked for."""

    def __init__(self, threads: Sequence[TrackerThread] = ()) -> None:
        """None, without threads."""
        self._threads = threads

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Report numbers."""
        for thread in self._threads:
            thread.put("scalars", step, values)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Report a change."""
        for thread in self._threads:
            thread.put("event", kind, step, fields)

    def finish(self, summary: Mapping[str, Any], seconds: float | None) -> None:
        """Let them end, and wait for that, at most so many seconds for all together; None: do not wait."""
        for thread in self._threads:
            thread.put("finish", summary)
        if seconds is None:
            return
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.wait(until)

    def take_failures(self) -> list[tuple[str, str]]:
        """Name and reason of each tracker that has been given up since this was asked before."""
        failures = [(thread.name, thread.take_failure()) for thread in self._threads]
        return [(name, reason) for name, reason in failures if reason is not None]


def open_trackers(config: Config, workdir: pathlib.Path) -> Trackers:
    """Start the trackers of a run.

    Args:
      config: of the run; section ``track`` says which.
      workdir: the run directory.

    Raises:
      ConfigError: the package of one is not installed.
    """
    check_installed(config.track)
    project = config.track.project or config.name
    settings = to_dict(config)
    threads = []
    for name in config.track.trackers:
        make = functools.partial(TRACKERS[name], project)
        threads.append(TrackerThread(name, make, workdir, settings, project=project))
    return Trackers(threads)
