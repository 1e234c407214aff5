"""How a process that comes to a running cluster becomes a member.

A process that died and is back is connected again, so its former fellows' barrier waits for it: it must answer that
barrier, and they see from its incarnation that it is another. Meanwhile it gets ready, says so under ``waiting/``,
and is told under ``admit/`` from which round on it takes part.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable

import jax

from mecefo_jax.errors import RestartInPlaceError
from mecefo_jax.processes.agreement import View
from mecefo_jax.processes.runtime import Runtime

_POLL_SECONDS = 0.02


class Arrival:
    """One process on its way into the cluster, from its connection on."""

    def __init__(self, runtime: Runtime) -> None:
        """Begin to answer barriers."""
        self._runtime = runtime
        self.cluster_runs = bool(runtime.lookup("facts"))
        """Whether others had begun before this process came."""
        self._admitted = threading.Event()
        if self.cluster_runs:
            threading.Thread(target=self._answer_barriers, name="answers", daemon=True).start()

    def wait(self, give_up_seconds: float, is_stopped: Callable[[], bool]) -> View | None:
        """Wait to be admitted.

        Args:
            give_up_seconds: longest time without a sign of any member.
            is_stopped: asked now and then whether to stop waiting.

        Returns:
            The view of which this process is a member; None where the run ended, or it was asked to stop.

        Raises:
            RestartInPlaceError: no member gives a sign of life.
        """
        last_sign, signs = time.monotonic(), ""
        while not is_stopped():
            self._runtime.publish(f"waiting/{self._runtime.process}", str(self._runtime.life))
            text = self._runtime.wait_for(self._key, 0.5)
            if text is not None:
                self._admitted.set()
                return View.from_json(text)
            ended = self._runtime.lookup("run")
            if ended:
                return None
            now = max(self._runtime.lookup("facts"), default="", key=_round_of)
            if now != signs:
                last_sign, signs = time.monotonic(), now
            if time.monotonic() - last_sign > give_up_seconds:
                raise RestartInPlaceError(f"no member of the cluster gave a sign of life for {give_up_seconds:.0f} s")
        return None

    @property
    def _key(self) -> str:
        return f"admit/{self._runtime.process}/{self._runtime.life}"

    def _answer_barriers(self) -> None:
        """Call every barrier that waits for a former life of this process."""
        answered = set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone: this process is, too
            while not self._admitted.is_set():
                facts = self._runtime.lookup("facts")
                newest = max(facts, default="", key=_round_of)
                # Members tell the admitted before they count them in: so what is not admitted by now is a former life.
                if newest and str(self._runtime.life) not in self._runtime.lookup(f"admit/{self._runtime.process}"):
                    members = tuple(json.loads(facts[newest])["members"])
                    barrier = (_round_of(newest), members)
                    if self._runtime.process in members and barrier not in answered:
                        answered.add(barrier)
                        threading.Thread(target=self._runtime.live, args=barrier, daemon=True).start()
                time.sleep(_POLL_SECONDS)


def _round_of(key: str) -> int:
    return int(key.split("/")[0]) if key else -1
