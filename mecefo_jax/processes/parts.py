"""What a node's process is made of, put together in ``start.py``."""

import contextlib
import dataclasses
import pathlib

from mecefo_jax.config import Config
from mecefo_jax.inputs import Inputs
from mecefo_jax.processes.arrival import Arrival
from mecefo_jax.processes.audit import Audit
from mecefo_jax.processes.interconnect import Interconnect
from mecefo_jax.processes.keeper import StateKeeper
from mecefo_jax.processes.log import SharedLog
from mecefo_jax.processes.runtime import Runtime
from mecefo_jax.processes.watchdog import Watchdog
from mecefo_jax.processes.worker import Worker
from mecefo_jax.snapshots import Snapshots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts."""

    config: Config
    workdir: pathlib.Path
    inputs: Inputs
    runtime: Runtime
    arrival: Arrival
    interconnect: Interconnect
    worker: Worker
    snapshots: Snapshots
    keeper: StateKeeper
    log: SharedLog
    audit: Audit
    watchdog: Watchdog
    measured: dict[str, float]
    """Parts of the way from the start of the process to here, in seconds."""

    def slow(self, what: str, times: int = 1) -> contextlib.AbstractContextManager[None]:
        """For what may take longer than a step: as long as a first one, or several."""
        return self.watchdog.allow(times * self.config.cluster.first_step_seconds, what)
