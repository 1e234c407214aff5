"""The processes of a cluster by their numbers: starting them, sending them signals, hearing of their ends.

Process 0 is the coordinator, which is told of each death at once; all others are nodes or spares.
"""

import dataclasses
import os
import pathlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence

from mecefo_jax.processes.beat import Beat
from mecefo_jax.processes.child import Child
from mecefo_jax.processes.output import Output
from mecefo_jax.processes.patience import Limits, Patience


@dataclasses.dataclass
class Place:
    """What is known of the process of a number, through all its restarts."""

    process: int
    beat: Beat
    patience: Patience
    command: Sequence[str] = ()
    child: Child | None = None
    last_child: Child | None = None
    """The one before, whose last lines may still be on their way."""
    restart_at: float | None = None
    exit_code: int | None = None
    """How its last one ended; None: it runs, or did not when the run was asked to stop."""


class Roster:
    """The places of all processes; one thread, which outlives them, starts them and takes them off."""

    def __init__(
        self,
        limits: Limits,
        output: Output,
        *,
        is_death: Callable[[int], bool],
        on_end: Callable[[Child], None],
    ) -> None:
        """Starts nothing yet.

        Args:
          limits: how long ``close`` waits.
          output: takes the lines of all processes.
          is_death: tells by its exit code whether the coordinator must hear of a node's end.
          on_end: called after that, in a thread of its own.
        """
        self.places: list[Place] = []
        self._limits, self._output = limits, output
        self._is_death, self._on_end = is_death, on_end
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="mecefo_beats_"))

    @property
    def nodes(self) -> list[Place]:
        """All places but the coordinator's."""
        return self.places[1:]

    @property
    def pids(self) -> dict[int, int]:
        """The living processes: their process ids, by number."""
        children = [place.child for place in self.places]
        return {child.process: child.pid for child in children if child is not None and child.exit_code is None}

    @property
    def any_node_goes_on(self) -> bool:
        """Whether a node runs or will be started again."""
        return any(place.child is not None or place.restart_at is not None for place in self.nodes)

    def assign(self, commands: Sequence[Sequence[str]]) -> None:
        """Gives each process its command, the coordinator first, and new patience."""
        if not self.places:
            self.places = [
                Place(process, Beat(self._folder / f"beat_{process}"), Patience(self._limits))
                for process in range(len(commands))
            ]
        for place, command in zip(self.places, commands, strict=True):
            place.command, place.patience = command, Patience(self._limits)

    def start(self, place: Place) -> None:
        """Starts a process.

        Raises:
          OSError: it cannot be started.
        """
        place.restart_at = place.exit_code = None
        place.beat.reset()
        environment = {
            "MECEFO_BEAT_FILE": str(place.beat.path),
            "MECEFO_PARENT": str(os.getpid()),
            "MECEFO_STARTED": repr(time.time()),
            "PYTHONUNBUFFERED": "1",
        }
        place.child = Child(
            place.process,
            place.command,
            environment=environment,
            is_told=place.process == 0,
            on_line=self._output.pass_on,
            on_end=self._hear_of_end,
        )

    def take_off(self, child: Child) -> Place:
        """Takes a process that has ended from its place, which is returned."""
        place = self.places[child.process]
        assert place.child is child
        place.child, place.last_child = None, child
        return place

    def send(self, signum: int, places: Sequence[Place]) -> None:
        """Sends a signal to those that run."""
        for place in places:
            if place.child is not None:
                place.child.send(signum)

    def look_at_beats(self, now: float, starved: bool) -> tuple[list[tuple[Place, float]], list[int]]:
        """Who has stopped beating, and who has not begun to.

        Args:
          now: monotonic seconds.
          starved: whether this process has missed beats: then all count from now.

        Returns:
          Places with their seconds of silence, told once; and numbers of nodes that are slow to come up.
        """
        stalled, missing = [], []
        for place in self.places:
            if place.child is None:
                continue
            beat = place.beat
            beat.look(now)
            if not beat.has_begun:
                if place.process != 0 and now - place.child.started >= self._limits.report_seconds:
                    missing.append(place.process)
            elif beat.seen is not None:
                silent_seconds = 0.0 if starved else now - beat.seen
                if silent_seconds > self._limits.stall_seconds:
                    stalled.append((place, silent_seconds))
                if starved or silent_seconds > self._limits.stall_seconds:
                    beat.seen = now
        return stalled, missing

    def restart_nobody(self) -> None:
        """Forgets whom to start again."""
        for place in self.places:
            place.restart_at = None

    def close(self) -> None:
        """Ends what still runs, the coordinator by the end of its input, and waits until its last line is passed on."""
        seconds = self._limits.coordinator_seconds
        self.send(signal.SIGKILL, self.nodes)
        for place in self.places:
            for child in (place.child, place.last_child):
                if child is None:
                    continue
                child.close_input()
                if not child.join(seconds):
                    child.send(signal.SIGKILL)
                    child.join(seconds)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear_of_end(self, child: Child) -> None:
        """In the thread that found the end: the coordinator hears of a death before anything else is done."""
        assert child.exit_code is not None
        coordinator = self.places[0].child
        if child.process != 0 and coordinator is not None and self._is_death(child.exit_code):
            coordinator.tell(f"dead {child.process}\n")
        self._on_end(child)
