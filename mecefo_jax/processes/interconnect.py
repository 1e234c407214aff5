"""Sums over processes: packed trees, two exchanges, and communicators that are never used twice.

A tree is packed into one vector a dtype, so that a reduction is one or two exchanges whatever the model, and compiles
in some hundredths of a second. Packing happens on each device for its own shards.

A sum is two all-to-alls: each process adds up one part of the vectors, and sends it to all. It moves as many bytes as
a ring does; but everybody listens to everybody, so that all notice at once when one dies in the midst of it. In
gloo's ring (``psum``) only its neighbours do, and the others wait for a time-out. And the order of the sum is that of
the processes.

On CPU, gloo's communicators are kept for ever under the ordered list of their devices. One in which a process died,
or a time-out struck, is broken, and so is the list. Hence every epoch takes another list: another order of the
processes, and another lane (set of devices) of each. ``capacity`` says how many there are; then all processes start
again. The executable is compiled once for a number of processes, and moved to every other list.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from mecefo_jax.config import MeshConfig
from mecefo_jax.errors import RestartInPlaceError, StalledError
from mecefo_jax.executables import ExecutableStore, Portable
from mecefo_jax.mesh import partition_specs, stack, views
from mecefo_jax.processes.runtime import LANES, Runtime, node_mesh

# With more processes than this, making ready for every death costs more than it saves.
_MOST_EXPECTED = 16
_PACKED = P(None, ("fsdp", "tensor"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree as vectors, ``[1, K]`` each, sharded over the devices of the node."""

    vectors: dict[str, Any]
    """By dtype."""


def pack(tree: PyTree) -> Packed:
    """Pack a tree on the sub-mesh in force (``jax.set_mesh``); each device packs its shards."""

    def local(tree: PyTree) -> dict[str, Array]:
        return {dtype: jnp.concatenate([leaf.ravel() for leaf in leaves])[None] for dtype, leaves in _by_dtype(tree)}

    out = {dtype: _PACKED for dtype, _ in _by_dtype(tree)}
    return Packed(jax.shard_map(local, in_specs=(partition_specs(tree),), out_specs=out)(tree))


def unpack(packed: Packed, like: PyTree) -> PyTree:
    """The tree that was packed.

    Args:
        packed: vectors.
        like: tree of the shapes and dtypes that were packed; values do not matter.
    """
    specs = partition_specs(like)
    structure = jax.tree.structure(like)
    mesh = jax.sharding.get_abstract_mesh()
    shapes = [
        NamedSharding(mesh, spec).shard_shape(leaf.shape)
        for leaf, spec in zip(jax.tree.leaves(like), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
    ]
    dtypes = [np.dtype(leaf.dtype).name for leaf in jax.tree.leaves(like)]

    def local(vectors: dict[str, Array]) -> PyTree:
        taken = dict.fromkeys(vectors, 0)
        leaves = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            start, size = taken[dtype], math.prod(shape)
            leaves.append(vectors[dtype][0, start : start + size].reshape(shape))
            taken[dtype] += size
        return jax.tree.unflatten(structure, leaves)

    in_specs = ({dtype: _PACKED for dtype in packed.vectors},)
    # A leaf that is whole on every device was packed by each; that these agree is not visible to the type checker.
    return jax.shard_map(local, in_specs=in_specs, out_specs=specs, check_vma=False)(packed.vectors)


def as_words(tree: PyTree) -> PyTree:
    """A tree's bits as unsigned integers: sums with zeros leave these as they are, which is not so for ``-0.0``."""

    def words(leaf: Array) -> Array:
        assert leaf.dtype.itemsize == 4, leaf.dtype
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)

    return jax.tree.map(words, tree)


def from_words(words: PyTree, like: PyTree) -> PyTree:
    """The tree with these bits and the dtypes of ``like``."""
    return jax.tree.map(lambda word, leaf: jax.lax.bitcast_convert_type(word, leaf.dtype), words, like)


@dataclasses.dataclass(frozen=True)
class Clique:
    """Devices that reduce together: one lane of each process, in an order."""

    mesh: Mesh
    """``(data, fsdp, tensor)``, an index along ``data`` a process."""
    own: Mesh
    """This process's part, ``(fsdp, tensor)``."""
    order: tuple[int, ...]
    """Places along ``data``, in the order of the processes' numbers."""


