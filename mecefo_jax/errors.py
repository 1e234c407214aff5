"""Errors that end a run, each with the process exit code it stands for (table in docs/operations.md)."""


class RunError(Exception):
    """A run cannot go on. ``str(error)`` is the one line shown to the user."""

    exit_code = 1


class ConfigError(RunError, ValueError):
    """A setting is wrong: names the field, the value found and the value to set."""

    exit_code = 2


class DataError(RunError):
    """The data cannot be read or prepared, or there is too little of it."""

    exit_code = 3


class CheckpointError(RunError):
    """Checkpoints exist and none can be read, or the final save is not durable."""

    exit_code = 4


class TooFewLiveNodesError(RunError):
    """Fewer nodes live than the run may continue with; the state was saved first."""

    exit_code = 5


class NonFiniteError(RunError):
    """Too many updates in a row had a non-finite loss or gradient."""

    exit_code = 6


class InterruptedRunError(RunError):
    """The run was interrupted from the keyboard and has saved its state."""

    exit_code = 130


class PreemptedError(RunError):
    """The process was asked to stop (SIGTERM) and has saved its state."""

    exit_code = 75


class StalledError(RunError):
    """A process made no progress for too long; its stacks were dumped."""

    exit_code = 124


class RestartInPlaceError(RunError):
    """All processes of a cluster must start again and go on from the state in shared memory."""

    exit_code = 76


def raise_for_end(exit_code: int) -> None:
    """Raise how a run ended that others have ended, unless it was finished.

    Raises:
        RunError: with that exit code.
    """
    for kind in (TooFewLiveNodesError, NonFiniteError, InterruptedRunError, PreemptedError):
        if kind.exit_code == exit_code:
            raise kind("the run has ended")
