"""A child process: its lines passed on, its end noticed at once, and signals that reach nobody else.

It leads a session of its own, so a terminal's Ctrl-C does not reach it; what it has started itself ends with it.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO


class Child:
    """A started process, watched by threads that end with it."""

    def __init__(
        self,
        process: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        is_told: bool,
        on_line: Callable[[int, bytes], None],
        on_end: Callable[["Child"], None],
    ) -> None:
        """Starts the process.

        The kernel may end it together with the thread that calls this (Linux, PR_SET_PDEATHSIG): one that lives as
        long as the process should.

        Args:
          process: its number, for ``on_line`` and ``on_end``.
          command: program and arguments.
          environment: variables to set beside those of this process.
          is_told: whether its standard input is a pipe for ``tell``; else it is empty.
          on_line: takes each line of standard output and error, in threads of their own.
          on_end: called at once when it has ended, in a thread of its own.

        Raises:
          OSError: it cannot be started.
        """
        self.process = process
        self.exit_code: int | None = None
        """Negative: the signal that ended it; None: it runs."""
        self.started = time.monotonic()
        self._on_line, self._on_end = on_line, on_end
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE if is_told else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        if self._popen.stdin is not None:
            os.set_blocking(self._popen.stdin.fileno(), False)
        # Two pipes: in a shared one, a line of native code would land amidst one of Python's.
        self._threads = [
            threading.Thread(target=target, args=arguments, name=f"{target.__name__} {process}", daemon=True)
            for target, arguments in (
                (self._await_end, ()),
                (self._read, (self._popen.stdout,)),
                (self._read, (self._popen.stderr,)),
            )
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # no more threads: nobody would watch it
            self._popen.kill()
            raise

    def send(self, signum: int) -> bool:
        """Sends a signal and returns whether the process was running."""
        with self._lock:
            if self._popen.returncode is not None:  # reaped: its number may be another process's by now
                return False
            os.kill(self.pid, signum)
            return self.exit_code is None

    def tell(self, line: str) -> None:
        """Writes a line to its standard input, without ever waiting."""
        with self._lock:
            # One that has died, or has not read for thousands of lines, is found by its end or its silence.
            if self._popen.stdin is not None and not self._popen.stdin.closed:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    os.write(self._popen.stdin.fileno(), line.encode())

    def close_input(self) -> None:
        """Lets it read the end of its standard input."""
        with self._lock:
            if self._popen.stdin is not None:
                self._popen.stdin.close()

    def join(self, seconds: float) -> bool:
        """Waits until it has ended and its last line is passed on; returns whether it has ended by then."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self._threads[0].is_alive()

    def _await_end(self) -> None:
        # It is not reaped yet, so that its number stays its own until nobody sends signals any more.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self.exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._on_end(self)
        self.close_input()
        with self._lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of its session
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                self._on_line(self.process, raw)