class Interconnect:
    """The reductions of one process with others."""

    def __init__(
        self, runtime: Runtime, mesh: MeshConfig, patience: float, store: ExecutableStore | None = None
    ) -> None:
        """For nodes of the given shape.

        Args:
            runtime: connected.
            mesh: shape of the nodes.
            patience: seconds that the set-up of a communicator may take.
            store: where executables are looked for before compiling.
        """
        self._patience, self._connected, self._store = patience, set[Mesh](), store
        self._runtime, self._shape = runtime, (mesh.fsdp, mesh.tensor)
        self._home = node_mesh(runtime.devices_of(runtime.process), *self._shape)
        self._reductions: dict[Any, jax.stages.Compiled] = {}
        self._portables: dict[Any, Portable | None] = {}
        self._lock = threading.Lock()
        self._beside = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="interconnect")
        self._expecting: concurrent.futures.Future[Any] | None = None

    def clique(self, epoch: int, processes: Sequence[int]) -> Clique:
        """The devices that the processes use in an epoch: no other epoch uses the same, in the same order.

        Raises:
            RestartInPlaceError: there is no such list left.
        """
        if len(processes) == 1 or jax.default_backend() != "cpu":  # NCCL's communicators know lives by themselves
            order, lanes = sorted(processes), dict.fromkeys(processes, 0)
        else:
            order, lanes = arrangement(epoch, processes, LANES)
        parts = {
            process: node_mesh(self._runtime.devices_of(process), *self._shape, lane=lanes[process])
            for process in order
        }
        grid = np.stack([parts[process].devices for process in order])
        places = tuple(order.index(process) for process in sorted(processes))
        return Clique(Mesh(grid, ("data", "fsdp", "tensor")), parts[self._runtime.process], places)

    def expect_a_death(self, epoch: int, processes: Sequence[int], like: Packed) -> None:
        """Make ready, beside what else is going on, for the next epoch without any one of the others."""
        if len(processes) > _MOST_EXPECTED:
            return
        others = [process for process in processes if process != self._runtime.process]
        groups = [tuple(process for process in processes if process != other) for other in others]
        if self._expecting is not None:
            self._expecting.cancel()
        self._expecting = self._beside.submit(self._compile_all, epoch + 1, groups, like)

    def _compile_all(self, epoch: int, groups: Sequence[Sequence[int]], like: Packed) -> None:
        for group in groups:
            self.compile(epoch, group, like)

    def compile(self, epoch: int, processes: Sequence[int], like: Packed) -> None:
        """Make a reduction ready ahead of need; ``like`` has its shapes."""
        if len(processes) > 1 and epoch < capacity(len(processes), LANES):
            self._reduction(epoch, self.clique(epoch, processes), like)

    def total(self, packed: Packed, epoch: int, processes: Sequence[int]) -> Packed:
        """The sum over processes that all call this alike; waits for it.

        The argument stays valid, so that a sum that fails can be tried again with others.

        Raises:
            jax.errors.JaxRuntimeError: a process died or did not come in time.
        """
        if len(processes) == 1:
            return packed
        clique = self.clique(epoch, processes)
        reduction = self._reduction(epoch, clique, packed)
        there = jax.device_put(packed, NamedSharding(clique.own, _PACKED))
        order = jax.device_put(np.array([clique.order], np.int32), NamedSharding(clique.own, P()))
        with self._connecting(clique):
            (back,) = views(reduction(*stack([(there, order)], clique.mesh)), [clique.own])
            result = jax.device_put(back, NamedSharding(self._home, _PACKED))
            return jax.block_until_ready(result)

    @contextlib.contextmanager
    def _connecting(self, clique: Clique) -> Iterator[None]:
        """For the first use of a clique, in which its processes find each other, or not.

        Gloo waits for the address of a process that died for 30 s, which can be helped; and for its connection for more
        than a minute, which cannot: then this process ends, so that the others need not wait for it.
        """
        if clique.mesh in self._connected or jax.default_backend() != "cpu":
            yield
            return
        size = self._shape[0] * self._shape[1]
        columns = clique.mesh.devices.reshape(-1, size).T.tolist()
        timers = (
            threading.Timer(self._patience, self._runtime.give_up_connecting, args=(columns,)),
            threading.Timer(2 * self._patience + 1, _end_stuck),
        )
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            yield
            self._connected.add(clique.mesh)
        finally:
            for timer in timers:
                timer.cancel()

    def forget_before(self, epoch: int) -> None:
        """Drop what belongs to earlier epochs."""
        with self._lock:
            self._reductions = {key: kept for key, kept in self._reductions.items() if key[0] >= epoch}

    def _reduction(self, epoch: int, clique: Clique, like: Packed) -> jax.stages.Compiled:
        shapes = tuple((dtype, vector.shape[1]) for dtype, vector in sorted(like.vectors.items()))
        key = (epoch, clique.mesh, shapes)
        with self._lock:
            if key not in self._reductions:
                self._reductions[key] = self._ready(clique.mesh, shapes)
            return self._reductions[key]

    def _ready(self, mesh: Mesh, shapes: Sequence[tuple[str, int]]) -> jax.stages.Compiled:
        """The exchange on a mesh: an executable for as many other devices, moved; else one from the store."""
        count = mesh.shape["data"]
        portable = self._portables.get((count, shapes))
        moved = None if portable is None else portable.on(mesh)
        if moved is not None:
            return moved
        sharding = NamedSharding(mesh, P("data", *_PACKED[1:]))
        vectors = {dtype: jax.ShapeDtypeStruct((count, size), dtype, sharding=sharding) for dtype, size in shapes}
        orders = jax.ShapeDtypeStruct((count, count), np.int32, sharding=NamedSharding(mesh, P("data")))
        lowered = make_exchange(mesh).lower(Packed(vectors), orders)
        if self._store is None:
            compiled = lowered.compile()
            self._portables[count, shapes] = Portable.of(compiled, mesh)
            return compiled
        found = self._store.load_or_compile(lowered, mesh)
        self._portables[count, shapes] = found.portable
        return found.compiled


