"""One log of a run that many processes write, one at a time: the others keep what they would have written.

All holders of the state keep the same account of each step. The one that speaks for them writes it; should it die, the
next one goes on, and fills in what its predecessor did not write any more.
"""

import collections
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from mecefo_jax.metrics import EVENTS_FILE, METRICS_FILE, RunLog, read_events, read_rows
from mecefo_jax.tracker_threads import Trackers

_KEPT = 500


class SharedLog:
    """A log that writes once it is told to."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        total_steps: int,
        num_nodes: int,
        open_trackers: Callable[[], Trackers] = Trackers,
    ) -> None:
        """Silent; trackers are opened by the one that writes."""
        self._workdir, self._total_steps, self._num_nodes = workdir, total_steps, num_nodes
        self._open_trackers = open_trackers
        self._kept: collections.deque[tuple[str, int, dict[str, Any]]] = collections.deque(maxlen=_KEPT)
        self._log: RunLog | None = None

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self._log is not None

    def begin(self) -> None:
        """Write from here on, as a new attempt."""
        self._open(None)

    def take_over(self) -> None:
        """Write from here on, as the attempt that another process began; what it left out comes first."""
        rows = read_rows(self._workdir / METRICS_FILE)
        events = read_events(self._workdir / EVENTS_FILE)
        self._open(max((line["attempt"] for line in [*rows, *events]), default=1))
        first = min((step for _, step, _ in self._kept), default=0)
        written = {row["step"]: set(row) for row in rows if row["step"] >= first}
        told = {(event["kind"], event["step"], event.get("node")) for event in events if event["step"] >= first}
        for kind, step, fields in list(self._kept):
            if kind == "" and not set(fields) <= written.get(step, set()):
                self.scalars(step, fields)
            elif kind and (kind, step, fields.get("node")) not in told:
                self.event(kind, step, **fields)
        self._kept.clear()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """A row of metrics."""
        if self._log is not None:
            self._log.scalars(step, values)
        else:
            self._kept.append(("", step, dict(values)))

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """A change."""
        if self._log is not None:
            self._log.event(kind, step, **fields)
        else:
            self._kept.append((kind, step, fields))

    def progress(self, step: int) -> None:
        """Steps done so far."""
        if self._log is not None:
            self._log.progress(step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """The outcome."""
        assert self._log is not None
        self._log.summary(values)

    def close(self, *, wait_for_trackers: bool = True) -> None:
        """Write what is unwritten, and no more from here on."""
        if self._log is not None:
            self._log.close(wait_for_trackers=wait_for_trackers)
            self._log = None

    def _open(self, attempt: int | None) -> None:
        self._log = RunLog(
            self._workdir,
            total_steps=self._total_steps,
            num_nodes=self._num_nodes,
            attempt=attempt,
            trackers=self._open_trackers(),
        )
