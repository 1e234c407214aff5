"""A program that every node runs on its own devices, compiled once for all of them.

XLA ties an executable to devices. Where nodes are emulated in one process, compiling once a node would dominate the
start of a run; so the executable is compiled for the first sub-mesh and moved to the others.
"""

import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jaxlib import xla_client

from mecefo_jax.mesh import shardings


@dataclasses.dataclass
class NodeProgram:
    """``function`` on each sub-mesh. Compiled at the first call on any of them, and never again for other shapes.

    Attributes:
        function: pure; called with trees of arrays on the sub-mesh.
        submeshes: where it may run; all of one shape.
        donate: positions of arguments whose buffers the result may reuse.
        compilations: executables compiled so far.
    """

    function: Callable[..., Any]
    submeshes: Sequence[Mesh]
    donate: tuple[int, ...] = ()
    compilations: int = 0
    _executables: dict[int, jax.stages.Compiled] = dataclasses.field(default_factory=dict)
    _origin: int | None = None

    def __call__(self, submesh: int, *args: Any) -> Any:
        """Run on sub-mesh number ``submesh``; returns without waiting for the result."""
        executable = self._executables.get(submesh)
        if executable is None:
            executable = self._executables[submesh] = self._prepare(submesh, args)
        return executable(*args)

    def _prepare(self, submesh: int, args: Sequence[Any]) -> jax.stages.Compiled:
        if self._origin is not None:
            moved = move_executable(
                self._executables[self._origin], self.submeshes[self._origin], self.submeshes[submesh]
            )
            if moved is not None:
                return moved
        else:
            self._origin = submesh
        self.compilations += 1
        mesh = self.submeshes[submesh]
        with jax.set_mesh(mesh):
            out_shardings = shardings(mesh, jax.eval_shape(self.function, *args))
            jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=out_shardings)
            return jitted.lower(*args).compile()


def move_executable(compiled: jax.stages.Compiled, source: Mesh, target: Mesh) -> jax.stages.Compiled | None:
    """The executable of ``source`` for the devices of ``target``, or None where the backend cannot do that.

    JAX serializes executables but loads them for the devices they were compiled for alone. Its format names devices by
    id through pickle's persistent ids, so this reads it with the target's devices in their places. The client's
    ``deserialize_executable`` and the options' device assignment are not public API: this function is the only user.
    """
    pairs = dict(zip((d.id for d in source.devices.flat), target.devices.flat, strict=True))
    client = target.devices.flat[0].client
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(pairs)
    options.executable_build_options.use_spmd_partitioning = True
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in target.devices.flat]]))

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid):
            kind, *content = pid
            if kind == "exec":
                devices = xla_client.DeviceList(tuple(target.devices.flat))
                return client.deserialize_executable(content[0], executable_devices=devices, compile_options=options)
            return client if kind == "client" else pairs[content[0]]

    try:
        serialized, in_tree, out_tree = serialize_executable.serialize(compiled)
        unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(serialized)).load()
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
    except (AttributeError, TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None
