"""Starts the processes of a cluster, restarts those that die, and tells the coordinator of each death at once.

Process 0 is the coordinator, all others are nodes or spares. A node that dies is started again by itself; when the
coordinator dies, or a node asks for it (exit 76), all start again in place and go on from the states in shared memory.
One thread decides everything, in the order in which ends, signals and time-outs reach it.
"""

import atexit
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mecefo_jax.errors import InterruptedRunError, PreemptedError
from mecefo_jax.processes.child import Child
from mecefo_jax.processes.endings import (
    CANNOT_GO_ON,
    CHOSEN,
    FINISHED,
    NOT_STARTED,
    RESTART_ALL,
    STOPPED,
    describe,
)
from mecefo_jax.processes.output import OnLine, Output, print_line
from mecefo_jax.processes.patience import DEFAULTS, Limits, Patience
from mecefo_jax.processes.roster import Place, Roster

_TICK_SECONDS = 0.1
_STARVED_SECONDS = 1.0
"""A pause of this length between two looks means that this process was stopped itself, and has missed beats."""


class Supervisor:
    """Runs a cluster of processes to its end; use it as a context manager, or call ``run``, so that none is left."""

    def __init__(
        self,
        commands: Callable[[str], Sequence[Sequence[str]]],
        *,
        limits: Limits = DEFAULTS,
        on_line: OnLine = print_line,
    ) -> None:
        """Prepares; ``start`` starts.

        Args:
          commands: for the host:port that a cluster shall meet at, the commands of all its processes in the order of
            their numbers.
          limits: how often it tries again, and how long it waits.
          on_line: takes each line of a process, or of the supervisor (None), one at a time.
        """
        self.events: list[dict[str, Any]] = []
        """What happened: kind (started, died, stalled, restarted, restart_in_place, ended, given_up, finished),
        process (None: the cluster), time (seconds since 1970) and detail (text)."""
        self._commands, self._limits = commands, limits
        self._output = Output(on_line)
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._roster = Roster(
            limits,
            self._output,
            is_death=lambda code: code not in CHOSEN,
            on_end=lambda child: self._messages.put(("ended", child)),
        )
        self._patience = Patience(limits)
        self._restart_all_at: float | None = None
        self._all_started = self._started = self._last_look = self._last_report = time.monotonic()
        self._stop: signal.Signals | None = None
        self._interrupts = 0
        self._verdict: int | None = None
        self._last_code = 1
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._exit_code: int | None = None
        self._error: BaseException | None = None
        self._up, self._done = threading.Event(), threading.Event()
        # Children may be bound to the life of the thread that starts them: this one outlives them all.
        self._thread = threading.Thread(target=self._work, name="supervisor", daemon=True)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> dict[int, int]:
        """The living processes: their process ids, by number."""
        return self._roster.pids

    def kill(self, process: int, signum: int = signal.SIGKILL) -> bool:
        """Sends a signal to a process, as whoever wants to see it die would; returns whether it was running."""
        child = self._roster.places[process].child
        return child is not None and child.send(signum)

    def start(self) -> None:
        """Starts all processes and returns."""
        atexit.register(self.close)
        self._thread.start()
        self._up.wait()

    def run(self) -> int:
        """Starts all processes unless they are, and waits for the end.

        Returns:
          0: finished; 75 or 130: stopped on request; else the exit code of the node that could not go on.
        """
        try:
            if not self._up.is_set():
                self.start()
            self._done.wait()
        finally:
            self.close()
        if self._error is not None:
            raise self._error
        assert self._exit_code is not None
        return self._exit_code

    def stop(self, signum: int) -> None:
        """Asks all nodes to stop, by SIGTERM or SIGINT; a second SIGINT kills them. Signal handlers may call it."""
        self._messages.put(("stop", signum))

    def close(self) -> None:
        """Kills what still runs and waits for it."""
        self._messages.put(("close", None))
        if self._thread.ident is not None:
            self._done.wait()
        else:
            self._roster.close()
            self._output.close(self._limits.coordinator_seconds)
        atexit.unregister(self.close)

    def _work(self) -> None:
        """The supervisor's thread."""
        try:
            self._start_all()
            self._up.set()
            while self._restart_all_at is not None or self._roster.any_node_goes_on:
                self._next_message()
                self._look()
            self._exit_code = self._result()
        except BaseException as error:  # to be raised by run, in its caller's thread
            self._error = error
        finally:
            self._roster.close()
            self._summarize()
            self._output.close(self._limits.coordinator_seconds)
            self._up.set()
            self._done.set()

    def _next_message(self) -> None:
        try:
            kind, subject = self._messages.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return
        if kind == "ended":
            self._handle_end(subject)
        elif kind == "stop":
            self._handle_stop(subject)
        else:
            self._handle_close()

    # Starting

    def _start_all(self) -> None:
        """Starts the coordinator and all nodes, to meet at a new port."""
        self._restart_nobody()
        self._roster.assign(self._commands(_free_address()))
        self._all_started = time.monotonic()
        for place in self._roster.places:
            if self._restart_all_at is None and not self._is_winding_down:  # else the coordinator did not start
                self._start(place, "started")
        self._say(f"started, as process (pid): {', '.join(f'{process} ({pid})' for process, pid in self.pids.items())}")

    def _start(self, place: Place, kind: str) -> None:
        try:
            self._roster.start(place)
        except OSError as error:
            how = f"could not be started ({error.strerror})"
            self._coordinator_ended(how) if place.process == 0 else self._node_died(place, NOT_STARTED, 0.0, how)
        else:
            assert place.child is not None
            self._note(kind, place.process, f"pid {place.child.pid}")

    # What happens

    def _handle_end(self, child: Child) -> None:
        place, code = self._roster.take_off(child), child.exit_code
        assert code is not None
        if self._restart_all_at is not None:
            return  # killed for it, or about to be
        lived = time.monotonic() - child.started
        how = f"{'died' if code not in CHOSEN else 'ended'} ({describe(code)}) after {lived:.1f} s"
        if place.process == 0:
            self._coordinator_ended(how, code)
        elif code == RESTART_ALL and not self._is_winding_down:
            self._restart_in_place(f"process {place.process} asked for it", code)
        elif code in CHOSEN or self._verdict is not None or self._kill_at is not None or -code == self._stop:
            self._node_ended(place, code, how)
        else:
            self._node_died(place, code, lived, how)

    def _node_ended(self, place: Place, code: int, how: str) -> None:
        """A node has left, by itself or because it was told to."""
        place.exit_code, self._last_code = code, max(code, 1)
        self._note("ended", place.process, how)
        if code in CANNOT_GO_ON and self._verdict is None:
            self._end(code, f"process {place.process} {how}: the run cannot go on")
        elif code == FINISHED or self._stop is not None:
            if self._end_at is None and self._kill_at is None:
                self._end_at = time.monotonic() + self._limits.finish_seconds
            self._restart_nobody()

    def _node_died(self, place: Place, code: int, lived_seconds: float, how: str) -> None:
        """Has a node started again that died, unless the run is ending or it dies too often."""
        place.exit_code, self._last_code = code, max(code, 1)
        self._note("died", place.process, how)
        if self._is_winding_down:
            self._say(f"process {place.process} {how}; it is not restarted, as the run is ending")
            return
        wait = place.patience.wait_seconds(lived_seconds)
        if wait is None:
            self._note("given_up", place.process, how)
            self._say(f"process {place.process} {how}; given up after {self._limits.max_restarts} restarts in a row")
            return
        place.restart_at = time.monotonic() + wait
        self._say(f"process {place.process} {how}; it restarts {_in_seconds(wait)}")

    def _coordinator_ended(self, how: str, code: int = NOT_STARTED) -> None:
        self._note("ended" if self._is_winding_down else "died", 0, how)
        if self._is_winding_down:
            return  # nodes may be saving; those that cannot do without it end by themselves
        if code in CANNOT_GO_ON:
            self._end(code, f"the coordinator {how}: the run cannot go on")
        else:
            self._restart_in_place(f"the coordinator {how}", code)

    def _restart_in_place(self, why: str, code: int) -> None:
        """Kills all processes; once they have ended, ``_look`` starts them again."""
        wait = self._patience.wait_seconds(time.monotonic() - self._all_started)
        if wait is None:
            self._note("given_up", None, why)
            self._end(max(code, 1), f"{why}; given up after {self._limits.max_restarts} restarts in place")
            return
        self._note("restart_in_place", None, why)
        self._say(f"{why}: all processes restart in place {_in_seconds(wait)}")
        self._restart_nobody()
        self._restart_all_at = time.monotonic() + wait
        self._roster.send(signal.SIGKILL, self._roster.places)

    def _handle_stop(self, signum: int) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            self._say("interrupted again: killing all processes")
            self._verdict = InterruptedRunError.exit_code
            self._roster.send(signal.SIGKILL, self._roster.places)
        else:
            self._say(f"{signal.Signals(signum).name}: asking all processes to save and stop")
            self._roster.send(signum, self._roster.nodes)
        for place in self._roster.places:
            if self._stop is None and place.exit_code != FINISHED:
                place.exit_code = None  # died before: no answer to the request
        self._stop = signal.Signals(signum)
        if self._restart_all_at is not None and self._verdict is None:
            self._verdict = self._asked_code  # nobody is left to answer
        self._restart_nobody()

    def _handle_close(self) -> None:
        self._restart_nobody()
        if self._verdict is None:
            self._verdict = InterruptedRunError.exit_code
        self._roster.send(signal.SIGKILL, self._roster.places)

    # Time

    def _look(self) -> None:
        """Does what is due."""
        now = time.monotonic()
        self._check_beats(now)
        if self._end_at is not None and now >= self._end_at:
            self._say("not all processes have ended: ending them")
            self._terminate(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = float("inf")
            self._roster.send(signal.SIGKILL, self._roster.nodes)
        if self._restart_all_at is not None:
            if now >= self._restart_all_at and not any(place.child for place in self._roster.places):
                self._start_all()
            return
        for place in self._roster.places:
            if place.restart_at is not None and now >= place.restart_at:
                self._start(place, "restarted")

    def _check_beats(self, now: float) -> None:
        """Kills processes that have stopped beating, and names those that have not begun to."""
        starved = now - self._last_look > _STARVED_SECONDS
        self._last_look = now
        stalled, missing = self._roster.look_at_beats(now, starved)
        for place, silent_seconds in stalled:
            how = f"no sign of life for {silent_seconds:.1f} s"
            self._note("stalled", place.process, how)
            self._say(f"process {place.process}: {how}; it is killed")
            self._roster.send(signal.SIGKILL, [place])
        if missing and now - self._last_report >= self._limits.report_seconds:
            self._last_report = now
            self._say(
                f"waiting for process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} to come up"
            )

    # Ending

    @property
    def _is_winding_down(self) -> bool:
        """Whether nobody is restarted any more."""
        return (
            self._verdict is not None
            or self._stop is not None
            or any(place.exit_code == FINISHED for place in self._roster.nodes)
        )

    def _end(self, code: int, why: str) -> None:
        """Ends all nodes; the run's exit code is decided."""
        self._say(why)
        self._verdict = code
        self._restart_nobody()
        self._terminate(time.monotonic())

    def _restart_nobody(self) -> None:
        self._restart_all_at = None
        self._roster.restart_nobody()

    def _terminate(self, now: float) -> None:
        self._end_at, self._kill_at = None, now + self._limits.grace_seconds
        self._roster.send(signal.SIGTERM, self._roster.nodes)

    def _result(self) -> int:
        """The exit code of the run, all nodes having ended."""
        if self._verdict is not None:
            return self._verdict
        codes = [place.exit_code for place in self._roster.nodes if place.exit_code is not None]
        stopped = [code for code in codes if code in STOPPED]
        if self._stop is not None:
            if stopped or not codes or -self._stop in codes:
                return self._asked_code
        if FINISHED in codes:
            return FINISHED
        return stopped[0] if stopped else self._last_code

    @property
    def _asked_code(self) -> int:
        """The exit code of a run that has stopped as it was asked to."""
        return (InterruptedRunError if self._stop == signal.SIGINT else PreemptedError).exit_code

    def _summarize(self) -> None:
        kinds = [event["kind"] for event in self.events]
        deaths, restarts, in_place = (kinds.count(kind) for kind in ("died", "restarted", "restart_in_place"))
        detail = f"exit code {self._exit_code}, " if self._error is None else f"{type(self._error).__name__}, "
        detail += f"{time.monotonic() - self._started:.1f} s, deaths {deaths}, restarts {restarts}"
        detail += f", restarts in place {in_place}"
        self._note("finished", None, detail)
        self._say(detail)

    def _note(self, kind: str, process: int | None, detail: str) -> None:
        self.events.append({"kind": kind, "process": process, "time": time.time(), "detail": detail})

    def _say(self, line: str) -> None:
        self._output.say(line)


def _free_address() -> str:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _in_seconds(wait: float) -> str:
    return f"in {wait:g} s" if wait else "at once"
