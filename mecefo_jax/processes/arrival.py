"""How a process that comes to a running cluster becomes a member.

A process that died and is back is connected again, so its former fellows' barrier waits for it: it must answer that
barrier, and they see from its life that it is another. Meanwhile it gets ready, says so under ``waiting/``, and is
told under ``admit/`` from which round on it takes part.

Where all members have died, nobody admits anybody. Those that wait find out, meet in a barrier of their own, and are
the members from then on; they load what is in memory or on disk.
"""

import contextlib
import functools
import os
import threading
import time
import traceback
from collections.abc import Callable

import jax

from mecefo_jax.processes.agreement import Facts, Member, View
from mecefo_jax.processes.runtime import Runtime

_POLL_SECONDS = 0.02
_QUIET_SECONDS = 2.0
# Rounds of their own kind, far from those of members (``Runtime.live``).
_PAIR_ROUND, _SUCCESSION_ROUND = 2**28, 2**29


class Arrival:
    """One process on its way into the cluster, from its connection on."""

    def __init__(self, runtime: Runtime, num_nodes: int) -> None:
        """Begin to answer barriers, if the cluster is running already."""
        self._runtime, self._num_nodes = runtime, num_nodes
        runtime.publish(f"life/{runtime.process}", str(runtime.life))
        self.cluster_runs = bool(runtime.lookup("facts"))
        """Whether others had begun before this process came."""
        self._admitted = threading.Event()
        self._inherited: View | None = None
        self._watched: set[tuple[int, int | None]] = set()
        self._dead: set[tuple[int, int | None]] = set()
        if self.cluster_runs or runtime.process > num_nodes:
            threading.Thread(target=self._look_on_or_end, name="arrival", daemon=True).start()

    def wait(self, is_stopped: Callable[[], bool]) -> View | None:
        """Wait to take part.

        Args:
            is_stopped: asked now and then whether to stop waiting.

        Returns:
            The view of which this process is a member; None where the run ended, or it was asked to stop.
        """
        runtime = self._runtime
        while not is_stopped():
            runtime.publish(f"waiting/{runtime.process}", str(runtime.life))
            text = runtime.wait_for(f"admit/{runtime.process}/{runtime.life}", 0.5)
            view = self._inherited if text is None else View.from_json(text)
            if view is not None and runtime.process in view.members:
                self._admitted.set()
                runtime.forget(f"waiting/{runtime.process}")
                return view
            if runtime.lookup("run"):
                break
        self._admitted.set()
        return None

    def _in_background(self, target: Callable[[], object]) -> None:
        def guarded() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone, and so will be this process
                target()

        threading.Thread(target=guarded, daemon=True).start()

    def _look_on_or_end(self) -> None:
        """A process that no longer answers would hold up all others: it rather ends."""
        try:
            self._look_on()
        except Exception:
            if not self._admitted.is_set():
                traceback.print_exc()
                os._exit(1)

    def _look_on(self) -> None:
        """Answer barriers that wait for a former life of this process; notice when nobody lives to admit it."""
        runtime, answered, newest, changed = self._runtime, set(), -1, time.monotonic()
        while not self._admitted.is_set():
            facts = {key: Facts.from_json(text) for key, text in runtime.lookup("facts").items()}
            rounds = {key: int(key.split("/")[0]) for key in facts}
            if rounds and max(rounds.values()) != newest:
                newest, changed = max(rounds.values()), time.monotonic()
            last = next((facts[key] for key, number in rounds.items() if number == newest), None)
            # Members tell the admitted before they count them in: who is not admitted by now is meant as a former life.
            if last is not None and str(runtime.life) not in runtime.lookup(f"admit/{runtime.process}"):
                barrier = (newest, tuple(last.members))
                if runtime.process in last.members and barrier not in answered:
                    answered.add(barrier)
                    self._in_background(functools.partial(runtime.live, *barrier))
                if time.monotonic() - changed > _QUIET_SECONDS and self._are_dead(last.members):
                    self._succeed(newest, last.epoch)
                    changed = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _are_dead(self, members: dict[int, int | None]) -> bool:
        """Whether none of the members lives; found out in the background, so True may come late."""
        present, waiting = self._runtime.lookup("life"), self._runtime.lookup("waiting")
        for process, life in members.items():
            was, now = (process, life), present.get(str(process), "")
            another = now != str(life) if life is not None else now == waiting.get(str(process))
            if process == self._runtime.process or another:
                self._dead.add(was)
            elif was not in self._watched:
                self._watched.add(was)
                self._in_background(functools.partial(self._outlive, was))
        return all((process, life) in self._dead for process, life in members.items())

    def _outlive(self, was: tuple[int, int | None]) -> None:
        """Wait in a barrier that the other one never enters: it ends with the other's life."""
        found = self._runtime.live(_PAIR_ROUND, [self._runtime.process, was[0]])
        if found.get(was[0]) != was[1] or was[1] is None:
            self._dead.add(was)

    def _succeed(self, last_round: int, last_epoch: int) -> None:
        """All that wait meet, and go on where the dead left off."""
        runtime = self._runtime
        live = runtime.live(_SUCCESSION_ROUND + last_round, range(1, runtime.num_processes))
        heirs = sorted(live)[: self._num_nodes]
        members = {process: Member(node=node, life=live[process]) for node, process in enumerate(heirs)}
        self._inherited = View(round=last_round + 2, epoch=last_epoch + 2, members=members)
