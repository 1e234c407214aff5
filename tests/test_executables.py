"""The store of executables: what was kept is found, what could have been tampered with is not used."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax.executables import ExecutableStore


def mesh_of(number: int) -> Mesh:
    return Mesh(np.array(jax.devices()[number : number + 1]).reshape(1, 1), ("fsdp", "tensor"))


def lowered(mesh: Mesh, factor: float = 2.0) -> jax.stages.Lowered:
    x = jax.ShapeDtypeStruct((3,), np.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(lambda x: jnp.sin(x) * factor, donate_argnums=0).lower(x)


def run(compiled: jax.stages.Compiled, mesh: Mesh) -> np.ndarray:
    return np.asarray(compiled(jax.device_put(np.arange(3, dtype=np.float32), NamedSharding(mesh, P()))))


@pytest.fixture
def store(tmp_path) -> ExecutableStore:
    return ExecutableStore(tmp_path / "store")


def test_kept_for_other_devices(store):
    first = store.load_or_compile(lowered(mesh_of(0)), mesh_of(0))
    assert first.is_new
    for number in (0, 3):
        found = store.load_or_compile(lowered(mesh_of(number)), mesh_of(number))
        assert not found.is_new
        np.testing.assert_array_equal(run(found.compiled, mesh_of(number)), run(first.compiled, mesh_of(0)))
        moved = found.portable.on(mesh_of(2))  # from what was found, as from what was compiled
        np.testing.assert_array_equal(run(moved, mesh_of(2)), run(first.compiled, mesh_of(0)))


def test_another_program_is_another_file(store, tmp_path):
    store.load_or_compile(lowered(mesh_of(0)), mesh_of(0))
    found = store.load_or_compile(lowered(mesh_of(0), 3.0), mesh_of(0))
    assert found.is_new and len(list((tmp_path / "store").glob("*.executable"))) == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b"[0]\n" + b"cos\nsystem\n(S'false'\ntR."),
        lambda path: path.write_bytes(b"nothing"),
        lambda path: os.chmod(path, 0o666),
    ],
    ids=["cut short", "other code", "not one", "writable by others"],
)
def test_what_is_not_an_own_whole_executable_is_compiled_again(store, tmp_path, harm):
    store.load_or_compile(lowered(mesh_of(0)), mesh_of(0))
    (path,) = (tmp_path / "store").glob("*.executable")
    harm(path)
    found = store.load_or_compile(lowered(mesh_of(0)), mesh_of(0))
    assert found.is_new
    np.testing.assert_allclose(run(found.compiled, mesh_of(0)), 2 * np.sin(np.arange(3)), rtol=1e-6)
    assert not store.load_or_compile(lowered(mesh_of(0)), mesh_of(0)).is_new
