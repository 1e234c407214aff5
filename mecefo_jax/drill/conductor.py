"""Runs a cluster to its end, strikes its processes as planned, and notes what appears in the run's files when.

Rows of ``metrics.jsonl`` carry no time: theirs is when they were seen, by looking each ``POLL_SECONDS``.
"""

import dataclasses
import json
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mecefo_jax.drill.schedule import COORDINATOR, Strike
from mecefo_jax.metrics import EVENTS_FILE, METRICS_FILE
from mecefo_jax.processes.patience import Limits
from mecefo_jax.processes.supervisor import Supervisor

POLL_SECONDS = 0.01
"""Time between two looks, and so the resolution of times of rows."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Struck:
    """A strike that was carried out, or passed over."""

    strike: Strike
    at: float
    """Unix time at which the signal was sent."""
    step: int
    """Steps whose rows had been seen by then."""
    attempt: int
    """Attempt that wrote the last of them."""
    was_running: bool
    was_member: bool
    """Whether it was the coordinator, or took part in training, as far as the run's events tell."""
    passed_over: bool = False
    """Whether it was left alone, as the last one living."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What became of a run."""

    began: float
    """Unix time."""
    ended: float = 0.0
    exit_code: int | None = None
    timed_out: bool = False
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Rows of committed steps as written, those repeated as well, with ``seen``: the unix time."""
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """All events of the run, in the order of writing."""
    launcher_events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """``Supervisor.events``."""
    struck: list[Struck] = dataclasses.field(default_factory=list)


# Processes die early because they are killed, which says nothing against them.
_LIMITS = Limits(max_restarts=1000, quick_seconds=5, longest_wait_seconds=2)


class Follower:
    """Reads what a run appends to its files, and keeps account of who takes part."""

    def __init__(self, workdir: pathlib.Path, num_nodes: int) -> None:
        """The files need not exist yet."""
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._all = set(range(1, num_nodes + 1))
        self._members = set(self._all)
        self._metrics, self._events = _Tail(workdir / METRICS_FILE), _Tail(workdir / EVENTS_FILE)

    def look(self) -> None:
        """Take in what is new."""
        for event in self._events.read():
            self.events.append(event)
            if event["kind"] in ("started", "resumed"):
                self._members = set(self._all)
            elif event["kind"] == "recovery":
                self._members.add(event["process"])
            elif event["kind"] == "failure":
                self._members.discard(event["process"])
        now = time.time()
        self.rows += [row | {"seen": now} for row in self._metrics.read() if "train/loss" in row]

    @property
    def step(self) -> int:
        """Steps committed."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def attempt(self) -> int:
        """The last attempt."""
        return self.rows[-1]["attempt"] if self.rows else 0

    @property
    def members(self) -> frozenset[int]:
        """Processes that take part: the nodes at each start in place, then as events tell."""
        return frozenset(self._members)

    def forget(self, process: int) -> None:
        """A process was struck: it takes part no more until an event says so."""
        self._members.discard(process)


class Conductor:
    """One run under a launcher's supervisor."""

    def __init__(
        self,
        commands: Callable[[str], Sequence[Sequence[str]]],
        workdir: pathlib.Path,
        strikes: Sequence[Strike],
        *,
        num_nodes: int,
        limit_s: float,
        restarts_all: bool = False,
        on_struck: Callable[[Struck], None] = lambda struck: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            commands: of all processes, for the address at which they shall meet.
            workdir: the run's directory, new.
            strikes: what to do.
            num_nodes: of the run.
            limit_s: time after which everything is killed.
            restarts_all: whether each strike kills all processes, which are started again at once.
            on_struck: called after each strike.
        """
        self._commands, self._workdir, self._restarts_all = commands, workdir, restarts_all
        self._strikes, self._on_struck, self._limit_s = list(strikes), on_struck, limit_s
        self._follower = Follower(workdir, num_nodes)
        self._again = False
        self._error: BaseException | None = None

    def run(self) -> Outcome:
        """Run to the end, or to the limit."""
        self._workdir.mkdir(parents=True, exist_ok=True)
        outcome = Outcome(began=time.time())
        self._outcome, self._deadline = outcome, time.monotonic() + self._limit_s
        with (self._workdir / "output.log").open("a", encoding="utf-8", buffering=1) as output:

            def write(process: int | None, line: str) -> None:
                name = "launch" if process is None else f"process {process}"
                output.write(f"{time.time():.3f} [{name}] {line}\n")

            self._run_once(write)
            while self._again:
                self._run_once(write)
        self._follower.look()
        outcome.ended, outcome.rows, outcome.events = time.time(), self._follower.rows, self._follower.events
        return outcome

    def _run_once(self, write: Callable[[int | None, str], None]) -> None:
        """One start of all processes, until they have ended or are to start again."""
        self._again, over = False, threading.Event()
        with Supervisor(self._commands, limits=_LIMITS, on_line=write) as supervisor:
            supervisor.start()
            thread = threading.Thread(target=self._conduct, args=(supervisor, over), name="conductor", daemon=True)
            thread.start()
            try:
                self._outcome.exit_code = supervisor.run()
            finally:
                over.set()
                thread.join()
                self._outcome.launcher_events += supervisor.events
        if self._error is not None:
            raise self._error

    def _conduct(self, supervisor: Supervisor, over: threading.Event) -> None:
        """Look and strike until the run is over."""
        try:
            while not over.wait(POLL_SECONDS):
                self._follower.look()
                if time.monotonic() > self._deadline:
                    self._outcome.timed_out = True
                    supervisor.close()
                for strike in [strike for strike in self._strikes if self._is_due(strike)]:
                    self._strikes.remove(strike)
                    self._strike(strike, supervisor)
                if self._again:
                    supervisor.close()
                    return
        except BaseException as error:  # raised again by _run_once
            self._error = error
            supervisor.close()

    def _is_due(self, strike: Strike) -> bool:
        rows = self._follower.rows
        if not rows or self._outcome.timed_out:
            return False
        if strike.step is not None:
            return self._follower.step >= strike.step
        assert strike.seconds is not None
        return time.time() - rows[0]["seen"] >= strike.seconds

    def _strike(self, strike: Strike, supervisor: Supervisor) -> None:
        follower = self._follower
        was_member = strike.target == COORDINATOR or strike.target in follower.members
        passed_over = strike.spares_last and not self._restarts_all and follower.members <= {strike.target}
        at, step, attempt = time.time(), follower.step, follower.attempt
        was_running = strike.target in supervisor.pids
        if self._restarts_all:
            self._again = True
        elif not passed_over:
            was_running = supervisor.kill(strike.target, _SIGNALS[strike.kind])
            follower.forget(strike.target)
        struck = Struck(
            strike=strike,
            at=at,
            step=step,
            attempt=attempt,
            was_running=was_running,
            was_member=was_member,
            passed_over=passed_over,
        )
        self._outcome.struck.append(struck)
        self._on_struck(struck)


class _Tail:
    """The lines that were added to a file; one that is still being written is left for later."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._read = path, 0

    def read(self) -> list[dict[str, Any]]:
        """What is new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line]
