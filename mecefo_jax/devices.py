"""What JAX must be told before it starts its backends."""

import os

# Nodes decompose matrices at the same time, and SciPy's BLAS, which JAX calls, then spends its time on its own locks: a
# refresh of eight nodes' bases on two cores took 25 times as long with its threads. It reads this when JAX loads it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

from mecefo_jax.config import ClusterConfig, MeshConfig, check_devices
from mecefo_jax.errors import ConfigError

# Nodes that share two cores reach a reduction far apart; XLA's CPU backend ends the process after 40 s by default.
_PATIENCE = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=86400 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600"
)

_ENVIRONMENT = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")


def prepare(mesh: MeshConfig) -> None:
    """Let the CPU show as many devices as the mesh needs, unless the environment says how many.

    To be called before the first use of a device.

    Raises:
        ConfigError: JAX finds no device, or the mesh needs more than there are.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{_PATIENCE} {flags}"  # later flags win: the user's do
    chosen = "xla_force_host_platform_device_count" in flags
    if jax.config.jax_num_cpu_devices < 0 and not chosen:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", mesh.num_devices)
    # An executable from the persistent cache crashes the process when node_program moves it to another node.
    jax.config.update("jax_enable_compilation_cache", False)
    check_devices(mesh, _device_count())


def prepare_process(cluster: ClusterConfig, mesh: MeshConfig) -> None:
    """The same for one process of a cluster, whose devices are counted once the others are there."""
    from mecefo_jax.processes import runtime

    os.environ["XLA_FLAGS"] = f"{_PATIENCE} {os.environ.get('XLA_FLAGS', '')}"
    runtime.prepare(cluster, mesh.fsdp * mesh.tensor)


def _device_count() -> int:
    """Devices that there are."""
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform asked for is there
        reason = " ".join(str(error).split()) or "no such platform here"
        found = " ".join(f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ)
        raise ConfigError(
            f"JAX finds no device: {reason}; got {found or 'nothing'} in the environment, set JAX_PLATFORMS=cpu alone, "
            "or install JAX for the accelerator"
        ) from error
