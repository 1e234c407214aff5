"""What JAX must be told before it starts its backends."""

import os

import jax

from mecefo_jax.config import MeshConfig, check_devices

# Nodes that share two cores reach a reduction far apart; XLA's CPU backend ends the process after 40 s by default.
_PATIENCE = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=86400 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600"
)


def prepare(mesh: MeshConfig) -> None:
    """Let the CPU show as many devices as the mesh needs, unless the environment says how many.

    To be called before the first use of a device.

    Raises:
        ConfigError: the mesh needs more devices than there are.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{_PATIENCE} {flags}"  # later flags win: the user's do
    chosen = "xla_force_host_platform_device_count" in flags
    if jax.config.jax_num_cpu_devices < 0 and not chosen:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", mesh.num_devices)
    # An executable from the persistent cache crashes the process when node_program moves it to another node.
    jax.config.update("jax_enable_compilation_cache", False)
    check_devices(mesh, jax.device_count())
