"""Nodes as groups of devices: sub-meshes, shardings, and the reassignment of work to the live nodes.

A sub-mesh is a mesh ``(fsdp, tensor)`` that hosts one node, or several where the machine has fewer groups of devices
than the run has nodes. Everything of a node lives on its sub-mesh: its copy of the train state, its microbatches, its
sums. Only the reduction spans sub-meshes, on the mesh ``(data, fsdp, tensor)`` of those with a live node; arrays pass
between the two worlds as views of the same buffers, without copies.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from mecefo_jax.config import MeshConfig, check_devices
from mecefo_jax.takeover import Plan

# Path of a leaf -> how its trailing axes are sharded. Leading axes (layers) are whole. The same rules serve parameters,
# gradients and moments, whose paths end alike.
_RULES = (
    (r"\.vectors\[", P(None, ("fsdp", "tensor"))),  # packed trees (processes/interconnect.py)
    (r"\.bases.*\.(down|out)\.", P("tensor", None)),
    (r"\.bases.*\.(feed_forward|attention)\.", P("fsdp", None)),
    (r"\.embedding", P("tensor", "fsdp")),
    (r"\.(attention\.out|feed_forward\.down)\.", P("tensor", "fsdp")),
    (r"\.(attention|feed_forward|head)\.", P("fsdp", "tensor")),
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The sub-meshes of this run, and which nodes each hosts."""

    submeshes: tuple[Mesh, ...]
    num_nodes: int

    def submesh_of(self, node: int) -> int:
        """Index of the sub-mesh that hosts a node: nodes are spread in contiguous ranges."""
        return node * len(self.submeshes) // self.num_nodes

    @property
    def nodes_per_submesh(self) -> int:
        """Most nodes that share a sub-mesh."""
        return -(-self.num_nodes // len(self.submeshes))


@dataclasses.dataclass(frozen=True)
class Work:
    """What one sub-mesh computes in a step: microbatch ids, the exact ones and the degraded ones."""

    exact: np.ndarray
    degraded: np.ndarray


def make_cluster(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Cluster:
    """Group devices into sub-meshes.

    Args:
        config: how many nodes and sub-meshes, and their shape.
        devices: devices to use, in order; None: all of this process.

    Raises:
        ConfigError: more devices are needed than there are.
    """
    devices = jax.local_devices() if devices is None else list(devices)
    check_devices(config, len(devices))
    shape = (config.submesh_count, config.fsdp, config.tensor)
    grid = np.array(devices[: int(np.prod(shape))]).reshape(shape)
    return Cluster(tuple(Mesh(group, ("fsdp", "tensor")) for group in grid), config.num_nodes)


def reassign(cluster: Cluster, plan: Plan) -> dict[int, Work]:
    """The work of every sub-mesh that hosts a live node; the others are left out."""
    live_nodes = np.flatnonzero(plan.live_NS.any(axis=1))
    shares: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for node in live_nodes:
        shares.setdefault(cluster.submesh_of(int(node)), []).append(plan.microbatches_of(int(node)))
    return {
        submesh: Work(np.concatenate([exact for exact, _ in parts]), np.concatenate([low for _, low in parts]))
        for submesh, parts in sorted(shares.items())
    }


def live_mesh(cluster: Cluster, submeshes: Sequence[int]) -> Mesh:
    """The mesh ``(data, fsdp, tensor)`` over the given sub-meshes."""
    return Mesh(np.stack([cluster.submeshes[i].devices for i in submeshes]), ("data", "fsdp", "tensor"))


def partition_specs(tree: PyTree) -> PyTree[PartitionSpec]:
    """How each leaf of a tree of parameters, gradients, moments or bases is sharded inside a node."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path)
        for pattern, trailing in _RULES:
            if re.search(pattern, name) and leaf.ndim >= len(trailing):
                return P(*[None] * (leaf.ndim - len(trailing)), *trailing)
        return P()

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(mesh: Mesh, tree: PyTree) -> PyTree[NamedSharding]:
    """``partition_specs`` on a sub-mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(tree), is_leaf=_is_spec)


def stack(parts: Sequence[PyTree], mesh: Mesh) -> PyTree:
    """One global array from the sub-meshes' arrays, leaf by leaf, without copies.

    Args:
        parts: a tree a sub-mesh of ``mesh`` that this process can address, in order; leaves ``[1, ...]``.
        mesh: the ``live_mesh`` of all.

    Returns:
        Leaves ``[sub-meshes, ...]``, the leading axis sharded over ``data``, the others as in the parts.
    """

    def stack_leaf(*leaves: jax.Array) -> jax.Array:
        sharding = NamedSharding(mesh, P("data", *spec_of(leaves[0])[1:]))
        buffers = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
        shape = (mesh.shape["data"], *leaves[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, buffers)

    return jax.tree.map(stack_leaf, *parts)


def views(tree: PyTree, submeshes: Sequence[Mesh]) -> list[PyTree]:
    """Each sub-mesh's copy of a global tree that is replicated over ``data``, without copying."""
    leaves, structure = jax.tree.flatten(tree)
    per_submesh: list[list[jax.Array]] = [[] for _ in submeshes]
    for leaf in leaves:
        buffers = {shard.device: shard.data for shard in leaf.addressable_shards}
        for views_of_one, submesh in zip(per_submesh, submeshes, strict=True):
            sharding = NamedSharding(submesh, spec_of(leaf))
            own = [buffers[device] for device in submesh.devices.flat]
            views_of_one.append(jax.make_array_from_single_device_arrays(leaf.shape, sharding, own))
    return [jax.tree.unflatten(structure, views_of_one) for views_of_one in per_submesh]


def spec_of(array: jax.Array) -> PartitionSpec:
    """How an array is sharded over the mesh that it lies on."""
    assert isinstance(array.sharding, NamedSharding), array.sharding
    return array.sharding.spec


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)
