"""What many processes print, passed on as whole lines, one at a time; the launcher itself never waits for that."""

import queue
import re
import sys
import threading
from collections.abc import Callable

from mecefo_jax.terminal import give_up_unwritable_output

OnLine = Callable[[int | None, str], None]
"""Takes a line and the number of the process that wrote it; None: the launcher itself."""

_MOST_WAITING = 10_000
"""Lines that wait for a slow reader of standard output before the processes that write them have to."""
_NOISE = re.compile(r"[IW]\d{4} |\[Gloo\] Rank ")
"""How lines begin that XLA and Gloo write while all is well; errors (E, F) begin otherwise."""


def print_line(process: int | None, line: str) -> None:
    """Prints a line with its writer's name before it; once standard output is closed, drops it."""
    names = {None: "launch", 0: "coordinator"}
    try:
        sys.stdout.write(f"[{names.get(process, f'process {process}')}] {line}\n")
        sys.stdout.flush()
    except OSError:  # as in "| head": the run goes on
        give_up_unwritable_output()


class Output:
    """Hands lines of many threads to ``on_line``, in one thread of its own."""

    def __init__(self, on_line: OnLine) -> None:
        """Starts the thread; ``close`` ends it."""
        self._on_line = on_line
        self._waiting: queue.Queue[tuple[int | None, str] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._thread.start()

    def pass_on(self, process: int, raw: bytes) -> None:
        """Passes on a line that a process wrote, unless it is noise; waits while too many do."""
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not _NOISE.match(line):
            self._waiting.put((process, line))

    def say(self, line: str) -> None:
        """Passes on a line of the launcher's own; never waits, so it is lost if too many lines do."""
        try:
            self._waiting.put_nowait((None, line))
        except queue.Full:
            pass

    def close(self, seconds: float) -> None:
        """Ends the thread once it has passed on what waits, or is taking longer than so many seconds."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _pass_on(self) -> None:
        try:
            while (waiting := self._waiting.get()) is not None:
                self._on_line(*waiting)
        except Exception:
            while self._waiting.get() is not None:  # nobody shall wait for ever because of it
                pass
            raise
