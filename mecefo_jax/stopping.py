"""How a run is asked to stop: SIGTERM of a scheduler, Ctrl-C of a person."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator

from mecefo_jax.errors import InterruptedRunError, PreemptedError, RunError


@dataclasses.dataclass
class StopRequest:
    """A signal that asked the run to stop, if one came; a step under way is not torn."""

    received: signal.Signals | None = None

    def error(self, step: int | None) -> RunError:
        """How the run ends, or this process's part in it, after ``step``; None: it had none yet."""
        name = "request" if self.received is None else self.received.name
        kind = InterruptedRunError if self.received == signal.SIGINT else PreemptedError
        after = "" if step is None else f" after step {step}"
        return kind(f"stopped by {name}{after}; the same command resumes there")


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes SIGTERM and the first Ctrl-C; a second Ctrl-C interrupts at once."""
    request = StopRequest()

    def note(signum: int, frame: object) -> None:
        if signum == signal.SIGINT and request.received is not None:
            raise KeyboardInterrupt
        request.received = signal.Signals(signum)

    previous = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
