"""Packed trees, sums over cliques of emulated processes, and arrangements that never come twice."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax.config import MeshConfig
from mecefo_jax.errors import RestartInPlaceError
from mecefo_jax.executables import Portable
from mecefo_jax.mesh import shardings
from mecefo_jax.processes import interconnect
from mecefo_jax.processes.interconnect import (
    Interconnect,
    Packed,
    arrangement,
    as_words,
    capacity,
    from_words,
    make_exchange,
    pack,
    unpack,
)
from mecefo_jax.state import init_state
from tests.tiny import VOCAB, assert_trees_equal, tiny_config


def sub_mesh(fsdp: int, tensor: int, start: int = 0) -> Mesh:
    devices = np.array(jax.devices()[start : start + fsdp * tensor])
    return Mesh(devices.reshape(fsdp, tensor), ("fsdp", "tensor"))


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 2)])
def test_a_state_comes_back_from_its_bits(fsdp, tensor):
    mesh = sub_mesh(fsdp, tensor)
    state = init_state(tiny_config(), VOCAB)
    state = jax.tree.map(lambda leaf: -leaf, state)  # negative zeros, which a sum with 0.0 would lose
    state = jax.device_put(state, shardings(mesh, state))
    like = jax.eval_shape(lambda: state)
    with jax.set_mesh(mesh):
        words = jax.jit(lambda state: pack(as_words(state)))(state)
        back = jax.jit(lambda words: from_words(unpack(words, jax.eval_shape(as_words, like)), like))(words)
    assert set(words.vectors) == {"uint32"}
    assert any((np.signbit(leaf) & (leaf == 0)).any() for leaf in map(np.asarray, jax.tree.leaves(back)) if leaf.ndim)
    assert_trees_equal(state, back)


@pytest.mark.parametrize(("count", "fsdp"), [(2, 1), (3, 1), (4, 2)])
def test_the_sum_over_a_clique_is_that_of_its_processes_in_their_order(count, fsdp):
    order = list(np.random.default_rng(0).permutation(count))
    grid = np.array(jax.devices()[: count * fsdp]).reshape(count, fsdp, 1)[order]
    mesh = Mesh(grid, ("data", "fsdp", "tensor"))
    places = [[order.index(process) for process in range(count)]] * count
    values = np.random.default_rng(1).normal(size=(count, 7 * fsdp)).astype(np.float32)
    counts = np.arange(count * 2 * fsdp, dtype=np.int32).reshape(count, -1)
    sharding = NamedSharding(mesh, P("data", ("fsdp", "tensor")))
    packed = Packed(
        {"float32": jax.device_put(values[order], sharding), "int32": jax.device_put(counts[order], sharding)}
    )
    total = make_exchange(mesh)(packed, jnp.array(places, jnp.int32))
    expected = values[0]
    for row in values[1:]:
        expected = expected + row
    for shard in total.vectors["float32"].addressable_shards:  # on every device, bit for bit
        np.testing.assert_array_equal(np.asarray(shard.data)[0], expected[shard.index[1]])
    np.testing.assert_array_equal(total.vectors["int32"][0], counts.sum(axis=0))


def test_an_exchange_moved_to_other_devices_in_another_order_sums_the_same():
    grid = np.array(jax.devices()[:6]).reshape(2, 3, 1, 1)
    values = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    meshes = [Mesh(part, ("data", "fsdp", "tensor")) for part in (grid[0], grid[1][::-1])]

    def arguments(mesh: Mesh, places: list[int]):
        sharding = NamedSharding(mesh, P("data", ("fsdp", "tensor")))
        rows = np.empty_like(values)
        rows[places] = values
        return Packed({"float32": jax.device_put(rows, sharding)}), jax.device_put(
            np.array([places] * 3, np.int32), NamedSharding(mesh, P("data"))
        )

    compiled = make_exchange(meshes[0]).lower(*arguments(meshes[0], [0, 1, 2])).compile()
    portable = Portable.of(compiled, meshes[0])
    assert portable is not None
    moved = portable.on(meshes[1])
    totals = [compiled(*arguments(meshes[0], [0, 1, 2])), moved(*arguments(meshes[1], [2, 0, 1]))]
    for total, mesh in zip(totals, meshes, strict=True):
        assert total.vectors["float32"].devices() == set(mesh.devices.flat)
        np.testing.assert_array_equal(total.vectors["float32"][0], (values[0] + values[1]) + values[2])


def test_words_of_one_process_survive_a_sum_with_zeros():
    mesh = Mesh(np.array(jax.devices()[:3]).reshape(3, 1, 1), ("data", "fsdp", "tensor"))
    words = np.array([0x80000000, 0x7FC00001, 0xFFFFFFFF, 1], np.uint32)
    rows = np.stack([np.zeros_like(words), words, np.zeros_like(words)])
    packed = Packed({"uint32": jax.device_put(rows, NamedSharding(mesh, P("data", ("fsdp", "tensor"))))})
    total = make_exchange(mesh)(packed, jnp.array([[0, 1, 2]] * 3, jnp.int32))
    np.testing.assert_array_equal(total.vectors["uint32"][0], words)


@pytest.mark.parametrize(("count", "lanes"), [(2, 3), (3, 2), (2, 1)])
def test_no_arrangement_comes_twice(count, lanes):
    processes = range(5, 5 + count)
    seen = set()
    for epoch in range(capacity(count, lanes)):
        order, lane = arrangement(epoch, processes, lanes)
        assert sorted(order) == list(processes)
        seen.add(tuple((process, lane[process]) for process in order))
    assert len(seen) == capacity(count, lanes)
    with pytest.raises(RestartInPlaceError, match="no unused order"):
        arrangement(capacity(count, lanes), processes, lanes)


@given(st.integers(0, 10**6), st.permutations(range(1, 9)))
def test_an_arrangement_depends_on_who_takes_part_and_not_on_who_asks(epoch, processes):
    assert arrangement(epoch, processes, 16) == arrangement(epoch, sorted(processes), 16)


def test_neighbouring_epochs_differ_in_their_order():
    orders = [tuple(arrangement(epoch, range(4), 16)[0]) for epoch in range(24)]
    assert set(orders) == set(itertools.permutations(range(4)))


def test_dtypes_are_packed_apart():
    tree = {"a": jnp.arange(3, dtype=jnp.float32), "b": jnp.int32(7), "c": jnp.ones((2, 2), jnp.float32)}
    with jax.set_mesh(sub_mesh(1, 1)):
        packed = jax.jit(pack)(tree)
        back = jax.jit(lambda packed: unpack(packed, tree))(packed)
    assert {dtype: vector.shape for dtype, vector in packed.vectors.items()} == {"float32": (1, 7), "int32": (1, 1)}
    assert_trees_equal(tree, back)


class Lonely:
    """A runtime of this process, whose fellow never comes."""

    process = 1

    def __init__(self) -> None:
        self.given_up: list = []

    def devices_of(self, process: int) -> list[jax.Device]:
        return jax.devices()[2 * process - 2 : 2 * process]

    def give_up_connecting(self, cliques) -> None:
        self.given_up.append(cliques)


def test_who_connects_to_the_dead_gives_up_and_then_ends(monkeypatch):
    ended, runtime = threading.Event(), Lonely()
    monkeypatch.setattr(interconnect, "_end_stuck", ended.set)
    monkeypatch.setattr(interconnect, "LANES", 2)
    links = Interconnect(runtime, MeshConfig(num_nodes=2), patience=0.1)
    clique = links.clique(0, (1, 2))
    with links._connecting(clique):
        assert ended.wait(30)
    assert runtime.given_up == [[list(clique.mesh.devices.flat)]]
    ended.clear()
    with links._connecting(clique):  # it is connected now: its reductions may take as long as they do
        assert not ended.wait(1.5)
    assert len(runtime.given_up) == 1
