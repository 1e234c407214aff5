"""A process that is alive but gets nowhere turns itself into a dead one: others can go on without a dead one.

The watchdog is a thread. It ends its process, with the stacks of all threads dumped, when the main thread has not
reported progress for too long, and when the parent is gone. What it cannot see is a process that does not run (SIGSTOP)
or that holds the interpreter's lock for ever; there its beat, the time stamp of a file, grows old, and the supervisor
ends the process from outside.
"""

import contextlib
import ctypes
import faulthandler
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from mecefo_jax.errors import StalledError

_LOOK_SECONDS = 0.5
# A full pipe or a lost file server may hold up the report for ever; the end must not wait for it.
_REPORT_SECONDS = 2.0
_STDERR = 2


class Watchdog:
    """Ends this process (exit 124) when it makes no progress, (exit 1) when its parent is gone.

    Times are those of the monotonic clock. A process that was stopped or suspended as a whole is not stalled: a thread
    that finds that itself slept too long gives the main thread a fresh period.
    """

    def __init__(
        self,
        *,
        progress_seconds: float,
        stacks_to: pathlib.Path | None,
        beat_file: pathlib.Path | None = None,
        parent: int | None = None,
        name: str = "process",
    ) -> None:
        """Starts nothing yet.

        Args:
          progress_seconds: longest time between two calls of ``progress``, where ``allow`` does not give more.
          stacks_to: file that a stall appends the stacks of all threads to, beside stderr; None: stderr alone.
          beat_file: touched twice a second or more often while all is well.
          parent: process id of the parent, whose end is this process's; None: it may outlive it.
          name: what this process calls itself in its last line.
        """
        self._progress_seconds = progress_seconds
        self._stacks_to = stacks_to
        self._beat_file = beat_file
        self._parent = parent
        self._name = name
        self._allowed: list[tuple[float, str]] = []
        self._last_progress = time.monotonic()
        self._look_seconds = min(_LOOK_SECONDS, progress_seconds / 8)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch, with a full period ahead; once only."""
        self.progress()
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; the process may then take its time, which its supervisor knows from the beat being gone."""
        self._stopping.set()
        self._thread.join()
        if self._beat_file is not None:
            self._beat_file.unlink(missing_ok=True)

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def progress(self) -> None:
        """The caller got on; costs no more than reading the clock."""
        self._last_progress = time.monotonic()

    @contextlib.contextmanager
    def allow(self, seconds: float, what: str) -> Iterator[None]:
        """Lets the block take ``seconds`` without progress, if that is more than it had; its end is progress.

        Args:
          seconds: the longer limit. Where blocks nest, the longest counts.
          what: what takes so long, for the line of a stall: ``compiling the step``.
        """
        allowance = (seconds, what)
        self._allowed.append(allowance)
        try:
            yield
        finally:
            # In this order: the watchdog must never see the old progress under the shorter limit.
            self.progress()
            self._allowed.remove(allowance)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stopping.wait(self._look_seconds):
            now = time.monotonic()
            # Less than that may be a busy machine, and would not have cost the main thread much of its period.
            if now - looked > self._look_seconds + self._progress_seconds / 4:
                self.progress()
            looked = now
            self._check_parent()
            self._check_progress(now)
            self._beat()

    def _check_parent(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            line = f"{self._name}: parent process {self._parent} is gone, ending\n"
            _end(1, lambda: _print(line))

    def _check_progress(self, now: float) -> None:
        # The limit before the progress, for the same reason as in ``allow``.
        allowed = list(self._allowed)
        limit = max([self._progress_seconds, *(seconds for seconds, _ in allowed)])
        if now - self._last_progress <= limit:
            return
        what = f" while {allowed[-1][1]}" if allowed else ""
        line = f"{self._name}: stalled: no progress for {limit:g} s{what}\n"
        _end(StalledError.exit_code, lambda: _report_stall(line, self._stacks_to))

    def _beat(self) -> None:
        """Touches the beat file; if that fails, the process is killed for it later, and should have said why."""
        if self._beat_file is None:
            return
        try:
            self._beat_file.touch()
        except OSError as error:
            _print(f"{self._name}: cannot touch {self._beat_file} any more ({error.strerror})\n")
            self._beat_file = None


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if it is stopped by then; on Linux alone.

    To be called in the child, early: a parent that is gone by then is noticed by a ``Watchdog`` alone. To Linux the
    parent is the thread that started the process, so that must be one that lives as long as its process.

    Raises:
      OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")


def _report_stall(line: str, stacks_to: pathlib.Path | None) -> None:
    """Writes the line and all stacks to the file, then to stderr: the latter may be a pipe that nobody empties."""
    try:
        if stacks_to is not None:
            with stacks_to.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                faulthandler.dump_traceback(file)
    finally:
        _print(line)
        faulthandler.dump_traceback(_STDERR)


def _print(text: str) -> None:
    """Writes to stderr past Python's buffers, whose lock a stuck main thread may hold."""
    with contextlib.suppress(OSError):  # the reader was the parent: there is nobody left to tell
        os.write(_STDERR, text.encode())


def _end(code: int, report: Callable[[], None]) -> None:
    """Ends the process at once, after a report that may not take long."""
    reporter = threading.Thread(target=report, name="watchdog's report", daemon=True)
    reporter.start()
    reporter.join(_REPORT_SECONDS)
    os._exit(code)
