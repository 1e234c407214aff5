"""JAX's multi-controller runtime, as the cluster uses it. The only file that knows ``jax.distributed``.

Process 0 hosts the coordination service and trains nothing; every process has a client of it. Used of it are

- heartbeats and incarnations: a process is alive while it is connected and its heart beats;
- ``live``: the barrier under ``jax.live_devices``, which gives the same answer to all that wait in it;
- the key-value store: small texts, gone with the service.

JAX has no public name for the last two apart from ``jax.live_devices``, which hides incarnations and remembers its
devices between calls; so ``_state`` reaches for the object behind it (seen in jax 0.10.2 and 0.12).
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mecefo_jax.config import ClusterConfig
from mecefo_jax.errors import ConfigError, RestartInPlaceError

LANES = 16
"""CPU devices a node's process has for each one that it needs (see ``interconnect``)."""

# A task number that no process has. Sets of tasks that differ in such a number are different barriers to the service,
# so that one abandoned by a process that died is never mistaken for a later one.
_ROUND_TAG = 2**30


def prepare(cluster: ClusterConfig, devices_per_node: int) -> None:
    """What JAX must be told before it starts its backends; to be called in every process of the cluster."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_cpu_collective_timeout_seconds={cluster.collective_seconds} {flags}"
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", LANES * devices_per_node)
    # Compiled programs are kept by mecefo_jax/executables.py; JAX's cache would only serve the process that made them.
    jax.config.update("jax_enable_compilation_cache", False)


class Runtime:
    """This process's place in the cluster."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """Connect; at the first start of a cluster, wait for all its processes.

        Raises:
            RestartInPlaceError: the processes did not all come up in time.
            ConfigError: JAX finds no cluster here.
        """
        address = None if cluster.coordinator == "auto" else cluster.coordinator
        if address is not None and _is_loopback(address):
            _let_gloo_listen_on_loopback()
        try:
            jax.distributed.initialize(
                address,
                cluster.num_processes,
                cluster.process_id,
                cluster_detection_method=None if address is None else "deactivate",
                initialization_timeout=cluster.startup_seconds,
                heartbeat_timeout_seconds=cluster.heartbeat_seconds,
                coordinator_bind_address=_bind_address(cluster, address),
            )
        except jax.errors.JaxRuntimeError as error:
            raise RestartInPlaceError(
                f"the cluster at {cluster.coordinator} did not come up within cluster.startup_seconds "
                f"({cluster.startup_seconds}): {_one_line(error)}"
            ) from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"cluster.coordinator {cluster.coordinator}: {_one_line(error)}") from error
        state = _state()
        self._client = state.client
        self.process, self.num_processes = int(state.process_id), int(state.num_processes)
        self.address = str(state.coordinator_address)
        # A barrier that nobody else can be in shows under which name the service knows this life of the process.
        self.life = self.live(-1, [self.process])[self.process]

    def start_backend(self) -> None:
        """Learn of all devices; at the first start of a cluster, waits until every process does this."""
        jax.devices()

    def live(self, round_number: int, members: Iterable[int]) -> dict[int, int]:
        """Wait until every live one of ``members`` has called this for the round; blocks as long as one is missing.

        Args:
            round_number: of the barrier; all callers name the same.
            members: processes that may come; this one is among them.

        Returns:
            Lives (incarnations) of the live members, the same for all callers.
        """
        found = self._client.get_live_nodes([*members, _ROUND_TAG + round_number])
        return {int(process): int(incarnation) for process, incarnation in found.items()}

    def publish(self, key: str, value: str) -> None:
        """Set a key for all to read."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def lookup(self, folder: str) -> dict[str, str]:
        """The keys below ``folder``, by what follows it."""
        return {key[len(folder) + 1 :]: value for key, value in self._client.key_value_dir_get(folder)}

    def wait_for(self, key: str, seconds: float) -> str | None:
        """The value of a key once it is set; None if it is not in time."""
        try:
            return self._client.blocking_key_value_get(key, max(1, round(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def forget(self, key: str) -> None:
        """Delete a key and all below it."""
        self._client.key_value_delete(key)

    def give_up_connecting(self, cliques: Sequence[Sequence[jax.Device]]) -> None:
        """Let gloo's set-up of communicators fail where it waits for a device whose process is gone.

        By itself it waits 30 s for the address of each, whatever the time-out of collectives. What it is given here
        for those that are missing is no address, and it says so. Its keys are an implementation detail (seen in jaxlib
        0.10.2 and 0.12); where they are others, this does nothing.
        """
        for devices in cliques:
            name = ",".join(str(device.id) for device in devices)
            for rank in range(len(devices)):
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is there
                    self._client.key_value_set_bytes(f"cpu:gloo/{name}/{rank}", b"\xff" * 64)

    def devices_of(self, process: int) -> list[jax.Device]:
        """The devices of a process, in order."""
        return _devices_by_process()[process]

    def leave(self) -> None:
        """Tell the service that this process is going; the others see it at once."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator may have gone before
            jax.distributed.shutdown()


def report_death(address: str, process: int) -> None:
    """Tell the service that a process is dead, instead of waiting for its heartbeats to time out.

    There is no call for that. But a task that registers again replaces its former self, and one that shuts down is no
    longer alive: so this does both in its name. The process itself, should it come back, registers as it always does.
    """
    from jax._src.lib import _jax  # the client's constructor is not public

    client = _jax.get_distributed_runtime_client(
        address, process, init_timeout=5, heartbeat_timeout=3600, shutdown_on_destruction=True, use_compression=True
    )
    client.connect()
    client.shutdown()


def node_mesh(devices: list[jax.Device], fsdp: int, tensor: int, lane: int = 0) -> Mesh:
    """The sub-mesh of a process on one of its lanes."""
    size = fsdp * tensor
    own = devices[lane * size : (lane + 1) * size]
    return Mesh(np.array(own).reshape(fsdp, tensor), ("fsdp", "tensor"))


@functools.cache
def _devices_by_process() -> dict[int, list[jax.Device]]:
    by_process: dict[int, list[jax.Device]] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    return by_process


def _state() -> Any:
    """JAX's record of the cluster: its client of the coordination service, and who this process is."""
    from jax._src import distributed  # no public name (see the module's docstring)

    return distributed.global_state


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _bind_address(cluster: ClusterConfig, address: str | None) -> str | None:
    """Where the service listens: JAX's own default would be every interface."""
    if address is None:
        return None  # JAX's own: every interface
    host, _, port = address.rpartition(":")
    return f"{cluster.listen_on or host}:{port}"


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _let_gloo_listen_on_loopback() -> None:
    """By itself gloo listens where the host's name leads, and JAX has no option for it."""
    if sys.platform != "linux":  # elsewhere JAX uses another transport, without this argument
        return
    from jax._src.lib import _jax

    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(make, hostname="127.0.0.1")
