"""Executables for other devices than those they were compiled for: of other nodes, or of a process started later.

JAX serializes executables but loads them for the devices they were compiled for alone. Its format names devices by id
through pickle's persistent ids, so this reads it with other devices in their places. What it uses of jaxlib (the
options' device assignment, ``deserialize_executable``) and the constructor of ``Compiled`` are not public API; they
are used here alone.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import pickle
import platform
import stat
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from mecefo_jax.config_file import replace_file
from mecefo_jax.errors import ConfigError
from mecefo_jax.locking import locked

_CANNOT = (
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    KeyError,
    EOFError,
    NotImplementedError,
    pickle.UnpicklingError,
    jax.errors.JaxRuntimeError,
)
_SETTING = "--cluster.compile_cache"
# What an executable is made of; a file that asks for anything else is none.
_TRUSTED = ("jax", "jaxlib", "numpy", "collections", "ml_dtypes")
_TRUSTED_BUILTINS = {"frozenset", "set", "slice", "tuple", "list", "dict", "getattr", "bytearray", "complex"}


@dataclasses.dataclass(frozen=True)
class Portable:
    """An executable as bytes, which can be loaded for other devices.

    It is made of one that was compiled here: on CPU, one that was loaded has lost its code, and fails only when run.
    """

    serialized: bytes
    ids: tuple[int, ...]
    """Of the devices that it was compiled for."""
    in_tree: Any
    out_tree: Any

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, mesh: Mesh) -> Self | None:
        """Of an executable compiled for ``mesh``; None where the backend cannot do that."""
        try:
            serialized, in_tree, out_tree = serialize_executable.serialize(compiled)
        except _CANNOT:
            return None
        return cls(serialized, tuple(device.id for device in mesh.devices.flat), in_tree, out_tree)

    def on(self, mesh: Mesh) -> jax.stages.Compiled | None:
        """The executable for the devices of another mesh of the same shape; None where it cannot be loaded."""
        try:
            return _load(self.serialized, self.ids, mesh, self.in_tree, self.out_tree)
        except _CANNOT:
            return None


@dataclasses.dataclass(frozen=True)
class Found:
    """What the store gives."""

    compiled: jax.stages.Compiled
    portable: Portable | None
    is_new: bool
    """Whether it had to be compiled."""


class ExecutableStore:
    """Executables on disk, for every process of this user on this kind of machine.

    JAX's own cache would do, but it compiles once for each process of a cluster on CPU, and lets only process 0 write.
    Files that others could have written are not read: loading an executable runs what it says.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        """Keep them in ``directory``, made if needed."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"{_SETTING} {directory}: cannot be made ({error.strerror}); set another directory"
            ) from error

    def load_or_compile(self, lowered: jax.stages.Lowered, mesh: Mesh) -> Found:
        """The executable of a lowered program on ``mesh``.

        One process compiles; others that want the same program wait for it.
        """
        key = _key(lowered, mesh)
        path = self._directory / f"{key}.executable"
        with locked(self._directory / key, setting=_SETTING):
            portable = self._read(path, lowered)
            compiled = None if portable is None else portable.on(mesh)
            if compiled is not None:
                return Found(compiled, portable, is_new=False)
            compiled = lowered.compile()
            portable = Portable.of(compiled, mesh)
            if portable is not None:
                with contextlib.suppress(OSError):  # the next process compiles again
                    replace_file(path, json.dumps(portable.ids).encode() + b"\n" + portable.serialized)
            return Found(compiled, portable, is_new=True)

    def _read(self, path: pathlib.Path, lowered: jax.stages.Lowered) -> Portable | None:
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
                    return None
                header, serialized = file.readline(), file.read()
            return Portable(serialized, tuple(json.loads(header)), lowered.in_tree, lowered.out_tree)
        except (OSError, ValueError, TypeError):
            return None


def open_store(setting: str) -> ExecutableStore | None:
    """The store that ``cluster.compile_cache`` names; None if it is empty."""
    return ExecutableStore(pathlib.Path(setting).expanduser()) if setting else None


def _load(serialized: bytes, ids: Sequence[int], target: Mesh, in_tree: Any, out_tree: Any) -> jax.stages.Compiled:
    """An executable compiled for the devices with these ids, on those of ``target``."""
    from jaxlib import xla_client

    pairs = dict(zip(ids, target.devices.flat, strict=True))
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

        def find_class(self, module, name):
            trusted = _TRUSTED_BUILTINS if module == "builtins" else None
            if (trusted is not None and name in trusted) or module.partition(".")[0] in _TRUSTED:
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an executable")

    unloaded, args_info, no_kwargs = Unpickler(io.BytesIO(serialized)).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def _key(lowered: jax.stages.Lowered, mesh: Mesh) -> str:
    """Names a program, the compiler and the machine."""
    device = mesh.devices.flat[0]
    parts = (
        lowered.as_text(),
        str(dict(mesh.shape)),
        jax.__version__,
        device.client.platform_version,
        device.device_kind,
        os.environ.get("XLA_FLAGS", ""),
        _processor(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


@functools.cache
def _processor() -> str:
    """What code for this processor may use."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return platform.machine() + "".join(flags)
