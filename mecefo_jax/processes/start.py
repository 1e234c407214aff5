"""The start of one process of a cluster: coordinator, node or spare."""

import contextlib
import faulthandler
import functools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator

from mecefo_jax.config import Config
from mecefo_jax.errors import ConfigError
from mecefo_jax.executables import open_store
from mecefo_jax.inputs import open_inputs
from mecefo_jax.processes.arrival import Arrival
from mecefo_jax.processes.audit import Audit
from mecefo_jax.processes.coordinator import arrive, coordinate
from mecefo_jax.processes.interconnect import Interconnect
from mecefo_jax.processes.keeper import StateKeeper
from mecefo_jax.processes.log import SharedLog
from mecefo_jax.processes.node import take_part
from mecefo_jax.processes.parts import Parts
from mecefo_jax.processes.runtime import Runtime, node_mesh
from mecefo_jax.processes.watchdog import Watchdog, die_with_parent
from mecefo_jax.processes.worker import Worker
from mecefo_jax.snapshots import Snapshots, run_identity
from mecefo_jax.stopping import StopRequest, stop_requests
from mecefo_jax.tracker_threads import open_trackers
from mecefo_jax.trackers import check_installed

_STARTED = float(os.environ.get("MECEFO_STARTED", time.time()))


def start(config: Config, workdir: pathlib.Path) -> None:
    """Be the process of the cluster that the config says, until the run ends.

    Raises:
        RunError: with its exit code.
    """
    number = config.cluster.process_id
    parent = _launcher()
    if parent is not None:
        die_with_parent()
    if number is not None:
        arrive(config, workdir, number)
    watchdog = Watchdog(
        progress_seconds=config.cluster.progress_seconds,
        stacks_to=workdir / "processes" / f"stacks-{number}.txt",
        beat_file=pathlib.Path(os.environ["MECEFO_BEAT_FILE"]) if "MECEFO_BEAT_FILE" in os.environ else None,
        parent=parent,
        name=f"process {number}",
    )
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with watchdog:
        if number == 0:
            coordinate(config, workdir, watchdog)
        else:
            with stop_requests() as stop:
                _be_a_node(config, workdir, watchdog, stop)


def _be_a_node(config: Config, workdir: pathlib.Path, watchdog: Watchdog, stop: StopRequest) -> None:
    check_installed(config.track)
    lap = _stopwatch()
    measured = {"imports_s": lap()}
    with watchdog.allow(config.cluster.first_step_seconds, "preparing or opening the data"):
        inputs = open_inputs(config)
        measured["data_s"] = lap()
    startup_seconds = 2 * config.cluster.startup_seconds  # the wait itself ends first, and says why
    with watchdog.allow(startup_seconds, "waiting for the cluster"):
        runtime = Runtime(config.cluster)
    if runtime.process == 0:  # found by JAX: the config did not say
        raise ConfigError("cluster.process_id: process 0 is the coordinator; set --cluster.process_id 0 there")
    arrival = Arrival(runtime, config.mesh.num_nodes)
    with _leaving(runtime):
        with watchdog.allow(startup_seconds, "waiting for the devices of the others"):
            runtime.start_backend()
        measured["runtime_s"] = lap()
        mesh = node_mesh(runtime.devices_of(runtime.process), config.mesh.fsdp, config.mesh.tensor)
        store = open_store(config.cluster.compile_cache)
        worker = Worker(config, inputs.vocab_size, mesh, store)
        with watchdog.allow(config.cluster.first_step_seconds, "compiling the programs"):
            worker.compile()
        measured["programs_s"] = lap()
        log = SharedLog(
            workdir,
            total_steps=config.train.steps,
            num_nodes=config.mesh.num_nodes,
            open_trackers=functools.partial(open_trackers, config, workdir),
        )
        identity = run_identity(config, inputs.vocab_size, inputs.prepared)
        parts = Parts(
            config=config,
            workdir=workdir,
            inputs=inputs,
            runtime=runtime,
            arrival=arrival,
            interconnect=Interconnect(runtime, config.mesh, config.cluster.collective_seconds, store),
            worker=worker,
            snapshots=Snapshots(config, identity, workdir, log),
            keeper=StateKeeper(workdir, runtime.process, worker, identity, log),
            log=log,
            audit=Audit(workdir / "audit" if config.cluster.audit else None, runtime.process, inputs.sampler),
            watchdog=watchdog,
            measured={name: round(seconds, 3) for name, seconds in measured.items()},
        )
        with contextlib.closing(log), contextlib.closing(parts.snapshots):
            take_part(parts, stop)
            parts.keeper.remove()


@contextlib.contextmanager
def _leaving(runtime: Runtime) -> Iterator[None]:
    """Leave the cluster in the end; what fails because the service is gone is no news then."""
    try:
        yield
    finally:
        runtime.leave()


def _stopwatch() -> Callable[[], float]:
    """Seconds since the last call; at first, since the process was started, as far as that is known."""
    last = _STARTED

    def lap() -> float:
        nonlocal last
        now = time.time()
        seconds, last = now - last, now
        return seconds

    return lap


def _launcher() -> int | None:
    """Process id of the launcher, if this process has one."""
    text = os.environ.get("MECEFO_PARENT", "")
    return int(text) if text.isdecimal() else None
