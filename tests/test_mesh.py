"""Sub-meshes, reassignment, and views and stacks that share buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax.config import MeshConfig, ModelConfig
from mecefo_jax.errors import ConfigError
from mecefo_jax.mesh import live_mesh, make_cluster, partition_specs, reassign, shardings, stack, views
from mecefo_jax.model import Model, init_model
from mecefo_jax.takeover import make_plan


def buffers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@given(st.integers(1, 24), st.integers(1, 8))
def test_every_node_has_a_submesh_and_every_submesh_a_node(num_nodes, num_submeshes):
    num_submeshes = min(num_submeshes, num_nodes)
    cluster = make_cluster(MeshConfig(num_nodes=num_nodes, num_submeshes=num_submeshes))
    hosts = [cluster.submesh_of(node) for node in range(num_nodes)]
    assert hosts == sorted(hosts) and set(hosts) == set(range(num_submeshes))
    assert max(np.bincount(hosts)) == cluster.nodes_per_submesh


def test_submeshes_share_no_device():
    cluster = make_cluster(MeshConfig(num_nodes=2, fsdp=2, tensor=2))
    assert [mesh.shape for mesh in cluster.submeshes] == [{"fsdp": 2, "tensor": 2}] * 2
    assert len({device for mesh in cluster.submeshes for device in mesh.devices.flat}) == 8


def test_more_devices_than_there_are_is_refused_with_both_counts():
    with pytest.raises(ConfigError, match=r"16 devices, got 8.*num_submeshes"):
        make_cluster(MeshConfig(num_nodes=16))


@given(st.data())
def test_reassignment_gives_each_microbatch_to_one_live_submesh(data):
    num_nodes = data.draw(st.integers(1, 12))
    cluster = make_cluster(MeshConfig(num_nodes=num_nodes, num_submeshes=data.draw(st.integers(1, min(8, num_nodes)))))
    live = np.array(data.draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)))
    live[data.draw(st.integers(0, num_nodes - 1))] = True
    policy = data.draw(st.sampled_from(["neighbor", "reroute", "balanced"]))
    plan = make_plan(live[:, None], policy, microbatches_per_node=3, degraded_costs=[0.5], slack=0.0)
    work = reassign(cluster, plan)
    assert set(work) == {cluster.submesh_of(node) for node in np.flatnonzero(live)}
    ids = np.concatenate([np.concatenate([share.exact, share.degraded]) for share in work.values()])
    assert sorted(ids) == list(range(3 * num_nodes))
    degraded = np.concatenate([share.degraded for share in work.values()])
    assert set(degraded) == set(plan.degraded)


def test_stack_and_views_share_buffers():
    cluster = make_cluster(MeshConfig(num_nodes=4, fsdp=1, tensor=2))
    parts = [
        jax.device_put(jnp.full((1, 3, 4), i, jnp.float32), NamedSharding(mesh, P(None, None, "tensor")))
        for i, mesh in enumerate(cluster.submeshes)
    ]
    live = [0, 1, 3]
    mesh = live_mesh(cluster, live)
    stacked = stack([{"a": parts[i]} for i in live], mesh)["a"]
    assert stacked.shape == (3, 3, 4) and stacked.sharding.spec == P("data", None, "tensor")
    np.testing.assert_array_equal(np.asarray(stacked)[:, 0, 0], live)
    assert buffers(stacked) == set().union(*(buffers(parts[i]) for i in live))

    replicated = jax.device_put(jnp.arange(8.0).reshape(2, 4), NamedSharding(mesh, P(None, "tensor")))
    own = views({"a": replicated}, [cluster.submeshes[i] for i in live])
    assert set().union(*(buffers(view["a"]) for view in own)) == buffers(replicated)
    for view, i in zip(own, live, strict=True):
        np.testing.assert_array_equal(view["a"], replicated)
        assert view["a"].sharding.mesh == cluster.submeshes[i]


def test_every_matrix_is_sharded_over_both_axes():
    config = ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=4, num_kv_heads=2)
    shapes = jax.eval_shape(lambda: init_model(config, 64, 0))
    for path, spec in jax.tree_util.tree_leaves_with_path(
        partition_specs(shapes), is_leaf=lambda leaf: isinstance(leaf, P)
    ):
        name = jax.tree_util.keystr(path)
        assert {axis for axis in spec if axis} == (set() if "norm" in name else {"fsdp", "tensor"}), name


def test_shardings_place_a_model():
    config = ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=4)
    mesh = make_cluster(MeshConfig(num_nodes=1, fsdp=2, tensor=2)).submeshes[0]
    model = init_model(config, 64, 0)
    placed = jax.device_put(model, shardings(mesh, model))
    assert isinstance(placed, Model)
    assert placed.blocks.feed_forward.down.kernel[...].addressable_shards[0].data.shape == (2, 12, 8)