def _end_stuck() -> None:
    print(
        "stuck in connecting to others, one of which has died: this process starts again", file=sys.stderr, flush=True
    )
    os._exit(StalledError.exit_code)


def make_exchange(mesh: Mesh) -> jax.stages.Wrapped:
    """The sum over the processes of a mesh ``(data, fsdp, tensor)``, in which all of them take part alike.

    It is called with vectors ``[processes, K]``, and with the order ``[processes, processes]`` (each process says the
    same) in which they are added: places along ``data``. All processes get the sum, ``[1, K]``.
    """
    count = mesh.shape["data"]

    def total(vector: Array, order: Array) -> Array:
        size = vector.shape[1]
        part = -(-size // count)
        parts = jnp.pad(vector[0], (0, count * part - size)).reshape(count, part)
        rows = jax.lax.all_to_all(parts, "data", 0, 0, tiled=True)  # everybody's version of this process's part
        summed = functools.reduce(jnp.add, (rows[order[0, place]] for place in range(count)))
        whole = jax.lax.all_to_all(jnp.broadcast_to(summed, (count, part)), "data", 0, 0, tiled=True)
        return whole.reshape(1, -1)[:, :size]

    def exchange(packed: Packed, order: Array) -> Packed:
        summed = Packed(dict.fromkeys(packed.vectors, _PACKED))
        # That all processes get the same is not visible to the type checker.
        return jax.shard_map(
            lambda packed, order: jax.tree.map(lambda vector: total(vector, order), packed),
            mesh=mesh,
            in_specs=(P("data", *_PACKED[1:]), P("data")),
            out_specs=summed,
            check_vma=False,
        )(packed, order)

    return jax.jit(exchange)


def arrangement(epoch: int, processes: Sequence[int], num_lanes: int) -> tuple[list[int], dict[int, int]]:
    """An order of the processes and a lane of each, different for every epoch below ``capacity``.

    Raises:
        RestartInPlaceError: all have been used.
    """
    count = len(processes)
    if epoch >= capacity(count, num_lanes):
        raise RestartInPlaceError(
            f"gloo has no unused order of {count} processes left after {epoch} changes of membership; all start again"
        )
    rest, index = divmod(epoch, math.factorial(count))
    remaining, order = sorted(processes), []
    for size in range(count, 0, -1):  # the index-th permutation
        position, index = divmod(index, math.factorial(size - 1))
        order.append(remaining.pop(position))
    lanes = {}
    for process in order:
        rest, lanes[process] = divmod(rest, num_lanes)
    return order, lanes


def capacity(num_processes: int, num_lanes: int) -> int:
    """How many arrangements there are."""
    return math.factorial(num_processes) * num_lanes**num_processes


def _by_dtype(tree: PyTree) -> list[tuple[str, list[Any]]]:
    """The leaves of each dtype, in the order of the tree."""
    leaves = sorted(jax.tree.leaves(tree), key=lambda leaf: np.dtype(leaf.dtype).name)  # stable
    return [(name, list(group)) for name, group in itertools.groupby(leaves, lambda leaf: np.dtype(leaf.dtype).name)]


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, P)
