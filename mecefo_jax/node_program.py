"""A program that every node runs on its own devices, compiled once for all of them.

XLA ties an executable to devices. Where nodes are emulated in one process, compiling once a node would dominate the
start of a run; so the executable is compiled for the first sub-mesh and moved to the others.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from jaxtyping import PyTree

from mecefo_jax.executables import ExecutableStore, Portable
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
        store: where executables are looked for before compiling, and kept after it.
        compilations: executables compiled so far.
    """

    function: Callable[..., Any]
    submeshes: Sequence[Mesh]
    donate: tuple[int, ...] = ()
    store: ExecutableStore | None = None
    compilations: int = 0
    _executables: dict[int, jax.stages.Compiled] = dataclasses.field(default_factory=dict)
    _portable: Portable | None = None
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
        moved = None if self._portable is None else self._portable.on(self.submeshes[submesh])
        return self._compile(self.submeshes[submesh], args) if moved is None else moved

    def _compile(self, mesh: Mesh, args: Sequence[Flat]) -> jax.stages.Compiled:
        with jax.set_mesh(mesh):
            traced = jax.jit(self.function).trace(*(arg.tree for arg in args))
            self._result = jax.tree.structure(traced.out_info)
            out = jax.tree.leaves(shardings(mesh, traced.out_info))
            of_leaves = jaxpr_as_fun(traced.jaxpr)  # tracing the function once more would take as long again
            jitted = jax.jit(
                lambda *args: of_leaves(*itertools.chain(*args)), donate_argnums=self.donate, out_shardings=out
            )
            lowered = jitted.lower(*(arg.leaves for arg in args))
            if self.store is not None:
                found = self.store.load_or_compile(lowered, mesh)
                self._portable = found.portable
                self.compilations += found.is_new
                return found.compiled
            self.compilations += 1
            compiled = lowered.compile()
            if self._portable is None and len(self.submeshes) > 1:
                self._portable = Portable.of(compiled, mesh)
            return compiled
