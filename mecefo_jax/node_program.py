"""A program that every node runs on its own devices, compiled once for all of them.

XLA ties an executable to devices. Where nodes are emulated in one process, compiling once a node would dominate the
start of a run; so the executable is compiled for the first sub-mesh and moved to the others.
"""

import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jaxtyping import PyTree

from mecefo_jax.mesh import shardings


@dataclasses.dataclass(frozen=True)
class Flat:
    """A tree taken apart once: walking through a tree of NNX modules takes longer than to call a small program."""

    leaves: list[Any]
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, tree: PyTree) -> Self:
        """Take a tree apart."""
        return cls(*jax.tree.flatten(tree))

    @property
    def tree(self) -> PyTree:
        """The tree."""
        return jax.tree.unflatten(self.structure, self.leaves)


@dataclasses.dataclass
class NodeProgram:
    """``function`` on each sub-mesh. Compiled at the first call on any of them, and never again for other shapes.

    Attributes:
        function: pure, from trees to a tree.
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
    _result: jax.tree_util.PyTreeDef | None = None

    def __call__(self, submesh: int, *args: Flat) -> Flat:
        """Run on sub-mesh number ``submesh``, where the arguments lie; returns without waiting for the result."""
        executable = self._executables.get(submesh)
        if executable is None:
            executable = self._executables[submesh] = self._prepare(submesh, args)
        assert self._result is not None
        return Flat(executable(*(arg.leaves for arg in args)), self._result)

    def compile(self, submesh: int, *args: Flat) -> None:
        """Compile ahead of need, for arguments of which only shapes, dtypes and shardings matter."""
        if submesh not in self._executables:
            self._executables[submesh] = self._prepare(submesh, args)

    def _prepare(self, submesh: int, args: Sequence[Flat]) -> jax.stages.Compiled:
        if self._origin is not None:
            moved = move_executable(
                self._executables[self._origin], self.submeshes[self._origin], self.submeshes[submesh]
            )
            if moved is not None:
                return moved
        else:
            self._origin = submesh
        self.compilations += 1
        return self._compile(self.submeshes[submesh], args)

    def _compile(self, mesh: Mesh, args: Sequence[Flat]) -> jax.stages.Compiled:
        structures = [arg.structure for arg in args]

        def on_leaves(*leaves: list[jax.Array]) -> list[jax.Array]:
            return jax.tree.leaves(self.function(*map(jax.tree.unflatten, structures, leaves)))

        with jax.set_mesh(mesh):
            result = jax.eval_shape(self.function, *(arg.tree for arg in args))
            self._result = jax.tree.structure(result)
            out = jax.tree.leaves(shardings(mesh, result))
            jitted = jax.jit(on_leaves, donate_argnums=self.donate, out_shardings=out)
            return jitted.lower(*(arg.leaves for arg in args)).compile()


def move_executable(compiled: jax.stages.Compiled, source: Mesh, target: Mesh) -> jax.stages.Compiled | None:
    """The executable of ``source`` for the devices of ``target``, or None where the backend cannot do that.

    JAX serializes executables but loads them for the devices they were compiled for alone. Its format names devices by
    id through pickle's persistent ids, so this reads it with the target's devices in their places. What it uses of
    jaxlib (the options' device assignment, ``deserialize_executable``) and the constructor of ``Compiled`` are not
    public API; they are used here alone.
    """
    try:
        return _moved(compiled, source, target)
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def _moved(compiled: jax.stages.Compiled, source: Mesh, target: Mesh) -> jax.stages.Compiled:
    from jaxlib import xla_client

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

    serialized, in_tree, out_tree = serialize_executable.serialize(compiled)
    unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(serialized)).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
