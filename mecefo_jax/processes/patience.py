"""How often a supervisor tries again, and how long it waits for what."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How often a supervisor tries again, and how long it waits."""

    max_restarts: int = 10
    """Restarts in a row of a process that never lives for quick_seconds; then it is given up."""
    stall_seconds: float = 5.0
    """Age of a beat at which a process is killed; processes that beat do so each half second."""
    quick_seconds: float = 30.0
    """A process that lives shorter died quickly: it is started again after a while, except for the first time."""
    first_wait_seconds: float = 1.0
    """That while after a second quick death in a row; it doubles from then on."""
    longest_wait_seconds: float = 30.0
    """The longest it becomes."""
    finish_seconds: float = 60.0
    """Time for all to end after the first one has finished or stopped."""
    grace_seconds: float = 10.0
    """Time between SIGTERM and SIGKILL."""
    coordinator_seconds: float = 5.0
    """Time for the coordinator to end after all nodes."""
    report_seconds: float = 10.0
    """Time between lines that name the processes that have not come up."""


DEFAULTS = Limits()


@dataclasses.dataclass
class Patience:
    """How often something has gone wrong quickly, and for how long it is left alone."""

    limits: Limits
    in_a_row: int = 0

    def wait_seconds(self, lived_seconds: float) -> float | None:
        """Time until the next try, after one that has lived so long; None: no more tries."""
        self.in_a_row = self.in_a_row + 1 if lived_seconds < self.limits.quick_seconds else 1
        if self.in_a_row > self.limits.max_restarts:
            return None
        if self.in_a_row == 1:
            return 0.0
        doublings = min(self.in_a_row - 2, 30)
        return min(self.limits.first_wait_seconds * 2**doublings, self.limits.longest_wait_seconds)
