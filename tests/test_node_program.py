"""One compilation for all sub-meshes, the same results on each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax import executables
from mecefo_jax.config import MeshConfig
from mecefo_jax.mesh import make_cluster
from mecefo_jax.node_program import Flat, NodeProgram


def placed(mesh, x, trips=None):
    arrays = [jax.device_put(x, NamedSharding(mesh, P("fsdp")))]
    arrays += [] if trips is None else [jax.device_put(trips, NamedSharding(mesh, P()))]
    return map(Flat.of, arrays)


def powers(x, trips):
    """A loop with a dynamic trip count and a collective inside."""
    return jax.lax.fori_loop(0, trips, lambda _, total: total + jnp.sum(total) * jnp.ones_like(total), x)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_compiles_once_and_computes_on_every_submesh(fsdp):
    cluster = make_cluster(MeshConfig(num_nodes=4, fsdp=fsdp))
    program = NodeProgram(powers, cluster.submeshes)
    for index, mesh in enumerate(cluster.submeshes):
        for trips in (0, 1, 3):
            x = np.arange(4, dtype=np.float32) + index
            result = program(index, *placed(mesh, x, np.int32(trips))).tree
            np.testing.assert_allclose(result, powers(jnp.asarray(x), trips))
            assert result.devices() == set(mesh.devices.flat)
    assert program.compilations == 1


def test_moved_programs_still_donate():
    cluster = make_cluster(MeshConfig(num_nodes=2))
    program = NodeProgram(lambda x: x + 1, cluster.submeshes, donate=(0,))
    for index, mesh in enumerate(cluster.submeshes):
        (x,) = placed(mesh, np.zeros(1000, np.float32))
        np.testing.assert_array_equal(program(index, x).tree, np.ones(1000))
        assert x.tree.is_deleted()


def test_compiles_for_each_submesh_where_executables_cannot_be_moved(monkeypatch):
    monkeypatch.setattr(executables.Portable, "of", lambda *_: None)
    cluster = make_cluster(MeshConfig(num_nodes=3))
    program = NodeProgram(powers, cluster.submeshes)
    for index, mesh in enumerate(cluster.submeshes):
        np.testing.assert_allclose(program(index, *placed(mesh, np.ones(2, np.float32), np.int32(2))).tree, 9.0)
    assert program.compilations == 3


def test_another_shape_is_refused_instead_of_compiled():
    cluster = make_cluster(MeshConfig(num_nodes=1))
    program = NodeProgram(lambda x: x * 2, cluster.submeshes)
    program(0, *placed(cluster.submeshes[0], np.ones(2, np.float32)))
    with pytest.raises(TypeError):
        program(0, *placed(cluster.submeshes[0], np.ones(3, np.float32)))
    assert program.compilations == 1
