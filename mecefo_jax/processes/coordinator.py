"""Process 0: hosts the coordination service, and trains nothing.

It says who is missing while the cluster comes up, holds the lock of the run directory, and passes on what a launcher
knows of deaths (lines ``dead K`` on its standard input), which is faster than missed heartbeats. It ends when the run
has.
"""

import concurrent.futures
import os
import pathlib
import signal
import sys
import threading
import time

import jax

from mecefo_jax.config import Config
from mecefo_jax.errors import raise_for_end
from mecefo_jax.locking import locked
from mecefo_jax.processes.keys import run_key
from mecefo_jax.processes.runtime import Runtime, report_death
from mecefo_jax.processes.watchdog import Watchdog
from mecefo_jax.trainer import refuse_to_share

_LOOK_SECONDS = 0.5
_MISSING_SECONDS = 10.0
_GRACE_SECONDS = 5.0


def coordinate(config: Config, workdir: pathlib.Path, watchdog: Watchdog) -> None:
    """Serve until the run has ended.

    Raises:
        ConfigError: another run uses the directory.
        RestartInPlaceError: the processes did not come up.
        RunError: how the run has ended, if it was not finished.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the nodes are asked to stop, too, and need the service for it
    connected: concurrent.futures.Future[Runtime] = concurrent.futures.Future()
    threading.Thread(target=_name_missing, args=(config, workdir, connected), daemon=True).start()
    with locked(workdir / "run", on_wait=lambda: refuse_to_share(workdir), setting="--workdir"):
        run_key(workdir)  # before any two nodes make one
        if "MECEFO_PARENT" in os.environ:
            threading.Thread(target=_pass_on_deaths, args=(config.cluster.coordinator, connected), daemon=True).start()
        with watchdog.allow(2 * config.cluster.startup_seconds, "waiting for all processes"):
            runtime = Runtime(config.cluster)
        connected.set_result(runtime)
        with watchdog.allow(2 * config.cluster.startup_seconds, "waiting for the devices of all processes"):
            runtime.start_backend()
        while not runtime.lookup("run"):
            watchdog.progress()
            time.sleep(_LOOK_SECONDS)
        while "MECEFO_PARENT" in os.environ:  # the launcher sees the last node go, and then ends this process
            watchdog.progress()
            time.sleep(_LOOK_SECONDS)
        time.sleep(_GRACE_SECONDS)
        raise_for_end(int(runtime.lookup("run")["ended"]))


def arrive(config: Config, workdir: pathlib.Path, process: int) -> None:
    """Leave a sign that a process has started, for ``coordinate`` to know who is missing."""
    path = _sign(workdir, process)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config.cluster.coordinator)


def _name_missing(config: Config, workdir: pathlib.Path, connected: concurrent.futures.Future[Runtime]) -> None:
    began = time.time()
    while not concurrent.futures.wait([connected], _MISSING_SECONDS).done:
        processes = range(1, config.cluster.num_processes or 1)
        address = config.cluster.coordinator
        missing = [str(process) for process in processes if not _has_arrived(workdir, process, address, began)]
        if missing:
            print(f"waiting for process{'es' * (len(missing) > 1)} {', '.join(missing)}", file=sys.stderr, flush=True)


def _has_arrived(workdir: pathlib.Path, process: int, address: str, since: float) -> bool:
    """Whether a process has started for this address, and not for an earlier start at the same one."""
    path = _sign(workdir, process)
    return path.exists() and path.read_text() == address and path.stat().st_mtime > since - 60


def _sign(workdir: pathlib.Path, process: int) -> pathlib.Path:
    return workdir / "processes" / f"{process}.started"


def _pass_on_deaths(address: str, connected: concurrent.futures.Future[Runtime]) -> None:
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        # Who died before all had come up has a successor among those that did.
        if word == "dead" and number.isdecimal() and connected.done():
            try:
                connected.result().forget(f"waiting/{int(number)}")  # else it could be admitted all the same
                report_death(address, int(number))
            except jax.errors.JaxRuntimeError as error:  # its heartbeats will tell
                print(f"the death of process {number} could not be reported: {error}", file=sys.stderr, flush=True)
    os._exit(0)  # the launcher is gone, or has no more use for this process
