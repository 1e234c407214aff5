"""What it means that a process has ended: of its own accord, or dead."""

import signal

from mecefo_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InterruptedRunError,
    NonFiniteError,
    PreemptedError,
    RestartInPlaceError,
    TooFewLiveNodesError,
)

FINISHED = 0
STOPPED = (PreemptedError.exit_code, InterruptedRunError.exit_code)
RESTART_ALL = RestartInPlaceError.exit_code
CANNOT_GO_ON = tuple(
    error.exit_code for error in (ConfigError, DataError, CheckpointError, TooFewLiveNodesError, NonFiniteError)
)
CHOSEN = (FINISHED, *STOPPED, RESTART_ALL, *CANNOT_GO_ON)
"""Exit codes by which a node leaves on its own accord; any other end is a death."""
NOT_STARTED = 127
"""Exit code of a process that could not even be started, as in shells."""


def describe(exit_code: int) -> str:
    """How a process ended, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"
